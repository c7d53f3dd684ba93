"""The pictures of docs/web_page.md are taken anew, from a platform whose job trains: what `make screenshots` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SECONDS = 900

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.cpu_seconds(600),
    pytest.mark.timeout(SECONDS + 60),
]


def test_the_pictures_of_the_documents_can_be_taken_anew(tmp_path: Path) -> None:
    taken = tmp_path / "pictures"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "take_screenshots.py", taken],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    named = {path.name for path in (ROOT / "docs" / "images").glob("*.png")}
    assert {path.name for path in taken.iterdir()} == {"job.png", "job-why-slow.png", "trajectory.png"} <= named
    for path in taken.iterdir():
        picture = Image.open(path)
        assert picture.width == 1280
        # No page that stayed empty.
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) >= 16
        assert path.stat().st_size > 20_000
