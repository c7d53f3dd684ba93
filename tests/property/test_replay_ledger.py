"""The buffer on a real server against a dictionary: whatever is delivered, however often and in whatever order."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import redis
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import NotReady
from spo.testing.runs import RUN, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE, SOURCE_REFERENCE
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory
from tests.support.budget import ALL

# Machines of fifty steps each: a run takes 1,500 steps, a night 10,000.
EXAMPLES, LEAST_STEPS = (80, 10_000) if ALL in os.environ else (12, 1_500)
PER_PROMPT = 2
CAPACITY = 12
MAX_STALENESS = 1
# Few numbers, so that deliveries repeat; two spellings of each program, so that contents do.
NUMBERS = st.integers(0, 39)
DELIVERIES = st.lists(
    st.tuples(NUMBERS, st.sampled_from([SOURCE_ONLINE, SOURCE_REFERENCE, SOURCE_HUMAN])), min_size=1, max_size=30
)


def delivered(number: int, source: Any, group_size: int) -> Trajectory:
    # Numbers 20 to 39 spell the programs of 0 to 19 differently.
    text = f"print({number % 20})" if number < 20 else f"print( {number % 20} ) # again"
    size = group_size if source == SOURCE_ONLINE else 1
    return trajectory(number, source, text=text, right=number % 3 > 0, version=number // 8, group_size=size)


def content(sample: Trajectory) -> tuple[Any, ...]:
    return sample.prompt_id, sample.source, sample.reward, sample.response_text.replace(" ", "").removesuffix("#again")


class Buffer(RuleBasedStateMachine):
    """`entered` is what the ledger should hold, in order; `stands_for` the duplicates by content."""

    client: redis.Redis
    group_size = 1
    max_times: int | None = None
    sampling = "uniform_fifo"
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        replay = {"min_online": 4, "offline_per_prompt": PER_PROMPT, "online_capacity": CAPACITY}
        start_run(
            self.client,
            replay=replay
            | {
                "mix": [
                    {"source": "online", "share": 0.5, "sampler": self.sampling},
                    {"source": "reference", "share": 0.25, "correct_only": True},
                    {"source": "human", "share": 0.25},
                ],
                "max_staleness": MAX_STALENESS,
                "max_times_sampled": self.max_times,
                "unit": "group" if self.group_size > 1 else "trajectory",
            },
            trainer={"batch_size": 8},
            rollout={"samples_per_prompt": self.group_size},
        )
        self.store = ReplayStore(self.client)
        self.sampler = BatchSampler(self.store)
        self.entered: dict[str, Trajectory] = {}
        self.stands_for: dict[str, str] = {}
        self.batches: dict[int, list[str]] = {}
        self.newest = 0

    @rule(deliveries=DELIVERIES)
    def append(self, deliveries: list[tuple[int, Any]]) -> None:
        Buffer.steps += 1
        sent = [delivered(number, source, self.group_size) for number, source in deliveries]
        before = len(self.entered)
        for sample in sent:
            if sample.trajectory_id in self.entered:
                continue
            first = self._with_content(sample)
            if first:
                self.stands_for[sample.trajectory_id] = first
            else:
                self.entered[sample.trajectory_id] = sample
        inserted = len(self.entered) - before
        assert self.store.append(RUN, sent) == (inserted, len(sent) - inserted)

    @rule(step=st.integers(0, 5), published=st.sampled_from([0, 0, 0, 1]))
    def sample(self, step: int, published: int) -> None:
        Buffer.steps += 1
        self.newest += published
        request = SampleBatchRequest(run_id=RUN, batch_size=8, step=step, policy_version=self.newest)
        try:
            batch = [sample.trajectory for sample in self.sampler.sample(request)]
        except NotReady:
            assert step not in self.batches
            return
        ids = [sample.trajectory_id for sample in batch]
        if step in self.batches:
            assert ids == self.batches[step]
            return
        self.batches[step] = ids
        times = Counter(sample for batch in self.batches.values() for sample in batch if "ONLINE" in sample)
        assert self.max_times is None or max(times.values()) <= self.max_times
        assert Counter(sample.source for sample in batch) == {SOURCE_ONLINE: 4, SOURCE_REFERENCE: 2, SOURCE_HUMAN: 2}
        window = self._window()
        drawn = Counter(sample.group_id for sample in batch if sample.source == SOURCE_ONLINE)
        assert all(count % self.group_size == 0 for count in drawn.values())
        for sample in batch:
            assert sample == self.entered[sample.trajectory_id]
            if sample.source == SOURCE_ONLINE:
                assert sample.trajectory_id in window
                assert sample.policy_version_first >= self.newest - MAX_STALENESS
            elif sample.source == SOURCE_REFERENCE:
                assert sample.reward == 0

    @rule()
    def restart(self) -> None:
        Buffer.steps += 1
        self.store = ReplayStore(self.client)
        self.sampler = BatchSampler(self.store)

    @invariant()
    def the_ledger_is_what_was_acknowledged(self) -> None:
        ids: Any = self.client.zrange(redis_keys.replay_ids(RUN), 0, -1)
        assert [name.decode() for name in ids] == list(self.entered)
        assert self.store.duplicates(RUN) == len(self.stands_for)
        counters: Any = self.client.hgetall(redis_keys.replay_counters(RUN))
        by_source = Counter(sample.source for sample in self.entered.values())
        assert int(counters.get(b"inserted:online", 0)) == by_source[SOURCE_ONLINE]
        assert int(counters.get(b"inserted:human", 0)) == by_source[SOURCE_HUMAN]

    @invariant()
    def no_prompt_is_served_from_more_than_its_share(self) -> None:
        index = self.sampler.index(RUN)
        index.refresh(["human"])
        human = Counter(sample.prompt_id for sample in self.entered.values() if sample.source == SOURCE_HUMAN)
        served = Counter(sample.prompt_id for sample in index.servable(index.rule("human")))
        assert served == Counter({prompt: min(count, PER_PROMPT) for prompt, count in human.items()})

    @invariant()
    def a_duplicate_is_answered_by_the_one_that_stands_for_it(self) -> None:
        for duplicate, first in self.stands_for.items():
            assert self.store.one(RUN, duplicate) == self.entered[first]

    def _window(self) -> set[str]:
        """Ids of the newest whole groups."""
        groups: dict[str, list[str]] = {}
        whole: list[list[str]] = []
        for sample in self.entered.values():
            if sample.source == SOURCE_ONLINE:
                members = groups.setdefault(sample.group_id, [])
                members.append(sample.trajectory_id)
                if len(members) == self.group_size:
                    whole.append(members)
        return {member for members in whole[-CAPACITY // self.group_size :] for member in members}

    def _with_content(self, sought: Trajectory) -> str:
        if sought.source == SOURCE_ONLINE:
            return ""
        same = (id_ for id_, sample in self.entered.items() if content(sample) == content(sought))
        return next(same, "")


class BufferOfGroups(Buffer):
    """The same, where online trajectories are drawn in whole groups of two."""

    group_size = 2


class BufferOfTurns(Buffer):
    """The same, where each online trajectory is served twice at most, every prompt as often as the others."""

    max_times = 2
    sampling = "per_prompt"


@pytest.mark.parametrize("machine", [Buffer, BufferOfGroups, BufferOfTurns])
def test_the_buffer_agrees_with_a_dictionary_under_any_deliveries(
    redis_client: redis.Redis, machine: type[Buffer]
) -> None:
    Buffer.client = redis_client
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_buffer_agrees_with_a_dictionary_for_thousands_of_steps(redis_client: redis.Redis) -> None:
    Buffer.client = redis_client
    Buffer.steps = 0
    for machine in (Buffer, BufferOfGroups, BufferOfTurns):
        run_state_machine_as_test(
            machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)
        )
    assert Buffer.steps >= LEAST_STEPS
