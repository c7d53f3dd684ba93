"""The process that builds pi0 speaks JSON lines, whatever its libraries print."""

from __future__ import annotations

import json
import subprocess
import sys

NOISY = """
import sys
from spo.demo import reference_model
def build(folder, difficulty, progress):
    print("[2026-01-01 00:00:00] a library greets on stdout", flush=True)
    progress(10, 10)
    folder.mkdir(parents=True)
reference_model.build_reference_model = build
# The easier one is shipped and not built.
reference_model.main([sys.argv[1], "hard"])
"""


def test_what_libraries_print_never_mixes_with_its_lines(tmp_path: object) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", NOISY, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )

    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    assert lines[0] == {"done": 10, "total": 10}
    assert lines[1]["folder"].startswith(str(tmp_path))
    assert "a library greets" in finished.stderr
