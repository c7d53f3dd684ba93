"""A run's right answers are served again, by turns of prompts, whatever has left the window and whoever died."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from services.replay_buffer.archive import ExperienceArchiver, WindowTrimmer
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.settings import Settings
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import InvalidInput
from spo.experience.store import ExperienceStore
from spo.testing.runs import PROMPTS, RUN, start_run, toy_spec, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_MEMORY, SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory

MIX = [{"source": "online", "share": 0.5}, {"source": "memory", "share": 0.5}]
LOSSES = [
    {"objective": "terminal_squared", "sources": ["online"]},
    {"objective": "supervised", "sources": ["memory"], "coefficient": 0.1},
]
PER_PROMPT = 3


class Buffer:
    """One run's store, sampler and trimmer, as a replay-buffer process has them."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        self.client: Any = client
        self.store = ReplayStore(self.client)
        self.sampler = BatchSampler(self.store)
        self.archiver = ExperienceArchiver(self.store, ExperienceStore(str(folder)), 32, every_seconds=60)
        self.trimmer = WindowTrimmer(self.sampler, Settings(ended_seconds=0))

    def insert(self, *found: Trajectory) -> None:
        self.store.append(RUN, found)

    def batch(self, step: int, size: int = 8) -> list[Trajectory]:
        request = SampleBatchRequest(run_id=RUN, batch_size=size, step=step)
        return [sampled.trajectory for sampled in self.sampler.sample(request)]

    def settle(self) -> None:
        self.archiver.archive(RUN)
        self.trimmer.trim(RUN)

    def members(self) -> set[str]:
        index = self.sampler.index(RUN)
        with index.lock:
            index.refresh(["online", "memory"])
            return index.memory.members()


def answer(number: int, tokens: int, *, right: bool = True) -> Trajectory:
    """Trajectory `number`, of prompt number % 4, with a response that `tokens` tells apart."""
    made = trajectory(number, right=right)
    made.response_token_ids[:] = [3, 4, 10 + tokens]
    return made


@pytest.fixture
def buffer(redis_client: redis.Redis, tmp_path: Path) -> Buffer:
    start(redis_client)
    return Buffer(redis_client, tmp_path)


GROUP_LOSSES = [{"objective": "group_centred_squared", "sources": ["online"]}, LOSSES[1]]


def start_with_groups(client: redis.Redis, contrast: int) -> None:
    """Groups of two; a batch of 8 has two fresh ones, and memory's four places."""
    replay = {"mix": MIX, "unit": "group", "online_capacity": 4, "min_online": 4, "samples_per_insert": 1000}
    memory = {"per_prompt": PER_PROMPT, "contrast": contrast}
    losses = {"losses": GROUP_LOSSES}
    rollout = {"samples_per_prompt": 2}
    start_run(client, replay={**replay, "memory": memory}, algorithm=losses, rollout=rollout, trainer={"batch_size": 8})
    client.set(redis_keys.run_state(RUN), "running")


def grouped(number: int, tokens: int, *, right: bool, prompt: int) -> Trajectory:
    """Trajectory `number`, of group number // 2, of a prompt."""
    made = trajectory(number, right=right, group_size=2)
    made.prompt_id = PROMPTS[prompt]
    made.response_token_ids[:] = [3, 4, 10 + tokens]
    return made


def start(client: redis.Redis, **replay: Any) -> None:
    chosen = {"mix": MIX, "online_capacity": 8, "min_online": 4, "samples_per_insert": 1000, **replay}
    chosen = {"memory": {"per_prompt": PER_PROMPT}, **chosen}
    start_run(client, replay=chosen, algorithm={"losses": LOSSES}, trainer={"batch_size": 8})
    client.set(redis_keys.run_state(RUN), "running")


def test_half_of_a_batch_are_earlier_answers_of_prompts_in_turn_under_their_own_source(buffer: Buffer) -> None:
    buffer.insert(*(answer(number, number, right=number % 2 == 0) for number in range(24)))

    served = buffer.batch(1)

    assert Counter(each.source for each in served) == {SOURCE_ONLINE: 4, SOURCE_MEMORY: 4}
    remembered = [each for each in served if each.source == SOURCE_MEMORY]
    assert {each.reward for each in remembered} == {0.0}
    # Prompts 1 and 3 have no right answer: the other two have two turns each.
    assert Counter(each.prompt_id for each in remembered) == {PROMPTS[0]: 2, PROMPTS[2]: 2}


def test_fresh_samples_take_the_places_of_memory_until_an_answer_is_found(buffer: Buffer) -> None:
    buffer.insert(*(answer(number, number, right=False) for number in range(8)))
    assert Counter(each.source for each in buffer.batch(1)) == {SOURCE_ONLINE: 8}

    buffer.insert(answer(8, 0))
    assert Counter(each.source for each in buffer.batch(2)) == {SOURCE_ONLINE: 4, SOURCE_MEMORY: 4}


# Of the two fresh groups, by prompt and outcomes; prompt 0 has two answers in memory, prompt 1 has one.
@pytest.mark.parametrize(
    ("contrast", "fresh", "joining"),
    [
        (0, [(0, "--"), (2, "--")], {}),
        (1, [(0, "--"), (2, "--")], {0: 1}),
        (2, [(0, "--"), (2, "--")], {0: 2}),
        (5, [(0, "--"), (1, "--")], {0: 2}),
        (1, [(0, "--"), (1, "--")], {0: 1, 1: 1}),
        (2, [(0, "-+"), (1, "--")], {1: 1}),
        (2, [(0, "++"), (2, "--")], {}),
        (2, [(2, "--"), (3, "--")], {}),
    ],
)
def test_answers_join_fresh_groups_that_are_all_wrong_in_memorys_places(
    redis_client: redis.Redis, tmp_path: Path, contrast: int, fresh: list[tuple[int, str]], joining: dict[int, int]
) -> None:
    start_with_groups(redis_client, contrast)
    buffer = Buffer(redis_client, tmp_path)
    buffer.insert(grouped(0, 0, right=True, prompt=0), grouped(1, 1, right=True, prompt=0))
    buffer.insert(grouped(2, 2, right=True, prompt=1), grouped(3, 3, right=False, prompt=1))
    newest = [
        grouped(4 + 2 * place + member, 10 + 2 * place + member, right=mark == "+", prompt=prompt)
        for place, (prompt, outcomes) in enumerate(fresh)
        for member, mark in enumerate(outcomes)
    ]
    buffer.insert(*newest)

    served = buffer.batch(1)

    online = [each for each in served if each.source == SOURCE_ONLINE]
    joined = [each for each in online if each.trajectory_id not in {one.trajectory_id for one in newest}]
    found = Counter(PROMPTS.index(each.prompt_id) for each in joined)
    # Two fresh groups of all wrong ones share the two places: the first that was drawn takes what it may.
    assert found == joining or (contrast == 5 and found == {1: 1, 0: 1})
    assert {each.reward for each in joined} <= {0.0}
    assert len({each.trajectory_id for each in online}) == len(online) == 4 + sum(found.values())
    assert len(served) == 8
    assert buffer.batch(1) == Buffer(redis_client, tmp_path).batch(1) == served
    assert redis_client.hget(redis_keys.replay_counters(RUN), "sampled:memory") == b"4"
    index = buffer.sampler.index(RUN)
    index.sample_counts.refresh()
    assert {index.sample_counts.times(each.trajectory_id) for each in joined} <= {0}


@pytest.mark.parametrize(
    ("sections", "pointer"),
    [
        ({"replay": {"unit": "trajectory"}}, "/replay/memory/contrast"),
        ({"replay": {"memory": {"contrast": 2, "min_reward": -0.5}}}, "/replay/memory/contrast"),
        ({"replay": {"memory": {"contrast": 2, "also": ["human"]}}}, "/replay/memory/contrast"),
        ({"algorithm": {"losses": LOSSES}}, "/replay/memory/contrast"),
        ({"replay": {"mix": [{"source": "online", "share": 1.0}]}}, "/replay/memory"),
    ],
)
def test_contrast_that_nothing_could_come_of_is_refused(sections: dict[str, Any], pointer: str) -> None:
    replay = {"mix": MIX, "unit": "group", "memory": {"contrast": 2}} | sections.get("replay", {})
    document = {
        "model": {"path": "/pi0"},
        "algorithm": {"losses": GROUP_LOSSES},
        "rollout": {"samples_per_prompt": 2},
        "offline": {"human_solutions": True},
        "trainer": {"batch_size": 8},
    }
    with pytest.raises(InvalidInput) as refused:
        toy_spec({**document, **sections, "replay": replay})
    assert pointer in [violation.pointer for violation in refused.value.violations]


def test_a_step_gets_the_same_batch_again_with_the_same_sources_from_whichever_process(
    buffer: Buffer, tmp_path: Path
) -> None:
    buffer.insert(*(answer(number, number) for number in range(12)))
    first = buffer.batch(1)
    buffer.insert(*(answer(number, number) for number in range(12, 30)))

    assert buffer.batch(1) == first
    assert Buffer(buffer.client, tmp_path).batch(1) == first
    assert buffer.client.hget(redis_keys.replay_counters(RUN), "sampled:memory") == b"4"
    assert buffer.store.batch(RUN, 1) == [each.trajectory_id for each in first]


def test_equal_answers_count_once_and_those_found_last_are_kept(buffer: Buffer) -> None:
    # All of prompt 0: five distinct answers, the first of them found again at the end.
    buffer.insert(*(answer(4 * place, tokens) for place, tokens in enumerate((0, 1, 2, 3, 4, 0, 0))))

    assert buffer.members() == {f"traj_SOURCE_ONLINE_{4 * place}" for place in (3, 4, 6)}


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_what_the_ledger_says_whatever_left_the_window_and_whoever_died(
    buffer: Buffer, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    ledger: list[tuple[str, int, str, bool]] = []
    for step in range(1, 12):
        made = []
        for _ in range(rng.randrange(1, 9)):
            number, tokens, right = len(ledger), rng.randrange(6), rng.random() < 0.5
            made.append(answer(number, tokens, right=right))
            ledger.append((made[-1].prompt_id, tokens, made[-1].trajectory_id, right))
        buffer.insert(*made)
        if len(ledger) > 12:
            buffer.batch(step)
        if rng.random() < 0.7:
            buffer.settle()
        if rng.random() < 0.3:
            buffer = Buffer(buffer.client, tmp_path)

    expected: set[str] = set()
    for prompt_id in PROMPTS:
        newest: dict[int, str] = {}
        for of_prompt, tokens, trajectory_id, right in ledger:
            if right and of_prompt == prompt_id:
                newest.pop(tokens, None)
                newest[tokens] = trajectory_id
        expected |= set(list(newest.values())[-PER_PROMPT:])
    assert buffer.members() == expected
    assert Buffer(buffer.client, tmp_path).members() == expected
    buffer.settle()
    in_redis = {each.trajectory_id for each in buffer.store.newest_first(RUN, "", "", 1000)[0]}
    assert expected <= in_redis
    # What neither the window, nor memory, nor a batch that may be asked for again names has left.
    named = {name for step in range(1, 12) for name in buffer.store.batch(RUN, step)}
    window = {trajectory_id for _, _, trajectory_id, _ in ledger[-8:]}
    assert in_redis <= expected | named | window


def test_what_is_learned_again_uses_up_no_turn_of_the_window(redis_client: redis.Redis, tmp_path: Path) -> None:
    start(redis_client, max_times_sampled=1, online_capacity=16)
    buffer = Buffer(redis_client, tmp_path)
    buffer.insert(*(answer(number, number) for number in range(12)))

    served = [buffer.batch(step) for step in range(1, 4)]

    fresh = [each.trajectory_id for batch in served for each in batch if each.source == SOURCE_ONLINE]
    assert len(set(fresh)) == len(fresh) == 12


def test_with_a_least_reward_the_best_so_far_of_each_prompt_is_remembered(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    start(redis_client, memory={"min_reward": -0.8})
    buffer = Buffer(redis_client, tmp_path)
    for number, reward in ((0, -1.0), (4, -0.6), (1, -0.9), (8, -0.3), (12, -0.3), (5, -0.8), (16, -0.6)):
        made = answer(number, number, right=False)
        made.reward = reward
        buffer.insert(made)

    assert buffer.members() == {f"traj_SOURCE_ONLINE_{number}" for number in (8, 12, 5)}


def test_answers_of_people_may_count_as_found(redis_client: redis.Redis, tmp_path: Path) -> None:
    start_run(
        redis_client,
        replay={"mix": MIX, "min_online": 4, "memory": {"also": ["human"]}},
        offline={"human_solutions": 1},
        algorithm={"losses": LOSSES},
        trainer={"batch_size": 8},
    )
    buffer = Buffer(redis_client, tmp_path)
    written = trajectory(1, SOURCE_HUMAN)
    del written.sampling_logprobs[:]
    buffer.insert(written, *(answer(number, number, right=False) for number in range(8)))

    remembered = [each for each in buffer.batch(1) if each.source == SOURCE_MEMORY]
    assert {each.trajectory_id for each in remembered} == {written.trajectory_id}
    assert buffer.client.smembers(redis_keys.replay_unsolved(RUN)) == {PROMPTS[n].encode() for n in (0, 2, 3)}


def test_prompts_are_unsolved_until_a_right_rollout_came_or_again_after_a_wrong_group(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    def unsolved() -> set[bytes]:
        return set(redis_client.smembers(redis_keys.replay_unsolved(RUN)))

    start_run(
        redis_client,
        replay={"mix": [{"source": "online", "share": 1}]},
        rollout={"samples_per_prompt": 2, "unsolved_share": 0.5, "unsolved": "lately"},
        trainer={"batch_size": 8},
    )
    buffer = Buffer(redis_client, tmp_path)
    buffer.insert(answer(0, 0, right=False), answer(1, 1))
    assert unsolved() == {PROMPTS[0].encode()}
    buffer.insert(answer(4, 2), answer(5, 3, right=False))
    assert unsolved() == set()
    buffer.insert(answer(9, 4, right=False), answer(0, 0, right=False))
    assert unsolved() == {PROMPTS[1].encode()}
    assert redis_client.hgetall(redis_keys.replay_outcomes(RUN)) == {
        PROMPTS[0].encode(): b"2:1:0",
        PROMPTS[1].encode(): b"3:1:2",
    }


def test_nothing_is_inserted_as_memory(buffer: Buffer) -> None:
    made = answer(0, 0)
    made.source = SOURCE_MEMORY
    with pytest.raises(InvalidInput) as refused:
        buffer.insert(made)
    assert [violation.pointer for violation in refused.value.violations] == ["/source"]
