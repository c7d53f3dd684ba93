"""python image_values.py METADATA REGISTRY VERSION ENGINE: Helm values that name the images just pushed by digest.

METADATA is what `docker buildx bake --metadata-file` wrote. Only the standard library: it runs where images are built.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DIGEST = "containerimage.digest"


def image_values(metadata: dict[str, dict[str, str]], registry: str, version: str, engine: str) -> str:
    """The values file; KeyError where a target is missing."""
    lines = [
        "images:",
        f"  registry: {json.dumps(registry)}",
        f"  tag: {json.dumps(version)}",
        f"  engine: spo-{engine}",
        "  digests:",
        *(
            f"    {role}: {metadata[target][DIGEST]}"
            for role, target in (("light", "light"), ("judge", "judge"), ("engine", engine))
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    where, *names = sys.argv[1:]
    sys.stdout.write(image_values(json.loads(Path(where).read_text()), *names))
