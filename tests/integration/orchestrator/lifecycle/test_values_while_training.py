"""A job that trains beside its estimates: when it starts, what is dispatched meanwhile, when the estimates are over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from services.orchestrator import dispatch
from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document
from services.orchestrator.values import prompts_before_training
from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.value_pb2 import EstimateRequest, PromptValue

SAMPLES = 4
TRAIN = 6


@pytest.fixture
def job_id(context: AppContext, document: dict[str, Any]) -> str:
    """A job of six prompts in the state estimating, which trains once two of them have a value."""
    document["trainer"] = document["trainer"] | {"batch_size": 2 * SAMPLES}
    document["value"] = {"start": "first_batch"}
    return estimating(context, document)


def estimating(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    context.jobs.transition(job_id, JobState.VALIDATING, "test")
    wait_until(lambda: validated(context, job_id), "the job is validated")
    return job_id


def validated(context: AppContext, job_id: str) -> bool:
    """The tokenizer is tried in a process of its own, which takes a while."""
    with suppress(NotReady):
        context.runner.preparation.validate(job_id)
    return context.jobs.state(job_id) is JobState.ESTIMATING


def give(context: AppContext, job_id: str, count: int, *, provisional: bool = False, successes: int = 1) -> list[str]:
    """Plays value-estimation: the first `count` prompts have a value."""
    key = (redis_keys.provisional_values if provisional else redis_keys.run_values)(job_id)
    given = [problem.problem_id for problem in context.library.load(context.jobs.spec(job_id).tasks).train][:count]
    for prompt_id in given:
        value = PromptValue(prompt_id=prompt_id, samples=8, successes=successes, provisional=provisional)
        context.redis.hset(key, prompt_id, value.SerializeToString())
        if not provisional:
            context.redis.hdel(redis_keys.provisional_values(job_id), prompt_id)
    return given


def step(context: AppContext, job_id: str) -> JobState:
    """One step of the job's life, as the runner's loop takes it."""
    context.runner._step(job_id, context.jobs.state(job_id))
    return context.jobs.state(job_id)


def dispatched(context: AppContext, job_id: str) -> list[PromptGroup]:
    found: Any = context.redis.xrange(redis_keys.prompts(job_id))
    return [PromptGroup.FromString(fields[b"payload"]) for _, fields in found]


@pytest.mark.parametrize("provisional", [False, True])
def test_training_starts_with_the_first_batch_of_values_and_goes_on_beside_the_others(
    context: AppContext, job_id: str, provisional: bool
) -> None:
    assert step(context, job_id) is JobState.ESTIMATING
    give(context, job_id, 1, provisional=provisional)
    assert step(context, job_id) is JobState.ESTIMATING
    give(context, job_id, 2, provisional=provisional)
    assert step(context, job_id) is JobState.RUNNING

    progress = job_document(context, job_id).progress
    assert (progress.values_pending, progress.values_total) == (True, TRAIN)
    assert (progress.values_done, progress.values_provisional) == ((0, 2) if provisional else (2, 0))
    give(context, job_id, TRAIN)
    step(context, job_id)
    step(context, job_id)

    assert not job_document(context, job_id).progress.values_pending
    told = [event.body for event in context.jobs.events(job_id) if event.kind == "estimated"]
    assert told == [{"done": TRAIN, "total": TRAIN}]


def test_a_restarted_orchestrator_asks_for_what_was_not_asked_yet_and_for_nothing_twice(
    open_context: Callable[..., AppContext], context: AppContext, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.orchestrator.values.CHUNK", 4)
    committed = context.jobs.commit
    monkeypatch.setattr(context.jobs, "commit", lambda commit, **options: committed(_dying(commit), **options))
    give(context, job_id, 2)
    with pytest.raises(KeyboardInterrupt):
        step(context, job_id)
    monkeypatch.undo()
    context.jobs.transition(job_id, JobState.RUNNING, "test", writes=[_pending(job_id)])

    successor = open_context()
    step(successor, job_id)
    step(successor, job_id)

    entries: Any = successor.redis.xrange(redis_keys.estimates())
    asked = [EstimateRequest.FromString(fields[b"payload"]).prompt.prompt_id for _, fields in entries]
    train = [problem.problem_id for problem in successor.library.load(successor.jobs.spec(job_id).tasks).train]
    assert asked == train[2:]


def _dying(commit: Any) -> Any:
    """The first chunk of requests is written; the orchestrator is killed before the second one."""
    if any("estimates_published" in map(str, write) and 6 in write for write in commit.writes):
        raise KeyboardInterrupt
    return commit


def _pending(job_id: str) -> tuple[str, str, str, int]:
    return ("HSET", redis_keys.job_record(job_id), "estimates_pending", 1)


def test_only_prompts_with_a_value_are_dispatched_each_in_its_turn(
    context: AppContext, peers: ServiceDoubles, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "PAUSE_PER_SECOND", 0.0)
    first = give(context, job_id, 2, provisional=True)
    step(context, job_id)
    peers.replay.admissible = 4 * SAMPLES
    assert context.dispatcher.dispatch(job_id) == 4
    assert Counter(group.prompt.prompt_id for group in dispatched(context, job_id)) == dict.fromkeys(first, 2)
    everything = give(context, job_id, TRAIN)
    peers.replay.admissible = 100 * SAMPLES
    context.dispatcher.dispatch(job_id)

    groups = dispatched(context, job_id)
    assert [group.group_id for group in groups] == [f"{job_id}-{number}" for number in range(len(groups))]
    later = Counter(group.prompt.prompt_id for group in groups[4:])
    assert set(later) == set(everything)
    assert max(later.values()) - min(later.values()) <= 2


def test_nothing_to_dispatch_is_a_fault_only_once_the_estimates_are_over(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["value"] = {"unsolved": "drop", "start": "first_batch"}
    document["trainer"] = document["trainer"] | {"batch_size": 2 * SAMPLES}
    job_id = estimating(context, document)
    give(context, job_id, 2, successes=0)
    step(context, job_id)
    peers.replay.admissible = 4 * SAMPLES

    assert context.dispatcher.dispatch(job_id) == 0
    give(context, job_id, TRAIN, successes=0)
    step(context, job_id)
    with pytest.raises(PreconditionFailed) as refused:
        context.dispatcher.dispatch(job_id)
    assert refused.value.code == "no_prompts"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 100),
        ({"value": {"start": "first_batch"}}, 8),
        ({"value": {"sequential": {}}}, 8),
        ({"value": {"sequential": {}, "start": "all"}}, 100),
        ({"value": {"sequential": {}, "start_share": 0.5}}, 50),
        ({"value": {"sequential": {}}, "trainer": {"steps": 0}}, 100),
        ({"value": {"sequential": {}, "pivotal": {}}}, 100),
        ({"value": {"sequential": {}}, "trainer": {"batch_size": 4096}}, 100),
        ({"value": {"sequential": {}}, "replay": {"mix": [{"source": "reference", "share": 1.0}]}}, 100),
        (
            {
                "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
                "replay": {"unit": "group", "mix": [{"source": "online", "share": 1.0}]},
            },
            0,
        ),
    ],
    ids=[
        "a fixed number",
        "a fixed number, early",
        "rounds",
        "all",
        "a share",
        "a probe",
        "pivotal tokens",
        "a large batch",
        "nothing live",
        "no value is read",
    ],
)
def test_how_many_prompts_need_a_value_before_training(changes: dict[str, Any], expected: int) -> None:
    document = {"model": {"path": "/pi0"}, "rollout": {"samples_per_prompt": SAMPLES}, **changes}
    document["trainer"] = {"batch_size": 8 * SAMPLES} | changes.get("trainer", {})

    assert prompts_before_training(parse_job_spec(document), 100) == expected
