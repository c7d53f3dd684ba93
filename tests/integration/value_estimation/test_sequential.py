"""Budgets of Qhat_0: rounds until the interval is narrow, hotter samples where nothing passes, earlier runs' counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from services.replay_buffer.store import ReplayStore
from services.value_estimation.prompt_estimate import FEWEST_PROMPTS
from services.value_estimation.workers import ValueWorker
from spo import redis_keys
from spo.errors import NotReady
from spo.messaging.streams.entries import publish
from spo.spec.reward import qhat_0
from spo.spec.section import JobState
from spo.testing.runs import RIGHT, WRONG, EngineDouble, JudgeDouble, Surroundings
from spo.v1.prompt_pb2 import Prompt, Sampling
from spo.v1.value_pb2 import EstimateRequest, PromptValue

RUN = "job_SEQUENTIAL"
KILL_POINTS = 4


@dataclass
class Stage:
    """A value worker between a real store and doubles of engine and judge."""

    around: Surroundings
    worker: ValueWorker
    client: redis.Redis
    engine: EngineDouble
    judge: JudgeDouble
    store: ReplayStore

    def start(self, run_id: str, value: dict[str, Any], **sections: Any) -> None:
        self.around.start(run_id, value=value, **sections)

    def request(self, prompt: str = "p", samples: int = 64, run_id: str = RUN, **fields: Any) -> EstimateRequest:
        sampling = Sampling(samples=samples, temperature_min=1, temperature_max=1, top_p=1, max_tokens=44, seed=5)
        asked = Prompt(prompt_id=prompt * 64, text="sum of the even numbers", tests_digest="t", response_format="raw")
        return EstimateRequest(run_id=run_id, prompt=asked, sampling=sampling, **fields)

    def finish(self, request: EstimateRequest) -> int:
        """Rounds until the prompt is done."""
        for rounds in range(1, 100):
            if self.worker.estimate(request):
                return rounds
        raise AssertionError("the estimate does not end")

    def value(self, prompt: str = "p", run_id: str = RUN) -> PromptValue:
        stored: Any = self.client.hget(redis_keys.run_values(run_id), prompt * 64)
        return PromptValue.FromString(stored)

    def asked(self) -> list[tuple[int, float, int]]:
        """Samples, temperature and seed of every call to the engine."""
        return [(c.sampling.samples, round(c.sampling.temperature_min, 3), c.sampling.seed) for c in self.engine.calls]


@pytest.fixture
def stage(surroundings: Callable[..., Surroundings]) -> Stage:
    around = surroundings(chunk_samples=16)
    worker = ValueWorker(around.client, around.references, around.clients, around.settings, "worker")
    return Stage(around, worker, around.client, around.engine, around.judge, around.store)


def sequential(width: float, **fields: Any) -> dict[str, Any]:
    return {"sequential": {"interval_width": width, "first_samples": 8, "round_samples": 8, **fields}}


def test_a_wide_interval_costs_more_samples_than_a_narrow_one(stage: Stage) -> None:
    spent = []
    for number, width in enumerate((100, 0.2, 0.001)):
        run_id = f"job_WIDTH{number}"
        stage.start(run_id, sequential(width))
        stage.finish(stage.request(prompt=str(number), run_id=run_id))
        spent.append(stage.value(str(number), run_id).samples)

    assert spent[0] == 8, "the first round is enough for any width"
    assert 8 < spent[1] < 64
    assert spent[2] == 64, "`samples` is the most"


def test_a_sequential_value_is_a_posterior_mean_with_its_interval(stage: Stage) -> None:
    stage.start(RUN, sequential(0.2))

    stage.finish(stage.request())

    value, spec = stage.value(), stage.worker.references.spec(RUN)
    found = qhat_0(value, spec)
    assert (value.prior_successes, value.prior_failures) == (0.5, 0.5), "one prompt alone knows no better prior"
    assert found is not None
    assert -1 <= found.low < found.q < found.high <= 0
    assert found.high - found.low <= 0.2


def test_each_prompt_gets_its_first_round_before_any_gets_a_second(stage: Stage) -> None:
    stage.start(RUN, sequential(0.001))
    prompts = "abcdef"
    publish(stage.client, redis_keys.estimates(), [stage.request(prompt, 24).SerializeToString() for prompt in prompts])
    stop = threading.Event()
    thread = threading.Thread(target=stage.worker.run, args=(stop,))
    thread.start()
    pause = threading.Event()
    for _ in range(300):
        if stage.client.hlen(redis_keys.run_values(RUN)) == len(prompts):
            break
        pause.wait(0.1)
    stop.set()
    thread.join(20)

    order = [call.prompt.prompt_id[0] for call in stage.engine.calls]
    assert sorted(order) == sorted(prompts * 3)
    # Threads overtake each other, but nobody gets a third round before everybody has had the first.
    third = min(index for index, prompt in enumerate(order) if order[:index].count(prompt) == 2)
    assert set(order[:third]) == set(prompts)
    assert stage.client.xlen(redis_keys.estimates()) == 0


def test_what_teaches_without_values_is_imported_for_all_prompts_before_any_sampling(stage: Stage) -> None:
    imitates = [{"objective": "supervised", "sources": ["human"]}, {"objective": "terminal_squared"}]
    losses = {"losses": [imitates[0], {**imitates[1], "sources": ["online"]}]}
    mix = [{"source": source, "share": 0.5} for source in ("online", "human")]
    trusted = {"judge_human_solutions": False}
    stage.start(RUN, sequential(100), algorithm=losses, replay={"mix": mix}, offline=trusted)
    request = stage.request(human_solutions=[RIGHT])

    assert not stage.worker.estimate(request), "the prompt goes to the end of the stream"
    assert not stage.engine.calls
    assert len(stage.store.newest_first(RUN, "", "", 50)[0]) == 1

    assert stage.finish(request) == 2, "a round, and the look whether it was enough"
    assert stage.value().samples == 8


@pytest.mark.parametrize("writes_before_the_kill", range(1, KILL_POINTS))
def test_a_kill_between_any_two_writes_counts_nothing_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, writes_before_the_kill: int
) -> None:
    stage.start(RUN, sequential(0.001))
    undisturbed = stage.request("u", 24)
    stage.finish(undisturbed)
    expected = stage.value("u")
    writes = 0
    really = stage.client.hset

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal writes
        writes += 1
        if writes == writes_before_the_kill:
            raise KeyboardInterrupt
        return really(*args, **kwargs)

    monkeypatch.setattr(stage.client, "hset", killed)
    with pytest.raises(KeyboardInterrupt):
        stage.finish(stage.request("v", 24))
    monkeypatch.undo()
    stage.finish(stage.request("v", 24))

    value = stage.value("v")
    assert (value.samples, value.successes) == (expected.samples, expected.successes) == (24, 6)


def test_hotter_samples_of_an_unsolved_prompt_are_data_and_leave_the_value_alone(stage: Stage) -> None:
    stage.start(RUN, {"unsolved": "retry_hotter", "retry_temperature": 1.5, "retry_samples": 8})
    stage.engine.right_from_temperature = 1.2

    stage.finish(stage.request(samples=16))

    assert [(samples, temperature) for samples, temperature, _ in stage.asked()] == [(16, 1.0), (8, 1.5)]
    assert (stage.value().samples, stage.value().successes) == (16, 0)
    assert any(sample.response_text == RIGHT for sample in stage.store.newest_first(RUN, "", "", 50)[0])


def test_a_solved_prompt_is_not_retried(stage: Stage) -> None:
    stage.start(RUN, {"unsolved": "retry_hotter"})

    stage.finish(stage.request(samples=16))

    assert [samples for samples, _, _ in stage.asked()] == [16]


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps samples", "keeps none"])
def test_a_later_run_that_wants_more_samples_tops_up(stage: Stage, keeps: bool) -> None:
    sections: dict[str, Any] = {"offline": {"keep_reference_samples": keeps}}
    if not keeps:
        sections["replay"] = {"mix": [{"source": "online", "share": 1}]}
    stage.start(RUN, {}, **sections)
    stage.finish(stage.request(samples=16))
    stage.start("job_LATER", {}, **sections)

    stage.finish(stage.request(samples=40, run_id="job_LATER"))

    assert [samples for samples, _, _ in stage.asked()] == [16, 16, 8], "24 on top of 16, not 40"
    assert len({seed for _, _, seed in stage.asked()}) == 3, "no sample is drawn twice"
    assert (stage.value("p", "job_LATER").samples, stage.value("p", "job_LATER").successes) == (40, 10)


def test_a_later_run_with_another_beta_derives_its_values_without_samples(stage: Stage) -> None:
    stage.start(RUN, {}, algorithm={"beta": 0.2})
    stage.finish(stage.request(samples=16))
    stage.start("job_LATER", {}, algorithm={"beta": 0.1})

    stage.finish(stage.request(samples=16, run_id="job_LATER"))

    values = [qhat_0(stage.value("p", run_id), stage.worker.references.spec(run_id)) for run_id in (RUN, "job_LATER")]
    assert len(stage.engine.calls) == 1
    assert values[0] is not None
    assert values[1] is not None
    assert values[0].q < values[1].q < 0


def test_another_reward_is_another_value(stage: Stage) -> None:
    stage.start(RUN, {})
    stage.finish(stage.request(samples=16))
    stage.start("job_LATER", {}, tasks={"reward": {"scale": 0.5, "shift": -0.5}})

    stage.finish(stage.request(samples=16, run_id="job_LATER"))

    assert len(stage.engine.calls) == 2


def test_the_prior_comes_from_the_other_prompts_once_there_are_enough(stage: Stage) -> None:
    stage.start(RUN, sequential(100))
    for number in range(FEWEST_PROMPTS):
        stage.finish(stage.request(chr(ord("A") + number), human_solutions=[RIGHT], further_solutions=[WRONG]))

    stage.finish(stage.request("z", human_solutions=[RIGHT]))

    value = stage.value("z")
    assert value.prior_successes + value.prior_failures > 8, "all prompts succeed alike: a strong prior"
    assert value.prior_successes / (value.prior_successes + value.prior_failures) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(("policy", "q"), [("floor", -1.0), ("drop", None)])
def test_unsolved_prompts_follow_their_policy(stage: Stage, policy: str, q: float | None) -> None:
    stage.start(RUN, {"unsolved": policy})
    stage.engine.right_from_temperature = 9.0

    stage.finish(stage.request(samples=16))

    found = qhat_0(stage.value(), stage.worker.references.spec(RUN))
    assert (found and found.q) == q


def provisional(stage: Stage, prompt: str = "p") -> PromptValue | None:
    stored: Any = stage.client.hget(redis_keys.provisional_values(RUN), prompt * 64)
    return PromptValue.FromString(stored) if stored else None


def test_what_is_known_after_each_round_can_be_trained_by_until_the_value_is_final(stage: Stage) -> None:
    stage.start(RUN, sequential(0.001))
    request = stage.request(samples=24)
    seen = []
    while not stage.worker.estimate(request):
        known = provisional(stage)
        assert known is not None
        assert known.provisional
        assert qhat_0(known, stage.worker.references.spec(RUN)) is not None
        seen.append((known.samples, known.successes))

    assert seen == [(8, 2), (16, 4), (24, 6)]
    assert provisional(stage) is None
    assert (stage.value().samples, stage.value().provisional) == (24, False)


def test_a_killed_worker_leaves_what_is_known_and_the_next_one_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.start(RUN, sequential(0.001))
    request = stage.request(samples=24)
    stage.worker.estimate(request)
    monkeypatch.setattr(stage.worker, "_publish_so_far", _killed)
    with pytest.raises(KeyboardInterrupt):
        stage.worker.estimate(request)
    monkeypatch.undo()
    known = provisional(stage)
    assert known is not None
    assert known.samples == 8, "the round before stands"

    stage.finish(request)

    assert (stage.value().samples, stage.value().successes) == (24, 6)
    assert [samples for samples, _, _ in stage.asked()] == [8, 8, 8], "no sample is made again"
    assert provisional(stage) is None


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_prompts_of_a_paused_job_wait_until_it_goes_on(stage: Stage) -> None:
    stage.start(RUN, sequential(0.001))
    stage.client.set(redis_keys.run_state(RUN), JobState.PAUSED)
    with pytest.raises(NotReady, match="paused"):
        stage.worker.estimate(stage.request())
    stage.client.set(redis_keys.run_state(RUN), JobState.RUNNING)

    assert stage.finish(stage.request(samples=16)) == 3
