"""Where a response's chance of success changes: the search on real stores, with an engine whose rates are known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from services.replay_buffer.store import ReplayStore
from services.value_estimation.samples import SampleMaker
from services.value_estimation.workers import PivotalWorker
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.streams.entries import depth, publish
from spo.spec.job_spec import RewardSpec
from spo.spec.section import JobState
from spo.testing.runs import EngineDouble, JudgeDouble, Surroundings
from spo.v1.judge_service_pb2 import JudgeRequest, JudgeResponse
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, SOURCE_REFERENCE, Prompt, PromptGroup
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PivotalRequest, PromptValue
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

RUN = "job_PIVOTAL"
PROGRAM = "a=list(map(int,input().split()))\nb=[x for x in a if x%2==0]\nprint(sum(b))"
PROMPT = Prompt(
    prompt_id="p" * 64, text="sum of the even numbers", tests_digest="t", language="python", response_format="raw"
)
REQUEST = PivotalRequest(run_id=RUN, prompt=PROMPT)
PIVOT = 5
ROLLOUTS = 4
# Of four rollouts one succeeds from before the pivotal token, and all from after it.
BEFORE, AFTER = 1, 4


class PivotalEngine(EngineDouble):
    """From PIVOT tokens of the program on, every sample completes it; before, every fourth. Fails when told to."""

    program: list[int]
    fail_after: int | None = None

    def _sample(self, group: PromptGroup, index: int) -> Trajectory:
        if self.fail_after is not None and len(self.calls) > self.fail_after:
            raise InvalidInput("this engine was told to fail")
        prefix = list(group.response_prefix_token_ids)
        successes = AFTER if len(prefix) >= PIVOT else BEFORE
        wrong = [*prefix, *self.tokenizer.encode("print(", add_special_tokens=False), self.tokenizer.eos_token_id]
        tokens = self.program if index < successes else wrong
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(group.run_id, group.group_id, index, 0, 0),
            group_id=group.group_id,
            run_id=group.run_id,
            prompt_id=group.prompt.prompt_id,
            source=group.source,
            prompt_token_ids=[1, 2, 3],
            response_token_ids=tokens,
            response_text=self.tokenizer.decode(tokens, skip_special_tokens=True),
        )


class ProgramJudge(JudgeDouble):
    """Accepts the one program."""

    def Judge(self, request: JudgeRequest, context: Any) -> JudgeResponse:
        outcomes = [OUTCOME_ACCEPTED if program == PROGRAM else OUTCOME_WRONG_ANSWER for program in request.programs]
        return JudgeResponse(verdicts=[Verdict(outcome=outcome) for outcome in outcomes])


@dataclass
class Stage:
    """Everything around a pivotal worker."""

    around: Surroundings
    worker: PivotalWorker
    client: redis.Redis
    engine: PivotalEngine
    store: ReplayStore
    stop: threading.Event = field(default_factory=threading.Event)

    def start(self, run_id: str, state: JobState = JobState.ESTIMATING, **pivotal: Any) -> PivotalRequest:
        """A run whose prompt has its value and one human solution."""
        search = {"rollouts": ROLLOUTS, "threshold": 0.2, "sources": ["human"], **pivotal}
        self.around.start(run_id, state, value={"pivotal": search})
        value = PromptValue(prompt_id=PROMPT.prompt_id, samples=40, successes=10)
        self.client.hset(redis_keys.run_values(run_id), PROMPT.prompt_id, value.SerializeToString())
        maker = SampleMaker(run_id, self.worker.references.of(run_id), self.worker.clients, RewardSpec())
        maker.clients.append(run_id, maker.import_human(PROMPT, [PROGRAM], 44))
        return PivotalRequest(run_id=run_id, prompt=PROMPT)

    def prefixes(self) -> list[int]:
        return [len(group.response_prefix_token_ids) for group in self.engine.calls]

    def annotated(self, run_id: str = RUN) -> list[Trajectory]:
        stored, _ = self.store.newest_first(run_id, "", "", 100)
        return [sample for sample in stored if sample.source == SOURCE_ANNOTATED]


@pytest.fixture
def stage(surroundings: Callable[..., Surroundings]) -> Stage:
    around = surroundings(PivotalEngine, ProgramJudge, prompts_in_flight=1, reclaim_seconds=2)
    tokenizer = around.engine.tokenizer
    around.engine.program = [*tokenizer.encode(PROGRAM, add_special_tokens=False), tokenizer.eos_token_id]
    worker = PivotalWorker(around.client, around.references, around.clients, around.settings, "w")
    return Stage(around, worker, around.client, around.engine, around.store)


def test_a_search_closes_in_on_the_token_that_changes_the_chance(stage: Stage) -> None:
    stage.start(RUN)

    stage.worker.annotate(REQUEST, stage.stop)

    (found,) = stage.annotated()
    counts = {sample.position: (sample.rollouts, sample.successes) for sample in found.annotations}
    length = len(stage.engine.program)
    assert counts[0] == (40, 10), "S_0 is the prompt's value and cost no rollout"
    assert counts[length] == (1, 1), "a finished correct response succeeds for certain"
    assert counts[PIVOT - 1] == (ROLLOUTS, BEFORE)
    assert counts[PIVOT] == (ROLLOUTS, AFTER)
    assert sorted(stage.prefixes()) == sorted(set(counts) - {0, length})
    assert len({group.sampling.seed for group in stage.engine.calls}) == len(stage.engine.calls)
    assert list(found.response_token_ids) == stage.engine.program
    assert len(found.reference_logprobs) == length


def test_the_budget_is_never_exceeded_and_what_it_bought_is_kept(stage: Stage) -> None:
    stage.start(RUN, budget_rollouts=2 * ROLLOUTS)

    stage.worker.annotate(REQUEST, stage.stop)

    assert len(stage.engine.calls) == 2
    (found,) = stage.annotated()
    assert len(found.annotations) == 4
    assert stage.client.hget(redis_keys.run_pivotal(RUN), PROMPT.prompt_id) == b"1"


def test_a_later_run_with_the_same_reference_takes_the_labels_over(stage: Stage) -> None:
    stage.start(RUN)
    stage.worker.annotate(REQUEST, stage.stop)
    spent = len(stage.engine.calls)

    stage.worker.annotate(stage.start("job_LATER"), stage.stop)

    assert len(stage.engine.calls) == spent
    (earlier,), (later,) = stage.annotated(), stage.annotated("job_LATER")
    assert list(later.annotations) == list(earlier.annotations)
    assert later.trajectory_id != earlier.trajectory_id


def test_a_search_that_was_cut_short_repeats_no_prefix(stage: Stage) -> None:
    stage.start(RUN)
    stage.engine.fail_after = 2
    with pytest.raises(InvalidInput):
        stage.worker.annotate(REQUEST, stage.stop)
    done = stage.prefixes()[:2]
    stage.engine.fail_after = None

    stage.worker.annotate(REQUEST, stage.stop)
    stage.worker.annotate(REQUEST, stage.stop)

    assert all(stage.prefixes().count(position) == 1 for position in done)
    assert len(stage.annotated()) == 1, "a redelivered request changes nothing"


def test_rollouts_are_kept_as_reference_samples_where_they_are_wanted(stage: Stage) -> None:
    stage.start(RUN, keep_rollouts=True)

    stage.worker.annotate(REQUEST, stage.stop)

    stored, _ = stage.store.newest_first(RUN, "", "", 100)
    kept = [sample for sample in stored if sample.source == SOURCE_REFERENCE]
    assert {sample.reward for sample in kept} == {0.0, -1.0}
    assert all(sample.group_id.startswith("pivotal-") for sample in kept)


def test_requests_of_the_stream_are_finished_and_those_of_ended_runs_cost_nothing(stage: Stage) -> None:
    stage.start(RUN)
    ended = stage.start("job_ENDED", state=JobState.CANCELLED)
    publish(stage.client, redis_keys.pivotal(), [ended.SerializeToString(), REQUEST.SerializeToString()])
    worker = threading.Thread(target=stage.worker.run, args=(stage.stop,))
    worker.start()
    try:
        for _ in range(600):
            state = depth(stage.client, redis_keys.pivotal(), redis_keys.VALUE_GROUP)
            if state.lag + state.pending == 0 and stage.client.xlen(redis_keys.pivotal()) == 0:
                break
            stage.stop.wait(0.05)
        else:
            pytest.fail("the requests were not finished within 30 s")
    finally:
        stage.stop.set()
        worker.join(20)
    assert {group.run_id for group in stage.engine.calls} == {RUN}
    assert len(stage.annotated()) == 1


def test_an_idle_search_waits_until_no_prompt_waits_for_the_engines(stage: Stage) -> None:
    stage.start(RUN, state=JobState.RUNNING, when="idle")
    prompts = redis_keys.prompts(RUN)
    publish(stage.client, prompts, [b"a group"])
    worker = threading.Thread(target=stage.worker.annotate, args=(REQUEST, stage.stop))
    worker.start()
    worker.join(1.5)
    assert worker.is_alive()
    assert stage.engine.calls == []

    stage.client.delete(prompts)

    worker.join(20)
    assert not worker.is_alive()
    assert len(stage.annotated()) == 1
