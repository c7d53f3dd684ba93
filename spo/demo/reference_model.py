"""pi0 of a demo, built once: `python -m spo.demo.reference_model CACHE_FOLDER [standard|hard|smollm2-135m]`.

The first two are pi0 of the toy contest, trained here; the third is a real model, see `smollm2.py`.

Runs in a process of its own because it imports torch. Prints one JSON object per line: {"done", "total"} while it
trains and {"folder"} at the end.
"""

import json
import os
import sys
from pathlib import Path
from typing import TextIO, get_args

from spo.demo.real import MODEL as SMOLLM2
from spo.demo.smollm2 import cached_smollm2
from spo.errors import SpoError
from spo.tasks.toy.corpus import Difficulty
from spo.tasks.toy.model import StepCallback, build_reference_model, recipe_digest

PROGRESS_EVERY = 10


def cached_reference_model(cache: Path, difficulty: Difficulty, progress: StepCallback) -> Path:
    """The folder of pi0 below cache; its name is a digest of the recipe, so a changed recipe is built anew."""
    folder = cache / f"toy-{difficulty}-{recipe_digest(difficulty)}"
    if not folder.exists():
        build_reference_model(folder, difficulty, progress=progress)
    return folder


def _own_stdout() -> TextIO:
    """The standard output for our lines alone: libraries that print there (DeepSpeed logs) get stderr instead."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours


def main(arguments: list[str]) -> None:
    """Build or find the model and print where it is."""
    cache, name = Path(arguments[0]), (arguments[1:] or ["standard"])[0]
    known = (*get_args(Difficulty), SMOLLM2)
    if name not in known:
        raise SystemExit(f"the model must be one of {', '.join(known)}")
    stdout = _own_stdout()

    def say(**line: int | str) -> None:
        print(json.dumps(line), file=stdout, flush=True)

    def say_progress(done: int, total: int) -> None:
        if done % PROGRESS_EVERY == 0 or total < PROGRESS_EVERY or done == total:
            say(done=done, total=total)

    try:
        if name == SMOLLM2:
            folder = cached_smollm2(cache, say_progress)
        else:
            folder = cached_reference_model(cache, "hard" if name == "hard" else "standard", say_progress)
    except SpoError as error:
        say(error=error.message)
        raise SystemExit(error.message) from error
    say(folder=str(folder.absolute()))


if __name__ == "__main__":
    main(sys.argv[1:])
