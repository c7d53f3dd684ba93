"""pi0 of the toy contest, built once per recipe: `python -m spo.demo.reference_model CACHE_FOLDER [standard|hard]`.

Runs in a process of its own because it imports torch. Prints one JSON object per line: {"done", "total"} while it
trains and {"folder"} at the end.
"""

import json
import os
import sys
from pathlib import Path
from typing import TextIO, get_args

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
    cache, difficulty = Path(arguments[0]), (arguments[1:] or ["standard"])[0]
    if difficulty not in get_args(Difficulty):
        raise SystemExit(f"difficulty must be one of {', '.join(get_args(Difficulty))}")
    stdout = _own_stdout()

    def say(**line: int | str) -> None:
        print(json.dumps(line), file=stdout, flush=True)

    def say_progress(done: int, total: int) -> None:
        if done % PROGRESS_EVERY == 0 or done == total:
            say(done=done, total=total)

    folder = cached_reference_model(cache, "hard" if difficulty == "hard" else "standard", say_progress)
    say(folder=str(folder.absolute()))


if __name__ == "__main__":
    main(sys.argv[1:])
