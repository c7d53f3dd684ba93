"""The tutorials of the day, run from their text: each `bash` and `python` block in its order, in a folder per tutorial.

What they submit is accepted by a really served orchestrator; no job trains here: the tutorials whose jobs do are run in
tests/e2e/live.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo.spec.job_spec import parse_job_spec
from spo.testing.runs import write_model_without_weights
from tests.support.budget import sampled
from tests.support.tutorials import FOLDER, TIMES, TRAINING, blocks, run_tutorial

TUTORIALS = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SECONDS = 300
CLOCK = re.compile(r"(\d+)m([\d.]+)s")
SAID = re.compile(r"^Processor time of (?:the blocks above, in their order|the block above): (.*) s$", re.MULTILINE)
# The last line of each tutorial that is run here; those that train end with what was learnt (tests/e2e/live).
FIGURES = {
    "from_python": r"cancelled at step 3 of 20",
    "from_trl_and_verl": r"10 settings carried over",
    "own_agent": r"64 games; tried by hand: 3 guesses, reward 1\.0",
    # Two million parameters at most, at 16 bytes each and what a forward keeps.
    "own_model": r"0\.[0-9]{2} GB of 24",
    "own_logs": r"2 responses stored",
    "stuck_reward": r"right responses that the rule takes: 0 -> 1",
}
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


def test_each_tutorial_ends_with_a_figure_that_a_test_holds() -> None:
    assert sorted([*FIGURES, *TRAINING]) == TUTORIALS


@pytest.fixture
def url(open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], document: dict[str, Any]) -> str:
    """A platform whose one job has taken three of its 20 steps."""
    context = open_context()
    job_id = context.jobs.submit(parse_job_spec(document))
    for step in (1, 2, 3):
        point = {"step": step, "loss": 0.5, "reward": -0.5}
        context.redis.zadd(own_keys.job_metrics(job_id), {json.dumps(point): step})
    return serve(context)


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
        *_, last = ["", *done.stdout.splitlines()]
        if done.returncode or not re.fullmatch(FIGURES[name], last):
            failed[name] = done.stdout[-1500:] + done.stderr[-3000:]
    assert failed == {}
