"""The release before this one, as its commit has it: for tests that run it beside today's code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The last commit before what is stored had a schema version.
EARLIER = "25965032aba20619055933380d567c3cf91785dd"


def earlier_release(folder: Path) -> Path:
    """Its source below a folder; skips loudly where the clone has no history: nothing here could install one."""
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{EARLIER}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip(f"NOT TESTED, upgrades from {EARLIER[:8]}: this clone lacks its history (git fetch --unshallow)")
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", EARLIER, "spo", "services"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
