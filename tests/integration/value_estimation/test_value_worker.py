"""From a prompt to its value and offline data: everything real but the engine and the judge."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from services.orchestrator.deletion import keys_of
from services.replay_buffer.ingest import IngestWorker, ReferenceScores
from services.replay_buffer.store import ReplayStore
from services.value_estimation.workers import ValueWorker
from spo import redis_keys
from spo.errors import InvalidInput, NotFound
from spo.messaging.streams.entries import depth, publish
from spo.messaging.streams.stage import Consumer
from spo.rpc.client import RpcClient
from spo.testing.runs import RIGHT, SAMPLED, WRONG, EngineDouble, JudgeDouble, Surroundings
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE, Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Verdict

RUN = "job_TEST"
PROMPT = Prompt(
    prompt_id="p" * 64, text="sum of the even numbers", tests_digest="t", language="python", response_format="raw"
)


@dataclass
class Stage:
    """Everything around a value worker."""

    around: Surroundings
    worker: ValueWorker
    client: redis.Redis
    engine: EngineDouble
    judge: JudgeDouble
    store: ReplayStore

    def request(self, samples: int = 40, run_id: str = RUN, **fields: Any) -> EstimateRequest:
        sampling = Sampling(samples=samples, temperature_min=1, temperature_max=1, top_p=1, max_tokens=44, seed=5)
        return EstimateRequest(run_id=run_id, prompt=PROMPT, sampling=sampling, **fields)

    def inserted(self, source: str) -> int:
        stored: Any = self.client.hget(redis_keys.replay_counters(RUN), f"inserted:{source}")
        return int(stored or 0)

    def value(self, run_id: str = RUN) -> PromptValue:
        stored: Any = self.client.hget(redis_keys.run_values(run_id), PROMPT.prompt_id)
        return PromptValue.FromString(stored)


@pytest.fixture
def stage(surroundings: Callable[..., Surroundings]) -> Stage:
    around = surroundings(chunk_samples=16)
    worker = ValueWorker(around.client, around.references, around.clients, around.settings, "worker")
    around.start(RUN)
    return Stage(around, worker, around.client, around.engine, around.judge, around.store)


def test_a_prompts_value_is_its_success_count_and_its_samples_become_offline_data(stage: Stage) -> None:
    stage.worker.estimate(stage.request())

    value = stage.value()
    assert (value.samples, value.successes) == (40, 4 + 4 + 2)
    assert [group.sampling.samples for group in stage.engine.calls] == [16, 16, 8]
    assert len({group.sampling.seed for group in stage.engine.calls}) == 3
    assert all(group.policy_version == 0 and group.HasField("policy_version") for group in stage.engine.calls)
    assert stage.inserted("reference") == 2, "forty samples, two different programs"
    assert stage.store.duplicates(RUN) == 38


def test_extra_samples_become_data_but_do_not_count(stage: Stage) -> None:
    extra = Sampling(samples=8, temperature_min=0.1, temperature_max=0.8, top_p=0.95, max_tokens=44, seed=6)

    stage.worker.estimate(stage.request(extra_sampling=extra))

    assert stage.value().samples == 40
    assert stage.engine.calls[-1].sampling.samples == 8


def test_reference_logprobs_are_those_of_the_reference_model(stage: Stage) -> None:
    stage.worker.estimate(stage.request())

    stored, _ = stage.store.newest_first(RUN, "", "", 10)
    for trajectory in stored:
        assert len(trajectory.reference_logprobs) == len(trajectory.response_token_ids)
        assert all(logprob < 0 for logprob in trajectory.reference_logprobs)
        assert trajectory.reference_hash == stage.around.references.of(RUN).model_hash


def test_what_pi0_sampled_as_it_is_keeps_the_samplers_log_probs_where_a_job_asks_for_it(stage: Stage) -> None:
    stage.around.start(RUN, trainer={"reference": "sampler"})
    stage.engine.right_from_temperature = 1.2
    hotter = Sampling(samples=8, temperature_min=1.5, temperature_max=1.5, top_p=1, max_tokens=44, seed=6)

    stage.worker.estimate(stage.request(extra_sampling=hotter))

    stored, _ = stage.store.newest_first(RUN, "", "", 10)
    kept, scored = sorted(stored, key=lambda each: each.temperature)
    assert (kept.temperature, set(kept.reference_logprobs), kept.reference_hash) == (1, {SAMPLED}, "")
    assert scored.temperature == 1.5
    assert SAMPLED not in scored.reference_logprobs
    assert scored.reference_hash == stage.around.references.of(RUN).model_hash


def test_a_killed_estimate_resumes_at_its_chunk(stage: Stage) -> None:
    stage.worker.estimate(stage.request())
    # As a kill after the second chunk's append leaves it: only the first chunk's count was written.
    stage.client.delete(redis_keys.run_values(RUN), redis_keys.value_counts(stage.value().value_key))
    stage.client.hdel(redis_keys.value_progress(RUN, PROMPT.prompt_id), "value-16", "value-32")
    before = len(stage.engine.calls)

    stage.worker.estimate(stage.request())

    assert len(stage.engine.calls) - before == 2, "the first chunk was done; the second is repeated under the same ids"
    assert stage.value().samples == 40
    assert stage.inserted("reference") == 2


def test_an_estimated_prompt_is_not_estimated_again(stage: Stage) -> None:
    stage.worker.estimate(stage.request())
    calls = len(stage.engine.calls)

    stage.worker.estimate(stage.request())

    assert len(stage.engine.calls) == calls


def test_a_cancelled_run_costs_no_samples(stage: Stage) -> None:
    stage.client.set(redis_keys.run_state(RUN), "cancelled")

    stage.worker.estimate(stage.request())

    assert stage.engine.calls == []


def test_an_engine_that_still_serves_another_run_is_waited_for(stage: Stage) -> None:
    stage.engine.serves_others = 2

    stage.worker.estimate(stage.request())

    assert stage.value().samples == 40


def test_a_run_cancelled_while_its_engine_is_away_does_not_hold_up_the_next(stage: Stage) -> None:
    stage.engine.unready = 10**6
    thread = threading.Thread(target=stage.worker.estimate, args=(stage.request(),))
    thread.start()
    assert stage.engine.refused.wait(20)

    stage.client.set(redis_keys.run_state(RUN), "cancelled")

    thread.join(10)
    assert not thread.is_alive()
    assert stage.client.hlen(redis_keys.run_values(RUN)) == 0


def test_human_solutions_are_taken_as_published_where_the_job_says_so(stage: Stage) -> None:
    stage.worker.estimate(stage.request(samples=4))
    asked = stage.judge.programs
    stage.around.start("job_TRUSTS", offline={"judge_human_solutions": False})

    stage.worker.estimate(stage.request(samples=4, run_id="job_TRUSTS", human_solutions=[RIGHT, WRONG]))

    stored = stage.store.newest_first("job_TRUSTS", "", "", 50)[0]
    human = [sample for sample in stored if sample.source == SOURCE_HUMAN]
    assert {(sample.response_text, sample.reward, sample.verdict.judge_version) for sample in human} == {
        (RIGHT, 0.0, ""),
        (WRONG, 0.0, ""),
    }
    assert stage.judge.programs == asked, "the samples were recalled, and nothing else was judged"


def test_only_accepted_human_solutions_that_fit_are_imported(stage: Stage) -> None:
    too_long = RIGHT * 60

    stage.worker.estimate(stage.request(human_solutions=[RIGHT, WRONG, too_long]))

    assert stage.inserted("human") == 1
    human = [sample for sample in stage.store.newest_first(RUN, "", "", 50)[0] if sample.source == SOURCE_HUMAN]
    assert human[0].response_text == RIGHT
    assert not human[0].sampling_logprobs


def test_equal_programs_are_judged_once_per_call(stage: Stage) -> None:
    stage.worker.estimate(stage.request())

    assert stage.judge.programs == 3 * 2


def test_a_second_run_on_the_same_model_starts_with_values_and_samples(stage: Stage) -> None:
    extra = Sampling(samples=8, temperature_min=0.1, temperature_max=0.8, top_p=0.95, max_tokens=44, seed=6)
    stage.worker.estimate(stage.request(extra_sampling=extra))
    first = stage.store.newest_first(RUN, "", "", 50)[0]
    stage.around.start("job_SECOND")
    again = stage.request(extra_sampling=extra)
    again.run_id = "job_SECOND"
    calls = len(stage.engine.calls)

    stage.worker.estimate(again)
    stage.client.delete(redis_keys.run_values("job_SECOND"))  # as after a kill before the value was written
    stage.worker.estimate(again)

    assert len(stage.engine.calls) == calls
    assert stage.value("job_SECOND") == stage.value()
    second = stage.store.newest_first("job_SECOND", "", "", 50)[0]
    assert [sample.response_text for sample in second] == [sample.response_text for sample in first]
    assert {sample.run_id for sample in second} == {"job_SECOND"}
    assert not {sample.trajectory_id for sample in second} & {sample.trajectory_id for sample in first}
    assert [sample.reference_logprobs for sample in second] == [sample.reference_logprobs for sample in first]


@pytest.mark.parametrize(
    "change",
    [
        lambda request: setattr(request.sampling, "samples", 41),
        lambda request: setattr(request.sampling, "top_p", 0.9),
        lambda request: setattr(request.prompt, "tests_digest", "other"),
        lambda request: setattr(request.extra_sampling, "samples", 8),
    ],
    ids=["more samples", "another sampler", "other tests", "other extra samples"],
)
def test_a_second_run_that_asks_for_something_else_samples_anew(
    stage: Stage, change: Callable[[EstimateRequest], None]
) -> None:
    extra = Sampling(samples=4, temperature_min=0.1, temperature_max=0.8, top_p=0.95, max_tokens=44)
    stage.worker.estimate(stage.request(extra_sampling=extra))
    stage.around.start("job_SECOND")
    again = stage.request(extra_sampling=extra)
    again.run_id = "job_SECOND"
    change(again)
    calls = len(stage.engine.calls)

    stage.worker.estimate(again)

    assert len(stage.engine.calls) > calls
    assert stage.value("job_SECOND").samples == again.sampling.samples


def test_a_run_that_keeps_no_samples_stores_only_values(stage: Stage) -> None:
    stage.around.start(
        RUN, offline={"keep_reference_samples": False}, replay={"mix": [{"source": "online", "share": 1}]}
    )

    stage.worker.estimate(stage.request(extra_sampling=Sampling(samples=8)))

    assert stage.value().samples == 40
    assert len(stage.engine.calls) == 3, "extra samples are only offline data"
    assert stage.inserted("reference") == 0


def test_an_engine_that_still_loads_is_waited_for(stage: Stage) -> None:
    stage.engine.unready = 2

    stage.worker.estimate(stage.request())

    assert stage.value().samples == 40


def test_the_worker_takes_its_prompts_from_the_stream(stage: Stage) -> None:
    publish(stage.client, redis_keys.estimates(), [stage.request().SerializeToString(), b"\xff garbage"])
    stop = threading.Event()
    thread = threading.Thread(target=stage.worker.run, args=(stop,))
    thread.start()
    done = threading.Event()
    for _ in range(300):
        state = depth(stage.client, redis_keys.estimates(), redis_keys.VALUE_GROUP)
        if state.lag + state.pending == 0 and stage.client.xlen(redis_keys.estimates()) == 0:
            break
        done.wait(0.1)
    stop.set()
    thread.join(20)

    assert stage.value().samples == 40
    assert stage.client.xlen(redis_keys.dead_letters(redis_keys.estimates())) == 1


@pytest.mark.parametrize(
    ("prompt", "response", "code"),
    [
        ([1], [], "empty_sequence"),
        ([], [1], "empty_sequence"),
        ([1], [10**6], "foreign_tokens"),
        ([1], [2] * 500, "too_long"),
    ],
)
def test_sequences_the_reference_cannot_score_are_refused(
    stage: Stage, prompt: list[int], response: list[int], code: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        stage.around.references.of(RUN).logprobs([prompt], [response])

    assert caught.value.code == code


def online_group(number: int) -> RolloutGroup:
    trajectories = [
        Trajectory(
            trajectory_id=f"traj_{number}_{index}",
            run_id=RUN,
            prompt_id=PROMPT.prompt_id,
            source=SOURCE_ONLINE,
            prompt_token_ids=[1, 2],
            response_token_ids=[5, 6, 2],
            sampling_logprobs=[-0.5, -0.5, -0.5],
            response_text="x",
            verdict=Verdict(outcome=OUTCOME_ACCEPTED),
            reward=0.0,
        )
        for index in range(4)
    ]
    return RolloutGroup(request=PromptGroup(run_id=RUN, group_id=str(number)), trajectories=trajectories)


@pytest.fixture
def ingest(stage: Stage) -> IngestWorker:
    consumer = Consumer(stage.client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest", 0.0)
    return IngestWorker(
        stage.store,
        consumer,
        ReferenceScores(RpcClient("value-estimation", stage.around.address, ValueServiceStub), 30),
        64,
    )


def test_judged_groups_enter_with_their_reference_logprobs(stage: Stage, ingest: IngestWorker) -> None:
    publish(stage.client, redis_keys.verdicts(), [online_group(number).SerializeToString() for number in range(5)])

    ingest.ingest(ingest.consumer.read(64, 0.5))

    stored, _ = stage.store.newest_first(RUN, "", "", 50)
    assert len(stored) == 20
    assert all(
        math.isfinite(sum(sample.reference_logprobs)) and len(sample.reference_logprobs) == 3 for sample in stored
    )
    assert stage.client.xlen(redis_keys.verdicts()) == 0


@pytest.mark.parametrize(
    "model", [{"stop": ["\n"]}, {"chat": {"template": "none"}}, {"chat": {"template_arguments": {"x": False}}}]
)
def test_values_hold_only_for_prompts_and_ends_as_they_were_counted(stage: Stage, model: dict[str, Any]) -> None:
    stage.worker.estimate(stage.request())
    stage.around.start("job_SECOND", model={"path": str(stage.around.model_path), **model})
    calls = len(stage.engine.calls)

    stage.worker.estimate(stage.request(run_id="job_SECOND"))

    assert len(stage.engine.calls) == 2 * calls
    assert stage.value("job_SECOND").value_key != stage.value().value_key


# --- deleted meanwhile ---


def delete_as_the_orchestrator_does(client: redis.Redis) -> None:
    client.delete(redis_keys.run_state(RUN), redis_keys.job_record(RUN), redis_keys.run_spec(RUN))
    for keys in filter(None, keys_of(client, RUN)):
        client.unlink(*keys)


IN_ROUNDS = {"first_samples": 40, "round_samples": 8}


@pytest.mark.parametrize(
    ("keeps_samples", "at_call", "sequential", "version"),
    [
        (True, 1, None, 0),
        (False, 3, None, 0),
        (True, 3, IN_ROUNDS, 0),
        (False, 1, IN_ROUNDS, 0),
        (False, 3, IN_ROUNDS, 0),
        (True, 3, None, 3),
    ],
)
def test_no_key_of_a_job_that_is_deleted_while_it_is_sampled_comes_back(
    stage: Stage, keeps_samples: bool, at_call: int, sequential: dict[str, int] | None, version: int
) -> None:
    stage.around.start(
        RUN,
        offline={"keep_reference_samples": keeps_samples},
        replay={"mix": [{"source": "online", "share": 1.0}]},
        value={"samples": 128, "sequential": sequential},
    )
    sample = stage.engine._sample

    def last_sample(group: PromptGroup, index: int) -> Trajectory:
        if len(stage.engine.calls) == at_call and index == group.sampling.samples - 1:
            delete_as_the_orchestrator_does(stage.client)
        return sample(group, index)

    stage.engine._sample = last_sample  # type: ignore[method-assign]

    with pytest.raises(NotFound, match="there is no run"):
        stage.worker.estimate(stage.request(reference_version=version))

    assert list(stage.client.scan_iter(match=f"spo:{RUN}*")) == []
