"""The numbers that stand for cards in the virtual cluster: how they are divided, and what an engine does with time."""

from __future__ import annotations

import pytest

from benchmarks.virtual_cluster import LOADS, Engine, Group, Load, Pace, Response, document_of, undisturbed
from spo.spec.job_spec import parse_job_spec
from spo.v1.prompt_pb2 import PromptGroup


def pace_of(load: Load) -> Pace:
    return Pace.of(load, parse_job_spec(document_of(load)))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_every_card_has_work_and_neither_side_could_do_twice_of_what_the_other_can(load: Load) -> None:
    pace = pace_of(load)
    assert pace.ranks + pace.replicas * pace.tensor_parallel == load.cards
    assert load.batch % pace.ranks == 0
    assert 0.5 < pace.trained / pace.sampled < 2


def test_a_response_is_as_old_as_its_first_token_whatever_comes_later() -> None:
    engine = Engine(pace_of(LOADS[0]), version=3)
    early, late = Response(10_000), Response(10_000)
    engine.groups = [Group(None, PromptGroup(), [early, late])]  # type: ignore[arg-type]
    engine.waiting = [early]
    engine.decode(1.0)
    engine.version = 4
    engine.waiting = [late]
    engine.decode(1.0)
    assert (early.first, late.first) == (3, 4)


def test_an_engine_decodes_nothing_while_it_loads_weights_and_is_idle_without_prompts() -> None:
    engine = Engine(pace_of(LOADS[0]))
    engine.waiting = [Response(10_000)]
    engine.loading = 2.0
    engine.decode(2.0)
    assert engine.made == 0
    engine.decode(1.0)
    assert engine.made > 0
    engine.running.clear()
    engine.decode(5.0)
    assert engine.idle_seconds == 5.0


def test_an_engine_that_always_has_prompts_is_as_fast_as_the_plan_takes_it_to_be() -> None:
    load = LOADS[0]
    pace = pace_of(load)
    assert pace.replicas * undisturbed(pace, load, 2_000.0) == pytest.approx(pace.sampled, rel=0.15)
