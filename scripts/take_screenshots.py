"""Photograph the pages of the web interface that docs/web_page.md shows, with a live job on them, into docs/images.

`make screenshots` runs it; the name of a folder as its argument puts them there. A shortened job of toy/with_people
trains while the pictures are taken.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from spo.client import Client
from spo.demo.demo import WITH_PEOPLE, fresh_demo, model_of
from spo.spec.section import read_spec

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1280, 860
LARGEST_BYTES = 150_000
PATIENCE_SECONDS = 420.0
SHORT: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 40, "evaluation_problems": 24},
    "value": {"samples": 32, "pivotal": {"rollouts": 8, "trajectories_per_prompt": 1, "budget_rollouts": 800}},
    "trainer": {"steps": 40, "update_interval": 5, "checkpoint_interval": 10},
    "evaluation": {"interval_steps": 10, "samples": 10},
}


def main() -> None:
    """Run a job, photograph it from its middle on; exits with what went wrong."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    recipe = read_spec(WITH_PEOPLE)
    document = recipe | {name: {**recipe[name], **changes} for name, changes in SHORT.items()}
    document |= {"name": "the toy contest", "labels": {"recipe": "toy/with_people", "team": "examples"}}
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is not installed; `make system-deps` installs it")
    with fresh_demo("screenshots", model_of(document)) as demo:
        demo.platform.wait_until_ready()
        model = demo.build.result(PATIENCE_SECONDS)
        url = demo.platform.http_url
        with Client(url) as client, sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
            browser = playwright.chromium.launch_persistent_context(
                profile,
                executable_path=chromium,
                args=["--no-sandbox", "--no-proxy-server"],
                base_url=url,
                viewport={"width": WIDTH, "height": HEIGHT},
            )
            document["model"] = {**document["model"], "path": str(model)}
            job_id = client.submit(document).id
            _wait(lambda: client.get(job_id).progress.step >= 24, "the job is half done")
            _photograph(browser.new_page(), job_id, folder)
            browser.close()


def _photograph(page: Page, job_id: str, folder: Path) -> None:
    page.set_default_timeout(120_000)
    job = f"/jobs/{job_id}"
    page.goto(job)
    page.locator("#curve-pass canvas").wait_for()
    page.locator("#curve-loss canvas").wait_for()
    page.locator("#curve-idle canvas").wait_for()
    _save(page, folder / "job.png")
    page.locator("#slow").wait_for()
    page.evaluate("document.getElementById('slow').scrollIntoView(); scrollBy(0, -70)")
    _save(page, folder / "job-why-slow.png")
    page.goto(f"{job}/trajectories?source=online")
    page.locator("#trajectories tbody a").first.click()
    page.locator("#curve-q canvas").wait_for()
    page.get_by_role("group", name="Tokens").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Judge it again").click()
    page.locator("#tests table").wait_for()
    _save(page, folder / "trajectory.png", whole=True)


def _save(page: Page, path: Path, *, whole: bool = False) -> None:
    """A picture of few colours, as small as the repository wants it."""
    if whole:
        page.evaluate("scrollTo(0, 0)")
    picture = Image.open(BytesIO(page.screenshot(full_page=whole))).convert("RGB")
    for colours in (256, 128, 64, 32):
        picture.quantize(colours).save(path, optimize=True)
        if path.stat().st_size < LARGEST_BYTES:
            break
    print(f"{path.name}: {path.stat().st_size // 1000} KB", flush=True)


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE_SECONDS:g} s in vain until {what}")
        time.sleep(1)


if __name__ == "__main__":
    main()
