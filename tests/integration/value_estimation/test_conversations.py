"""Conversations under pi0: values of actions alone, no continuation from the middle, adopted as they were sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.value_estimation.samples import SampleMaker, StoredImport
from services.value_estimation.workers import PivotalWorker
from spo import redis_keys
from spo.errors import InvalidInput, PreconditionFailed
from spo.experience.columns import StoredTrajectory
from spo.model.chat import segments_of_mask, turns
from spo.model.logprobs import load_policy, response_logprobs
from spo.rpc.client import RpcClient
from spo.testing.runs import RIGHT, WRONG, Surroundings
from spo.v1 import value_service_pb2 as wire
from spo.v1.prompt_pb2 import SOURCE_REFERENCE, Prompt, Sampling
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Segment, Trajectory
from spo.v1.value_pb2 import PivotalRequest, PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Verdict

RUN = "job_SPOKEN"
SAID = "print(print("
PROMPT = Prompt(prompt_id="p" * 64, text="sum of the even numbers", tests_digest="t", response_format="raw")
SPOKEN = Prompt(prompt_id="p" * 64, text=PROMPT.text, tests_digest="t", response_format="raw", environment="retry")


@pytest.fixture
def around(surroundings: Callable[..., Surroundings]) -> Surroundings:
    made = surroundings(prompts_in_flight=1, patience_seconds=5)
    made.start(RUN, value={"pivotal": {"rollouts": 4, "sources": ["reference"]}})
    value = PromptValue(prompt_id=PROMPT.prompt_id, samples=40, successes=10)
    made.client.hset(redis_keys.run_values(RUN), PROMPT.prompt_id, value.SerializeToString())
    return made


@pytest.fixture
def maker(around: Surroundings) -> SampleMaker:
    reference = around.references.of(RUN)
    return SampleMaker(RUN, reference, around.clients, around.references.spec(RUN).tasks.reward)


def conversation(maker: SampleMaker) -> Trajectory:
    """A wrong program, what an environment says of it, and the right one."""
    reference = maker.reference
    end = int(reference.tokenizer.eos_token_id)
    said = [
        (SEGMENT_KIND_ACTION, WRONG, [*reference.tokenizer.encode(WRONG, add_special_tokens=False), end]),
        (
            SEGMENT_KIND_OBSERVATION,
            SAID,
            reference.tokenizer.encode(SAID, add_special_tokens=False),
        ),
        (SEGMENT_KIND_ACTION, RIGHT, [*reference.tokenizer.encode(RIGHT, add_special_tokens=False), end]),
    ]
    return Trajectory(
        trajectory_id="traj_spoken",
        run_id=RUN,
        group_id="group-1",
        prompt_id=PROMPT.prompt_id,
        source=SOURCE_REFERENCE,
        prompt_token_ids=[1, 2, 3],
        response_token_ids=[token for _, _, tokens in said for token in tokens],
        response_text="".join(text for _, text, _ in said),
        segments=[Segment(kind=kind, tokens=len(tokens), characters=len(text)) for kind, text, tokens in said],
        finish_reason=FINISH_REASON_STOP,
        verdict=Verdict(outcome=OUTCOME_ACCEPTED, judge_version="test"),
        reward=0.0,
    )


def test_log_probs_and_advantages_are_those_of_actions(around: Surroundings, maker: SampleMaker) -> None:
    spoken = conversation(maker)
    whole = [[*spoken.prompt_token_ids], [*spoken.response_token_ids]]
    every = response_logprobs(load_policy(around.model_path, "float32"), [whole[0]], [whole[1]], 4096)[0]
    maker.score([spoken])
    first, second = spoken.segments[0].tokens, spoken.segments[0].tokens + spoken.segments[1].tokens
    assert list(spoken.reference_logprobs[first:second]) == [0.0] * (second - first)
    expected = [*every[:first], *([0.0] * (second - first)), *every[second:]]
    assert list(spoken.reference_logprobs) == pytest.approx(expected, rel=1e-5)
    around.store.append(RUN, [spoken])
    values = RpcClient("value-estimation", around.address, ValueServiceStub)
    request = wire.GetTokenValuesRequest(run_id=RUN, trajectory_ids=[spoken.trajectory_id])
    found: wire.GetTokenValuesResponse = values.call("GetTokenValues", request, 30)
    assert list(found.trajectories[0].advantages) == [0.0] * len(whole[1]), "pi0 under itself, observations included"
    torn = wire.TokenSequence(prompt_token_ids=whole[0], response_token_ids=whole[1], segments=spoken.segments[:2])
    with pytest.raises(InvalidInput) as refusal:
        values.call("ComputeReferenceLogprobs", wire.ComputeReferenceLogprobsRequest(run_id=RUN, sequences=[torn]), 30)
    values.close()
    assert refusal.value.code == "unusable_trajectory"


def test_nothing_goes_on_from_the_middle_of_a_conversation(around: Surroundings, maker: SampleMaker) -> None:
    with pytest.raises(InvalidInput, match="retry") as refusal:
        maker.sample_reference(SPOKEN, Sampling(samples=1), "name", prefix=[4, 5])
    assert refusal.value.code == "prefix_of_conversation"
    values = RpcClient("value-estimation", around.address, ValueServiceStub)
    request = wire.GetCalibrationRequest(run_id=RUN, continuations=2, prompts=[SPOKEN])
    with pytest.raises(PreconditionFailed, match="retry"):
        values.call("GetCalibration", request, 30)
    values.close()
    worker = PivotalWorker(around.client, around.references, around.clients, around.settings, "w")
    with pytest.raises(InvalidInput, match="retry"):
        worker.annotate(PivotalRequest(run_id=RUN, prompt=SPOKEN), threading.Event())
    assert around.client.hget(redis_keys.run_pivotal(RUN), SPOKEN.prompt_id) == b"0", "no job waits for it"
    around.client.delete(redis_keys.run_pivotal(RUN))
    spoken = conversation(maker)
    maker.score([spoken])
    around.store.append(RUN, [spoken])
    worker.annotate(PivotalRequest(run_id=RUN, prompt=PROMPT), threading.Event())
    assert around.engine.calls == [], "a conversation that an import brought is not searched"
    assert maker.import_human(SPOKEN, [RIGHT], 44) == []


def test_stored_conversations_are_adopted_token_by_token_or_not_at_all(
    maker: SampleMaker, around: Surroundings
) -> None:
    adopt = StoredImport(maker, around.references.spec(RUN), "test")
    spoken = conversation(maker)
    maker.score([spoken])
    (found,) = adopt.trajectories(SPOKEN, [StoredTrajectory(spoken, SPOKEN, "float32")])
    assert found.prompt_token_ids == spoken.prompt_token_ids, "the prompt holds what the environment said first"
    assert (found.response_token_ids, found.segments) == (spoken.response_token_ids, spoken.segments)
    assert found.reference_logprobs == spoken.reference_logprobs

    imported = conversation(maker)
    imported.reference_hash = maker.reference.model_hash
    mask = [turn.is_action for turn in turns(spoken) for _ in range(turn.first, turn.end)]
    del imported.segments[:]
    imported.segments.extend(segments_of_mask(mask))
    (found,) = adopt.trajectories(SPOKEN, [StoredTrajectory(imported, PROMPT)])
    assert [turn.text for turn in turns(found)] == [WRONG, SAID, RIGHT]
    assert list(found.reference_logprobs) == pytest.approx(list(spoken.reference_logprobs))

    lying, foreign, elsewhere = conversation(maker), conversation(maker), conversation(maker)
    for row in (lying, foreign, elsewhere):
        row.reference_hash = maker.reference.model_hash
    lying.response_token_ids[0] += 1
    foreign.reference_hash = "f" * 64
    other = Prompt(prompt_id="p" * 64, text=PROMPT.text, tests_digest="t", environment="game")
    rows = [(lying, SPOKEN), (foreign, SPOKEN), (elsewhere, other)]
    assert adopt.trajectories(SPOKEN, [StoredTrajectory(row, prompt) for row, prompt in rows]) == []
    assert adopt.trajectories(PROMPT, [StoredTrajectory(elsewhere, SPOKEN)]) == []


def test_a_verdict_of_another_judge_is_made_again(maker: SampleMaker, around: Surroundings, tmp_path: Path) -> None:
    stored = Trajectory(
        trajectory_id="traj_1",
        run_id="theirs",
        prompt_id=PROMPT.prompt_id,
        response_text=WRONG,
        finish_reason=FINISH_REASON_STOP,
        verdict=Verdict(outcome=OUTCOME_ACCEPTED, judge_version="an older one"),
        reward=0.0,
    )
    (found,) = StoredImport(maker, around.references.spec(RUN), "test").trajectories(
        PROMPT, [StoredTrajectory(stored, PROMPT)]
    )
    assert found.reward == -1.0
