"""What was sampled is what is trained: conversations from the stream to the trainer's tensors and into the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, given, settings, strategies as st
from ulid import ULID

from services.replay_buffer.ingest import IngestWorker, ReferenceScores
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from services.trainer.batches import TrainingSample, faults, token_batch
from spo import redis_keys
from spo.errors import InvalidInput
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.messaging.streams.entries import publish
from spo.messaging.streams.stage import Consumer
from spo.model.chat import action_mask
from spo.rpc.client import RpcClient
from spo.spec.job_spec import RewardSpec
from spo.testing.runs import PROMPTS, RUN, ScorerDouble, conversation, served_scorer, start_run
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, PromptGroup
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import (
    SEGMENT_KIND_ACTION,
    SEGMENT_KIND_OBSERVATION,
    RolloutGroup,
    Segment,
    Trajectory,
)
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Verdict

# (sampled by the policy, tokens) of each turn; a first action of at least a token makes it a conversation.
turns_drawn = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=5).map(lambda rest: [(True, 2), *rest])


@pytest.fixture
def values() -> Iterator[RpcClient]:
    with served_scorer(ScorerDouble()) as address:  # type: ignore[abstract]
        client = RpcClient("value-estimation", address, ValueServiceStub)
        yield client
        client.close()


def spoken(run_id: str, number: int, turns: list[tuple[bool, int]]) -> Trajectory:
    """A judged trajectory of these turns, whose tokens and texts are all different."""
    kinds = {True: SEGMENT_KIND_ACTION, False: SEGMENT_KIND_OBSERVATION}
    texts = [f"<{number}.{index}>" for index in range(len(turns))]
    tokens = sum(count for _, count in turns)
    segments = [
        Segment(kind=kinds[action], tokens=count, characters=len(text), label="python")
        for (action, count), text in zip(turns, texts, strict=True)
    ]
    mask = action_mask(segments, tokens)
    return Trajectory(
        trajectory_id=f"traj_{number}",
        run_id=run_id,
        group_id=f"group-{number}",
        prompt_id=PROMPTS[number % len(PROMPTS)],
        source=SOURCE_ONLINE,
        prompt_token_ids=[1, 2, number + 3],
        response_token_ids=[100 + 50 * number + token for token in range(tokens)],
        sampling_logprobs=(-0.25 * mask).tolist(),
        response_text="".join(texts),
        segments=segments,
        verdict=Verdict(outcome=OUTCOME_ACCEPTED),
        reward=0.0,
    )


def worker_of(client: redis.Redis, values: RpcClient) -> IngestWorker:
    consumer = Consumer(client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest-1", 5.0)
    return IngestWorker(ReplayStore(client), consumer, ReferenceScores(values, 5.0), 16)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(turns_drawn, min_size=4, max_size=4))
def test_trained_tokens_are_sampled_tokens_for_every_conversation(
    redis_client: redis.Redis, values: RpcClient, tmp_path: Path, drawn: list[list[tuple[bool, int]]]
) -> None:
    redis_client.flushdb()
    mix = [{"source": "online", "share": 1}]
    start_run(redis_client, trainer={"batch_size": 4}, replay={"min_online": 0, "online_capacity": 4, "mix": mix})
    sampled = {f"traj_{number}": spoken(RUN, number, turns) for number, turns in enumerate(drawn)}
    worker = worker_of(redis_client, values)
    group = RolloutGroup(request=PromptGroup(run_id=RUN), trajectories=sampled.values())
    publish(redis_client, redis_keys.verdicts(), [group.SerializeToString()])
    worker.ingest(worker.consumer.read(1, 1.0))

    request = SampleBatchRequest(run_id=RUN, batch_size=4, step=0)
    batch = [TrainingSample(drawn.trajectory, -0.5, 0) for drawn in BatchSampler(worker.store).sample(request)]
    assert faults(batch, cached_reference=True, behaviour=True) == {}
    tensors = token_batch(batch, 0.5, RewardSpec())
    store = ExperienceStore(str(tmp_path / str(ULID())))
    prompt = Prompt(prompt_id="p", text="words", environment="game")
    store.write(Origin(RUN, "run", "toy"), "part-1", [StoredTrajectory(row.trajectory, prompt) for row in batch])
    (file,) = store.files()
    kept = {row.trajectory.trajectory_id: row.trajectory for row in store.rows(file, range(4))}
    for index, row in enumerate(batch):
        made, stored = sampled[row.trajectory.trajectory_id], kept[row.trajectory.trajectory_id]
        assert row.trajectory.segments == stored.segments == made.segments
        assert stored.response_token_ids == made.response_token_ids
        mask = action_mask(made.segments, len(made.response_token_ids))
        begin, end = 3, 3 + len(mask)
        assert tensors.input_ids_BL[index, begin:end].tolist() == list(made.response_token_ids)
        trained_L = np.zeros(tensors.input_ids_BL.shape[1], dtype=np.bool_)
        trained_L[begin:end] = mask
        assert np.array_equal(tensors.response_mask_BL[index].numpy(), trained_L)
        assert tensors.reference_logprobs_BL[index].tolist() == (-0.5 * trained_L).tolist()
        assert tensors.sampling_logprobs_BL[index].tolist() == (-0.25 * trained_L).tolist()


@pytest.mark.parametrize(
    ("spoil", "pointer"),
    [
        (lambda made: made.segments.pop(), "/segments"),
        (lambda made: setattr(made.segments[1], "kind", 9), "/segments/1/kind"),
        (lambda made: setattr(made.segments[0], "score", 2.0), "/segments/0/score"),
        (lambda made: setattr(made.segments[0], "characters", 0), "/segments"),
        (lambda made: made.sampling_logprobs.__setitem__(2, -0.1), "/sampling_logprobs"),
        (lambda made: made.annotations.add(position=3, rollouts=4), "/annotations/0/position"),
        (lambda made: made.annotations.add(position=7, rollouts=4), "/annotations/0/position"),
    ],
)
def test_a_conversation_that_does_not_fit_its_response_is_refused_by_name(
    redis_client: redis.Redis, values: RpcClient, spoil: object, pointer: str
) -> None:
    start_run(redis_client)
    made, sound = conversation(1, scored=False), conversation(2, scored=False)
    spoil(made)  # type: ignore[operator]
    worker = worker_of(redis_client, values)
    group = RolloutGroup(request=PromptGroup(run_id=RUN), trajectories=[made, sound])
    publish(redis_client, redis_keys.verdicts(), [group.SerializeToString()])

    with pytest.raises(InvalidInput) as refusal:
        worker.ingest(worker.consumer.read(1, 1.0))

    assert refusal.value.code == "unusable_trajectory"
    assert {violation.pointer for violation in refusal.value.violations} == {pointer}
    assert worker.store.get(RUN, [sound.trajectory_id])[0] is not None
