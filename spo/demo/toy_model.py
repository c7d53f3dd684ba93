"""pi0 of the toy contest for people: built once in a process of its own, found by `spo job submit` and the page.

<state path>/cache/models/toy-<difficulty>-<digest>/     a folder that transformers and vLLM load
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import Progress

from spo.console import error_console
from spo.demo.demo import MODEL_SECONDS, ReferenceModelBuild
from spo.errors import InvalidInput, NotReady
from spo.service.settings import PlatformSettings
from spo.tasks.toy.built import newest_model

POLL_SECONDS = 0.5


def toy_model(difficulty: str, state_path: Path | None = None) -> Path:
    """The folder of pi0 below the state path, built with a bar on standard error where it is not there: a minute.

    Raises NotReady after MODEL_SECONDS, InternalError when the build failed.
    """
    state_path = (state_path or PlatformSettings().state_path).absolute()
    if known := newest_model(state_path / "cache" / "models", difficulty):
        return known
    build = _build(difficulty, state_path)
    try:
        with Progress(console=error_console, transient=True, disable=not error_console.is_terminal) as progress:
            bar = progress.add_task(f"pi0 of the toy contest ({difficulty})", total=None)
            for _ in range(round(MODEL_SECONDS / POLL_SECONDS)):
                if folder := build.result(POLL_SECONDS):
                    return folder
                progress.update(bar, completed=build.done, total=build.total or None)
    finally:
        build.stop()
    raise NotReady(f"pi0 was not built within {MODEL_SECONDS:g} s; see {build.log_path}", code="model_timeout")


def copy_toy_model(difficulty: str, destination: Path, state_path: Path | None = None) -> Path:
    """pi0 in a folder of one's own, which must not be there yet. Raises InvalidInput, and as `toy_model`."""
    if destination.exists():
        raise InvalidInput(f"{destination} is there already; name a folder to make")
    built = toy_model(difficulty, state_path)
    destination.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.absolute().parent) as staging:
        shutil.copytree(built, Path(staging) / "model")
        os.replace(Path(staging) / "model", destination)
    return destination.absolute()


@contextmanager
def toy_model_in_background() -> Iterator[None]:
    """Build pi0 while the block runs, as a guest of this machine; not where it is there or torch is not."""
    state_path = PlatformSettings().state_path.absolute()
    if newest_model(state_path / "cache" / "models", "standard") or importlib.util.find_spec("torch") is None:
        yield
        return
    build = _build("standard", state_path, niceness=19)
    try:
        yield
    finally:
        build.stop()


def _build(difficulty: str, state_path: Path, niceness: int = 0) -> ReferenceModelBuild:
    cache = state_path / "cache"
    return ReferenceModelBuild(cache / "models", difficulty, cache / "toy-model.log", niceness)
