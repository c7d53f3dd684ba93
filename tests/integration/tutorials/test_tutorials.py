"""The tutorials of the day, run from their text: each `bash` and `python` block in its order, in a folder per tutorial.

What they submit is accepted by a really served orchestrator; no job trains here: the tutorials whose jobs do are run in
tests/e2e/live.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.container import AppContext
from spo.testing.runs import write_model_without_weights
from tests.support.budget import sampled
from tests.support.tutorials import FOLDER, TIMES, TRAINING, blocks, run_tutorial

TUTORIALS = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SECONDS = 300
CLOCK = re.compile(r"(\d+)m([\d.]+)s")
SAID = re.compile(r"^Processor time of (?:the blocks above, in their order|the block above): (.*) s$", re.MULTILINE)
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 128, "num_key_value_heads": 2}


def seconds_of_blocks(text: str) -> list[float]:
    """Processor seconds of each block, from what `times` has written after them."""
    # Of each pair of lines the second is that of the children; the first pair is from before the first block.
    pairs = [CLOCK.findall(line) for line in text.splitlines()[1::2]]
    sums = [sum(60 * int(minutes) + float(seconds) for minutes, seconds in pair) for pair in pairs]
    return [after - before for before, after in pairwise(sums)]


def test_each_page_says_how_long_each_of_its_blocks_takes() -> None:
    for name in TUTORIALS:
        said = SAID.search((FOLDER / f"{name}.md").read_text())
        assert said, name
        assert len(re.findall(r"[\d.]+", said[1])) == len(blocks(name)), name


def test_each_tutorial_has_something_to_run_and_is_in_the_index() -> None:
    index = (FOLDER / "index.md").read_text()
    for name in TUTORIALS:
        assert blocks(name), name
        assert f"({name}.md)" in index


@pytest.fixture
def url(open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], tmp_path: Path) -> str:
    return serve(open_context())


def _children_seconds() -> float:
    """Processor time of the processes that have been waited for."""
    used = os.times()
    return used.children_user + used.children_system


@pytest.mark.slow
def test_tutorials_do_what_they_say(url: str, tmp_path: Path) -> None:
    failed, before = {}, _children_seconds()
    for name in sampled(
        [name for name in TUTORIALS if name not in TRAINING], 3, lambda name: [f"docs/tutorials/{name}.md"]
    ):
        place = tmp_path / name
        place.mkdir()
        write_model_without_weights(place / "pi0", **SIZES)
        done = run_tutorial(name, url, place, SECONDS)
        spent, before = _children_seconds() - before, _children_seconds()
        # The figures of docs/tutorials/index.md, and of the pages.
        print(f"{name}: {spent:.0f} CPU seconds")
        print(", ".join(f"{each:.1f}" for each in seconds_of_blocks((place / TIMES).read_text())))
        if done.returncode:
            failed[name] = done.stdout[-1500:] + done.stderr[-3000:]
    assert failed == {}
