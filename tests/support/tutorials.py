"""Tutorials run from their text: each `bash` and `python` block in its order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
# Those whose jobs have to train.
TRAINING = ("first_job", "own_problems", "own_reward")
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMES = "times_of_blocks"
# The blocks are as people type them; `spo` is the one of this tree.
PRELUDE = f"""set -euo pipefail
spo() {{ "{sys.executable}" -m spo.cli "$@"; }}
python() {{ "{sys.executable}" "$@"; }}
"""


def blocks(name: str) -> list[tuple[str, str]]:
    """The blocks of a tutorial that are run: language and text."""
    return FENCE.findall((FOLDER / f"{name}.md").read_text())


def script(name: str) -> str:
    """The whole tutorial as one script; a block of Python is a program of its own."""
    parts = [PRELUDE]
    for language, text in blocks(name):
        parts.append(text if language == "bash" else f"python - <<'PROGRAM'\n{text}PROGRAM\n")
    # `times` of a shell's children, before and after each block.
    return f"times >> {TIMES}\n".join([*parts, ""])


def run_tutorial(name: str, url: str, folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """What came of all its blocks, in a folder and with the API at an address."""
    environment = {
        **{known: os.environ[known] for known in ("PATH", "HOME", "TMPDIR") if known in os.environ},
        **{"PYTHONPATH": str(ROOT), "SPO_API_URL": url, "NO_COLOR": "1", "COLUMNS": "200", "LC_ALL": "C.UTF-8"},
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"},
    }
    return subprocess.run(
        ["bash", "-c", script(name)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
