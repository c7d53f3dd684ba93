"""What batches are drawn from: windows of live and offline trajectories, what a run remembers, and the limiter of
inserts and samples.

The rate limiter of inserts and samples, in the terms of Reverb (Cassirer et al., 2021); pure numbers.
Counted in online trajectories, with diff = inserted * samples_per_insert - sampled:
- A batch with n of them is admissible when inserted >= min_online, n different ones can be sampled (or the whole window
  where it holds fewer), and diff - n >= -error_buffer.
- m inserts are admissible while diff + m * samples_per_insert <= insert_buffer. Whatever diff is, the inserts that one
  of the batch's first two conditions lacks are admissible too: min_online is not reached, or too many trajectories of
  the window are stale or incorrect to fill a batch.
With several inference replicas the slack for inserts is wider, so that each has in hand what one has alone: when
batches wait, diff is near -error_buffer and one replica holds 2 * error_buffer / samples_per_insert trajectories; R of
them hold R times as many under an insert_buffer of (2 R - 1) * error_buffer. It ends where what is ahead could be
lost: at the window's size, and at what max_staleness lets a batch be old. Batches know error_buffer alone.
error_buffer is widened to one batch plus one group of inserts, so that a batch or a group is always admissible: where
diff blocks the batch, diff < n - error_buffer <= error_buffer - group * samples_per_insert admits a group.
The same counts hold where whole groups are drawn: the window then keeps as many whole groups as fit, at least one. A
group of which samples are lost is drawn as a whole one, so that its batch lacks as many.

What a run remembers: the right answers that it has found to each prompt, to be learned again (source `memory`).
Memory is a function of the ledger: of each prompt the `replay.memory.per_prompt` distinct answers that were found last.
A member that leaves the window moves from the sorted set of its source to that of `memory` and stays in Redis; whoever
lost its mirror reads both sets again and has the same memory. In the record of a batch, what was drawn from memory is
marked: one trajectory may be in a batch twice, as a fresh sample and as a memory.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from spo.algorithm.replay_sampling import draw_ranks, exact_counts
from spo.spec.job_spec import JobSpec, SourceMix, SourceName
from spo.spec.reward import has_succeeded
from spo.spec.section import wire_name
from spo.v1.prompt_pb2 import SOURCE_MEMORY, SOURCE_ONLINE, SOURCE_UNSPECIFIED, Source
from spo.v1.trajectory_pb2 import Trajectory

# More than any dispatcher asks for; keeps a tiny samples_per_insert from overflowing.
MAX_ADMISSIBLE = 1_000_000

SOURCES = tuple(code for code in Source.values() if code != SOURCE_UNSPECIFIED)

# Ids are word characters, dots and dashes. Drawn from memory: to be learned again by itself, or in a fresh group.
_MARK, _JOINED = "*", "+"
# Appended to a serialized trajectory: of a field that stands twice the last one counts.
_SERVED_AS_MEMORY = Trajectory(source=SOURCE_MEMORY).SerializeToString()


def groups_kept(spec: JobSpec) -> int:
    """Whole groups that the online window holds, at least one."""
    return max(1, spec.replay.online_capacity // spec.rollout.samples_per_prompt)


@dataclass(frozen=True)
class LiveCounts:
    """Trajectories of a live source inserted and sampled since the run's start, and how many may be sampled now."""

    inserted: int
    sampled: int
    available: int


@dataclass(frozen=True)
class Limiter:
    """The limits of one run on one live source, in trajectories."""

    min_online: int
    samples_per_insert: float
    error_buffer: float
    capacity: int
    per_batch: int
    group: int
    insert_buffer: float

    @staticmethod
    def of(spec: JobSpec, source: SourceName = "online", replicas: int = 1) -> Limiter:
        """The limiter a spec asks for on a live source, widened so that it cannot block both sides.

        replicas: those that sample for the run.
        """
        counts = exact_counts([part.share for part in spec.replay.mix], spec.trainer.batch_size)
        # As long as nothing is remembered, fresh samples take memory's places.
        taken = {source, "memory"} if source == "online" else {source}
        per_batch = sum(count for part, count in zip(spec.replay.mix, counts, strict=True) if part.source in taken)
        # Prompts are dispatched in whole groups; shared rollouts are copied one by one.
        group = spec.rollout.samples_per_prompt if source == "online" else 1
        capacity = spec.replay.online_capacity
        if spec.replay.unit == "group" and source == "online":
            capacity = groups_kept(spec) * group
        error_buffer = max(float(spec.replay.error_buffer), per_batch + group * spec.replay.samples_per_insert)
        batches = spec.replay.max_staleness * spec.trainer.update_interval
        most = min(capacity * spec.replay.samples_per_insert, float(batches * per_batch))
        return Limiter(
            min_online=spec.replay.min_online,
            samples_per_insert=spec.replay.samples_per_insert,
            error_buffer=error_buffer,
            capacity=capacity,
            per_batch=per_batch,
            group=group,
            insert_buffer=max(error_buffer, min(most, (2 * max(1, replicas) - 1) * error_buffer)),
        )

    def admissible_inserts(self, live: LiveCounts) -> int:
        """Trajectories that may still be inserted, >= 0."""
        if self.per_batch == 0:
            return 0
        diff = live.inserted * self.samples_per_insert - live.sampled
        room = (self.insert_buffer - diff) / self.samples_per_insert
        missing = max(self.min_online - live.inserted, self._needed(self.per_batch) - live.available, 0)
        # Inserts come in whole groups: the last missing few must admit one.
        missing = math.ceil(missing / self.group) * self.group
        return max(0, missing, math.floor(min(room, MAX_ADMISSIBLE)))

    def groups_per_replica(self, replicas: int) -> int:
        """Groups that each replica has in hand when batches wait; 0 where there is nothing to share."""
        if replicas < 1 or self.per_batch == 0:
            return 0
        trajectories = (self.insert_buffer + self.error_buffer) / self.samples_per_insert
        trajectories = max(trajectories, self.min_online, self._needed(self.per_batch))
        return max(1, math.ceil(min(trajectories, MAX_ADMISSIBLE) / self.group / replicas))

    def may_sample(self, live: LiveCounts, count: int) -> bool:
        """Whether a batch with `count` trajectories of the source may be sampled now."""
        diff = live.inserted * self.samples_per_insert - live.sampled
        filled = live.inserted >= self.min_online and live.available >= self._needed(count)
        return filled and diff - count >= -self.error_buffer

    def _needed(self, count: int) -> int:
        return min(count, self.capacity)


class Candidate(NamedTuple):
    """What is drawn as one: a trajectory, or a whole group; version is that of the oldest first token's weights."""

    trajectory_ids: tuple[str, ...]
    prompt_id: str
    version: int
    correct: bool
    rewards: tuple[float, ...]
    # Of the response, where the run remembers answers.
    digest: str = ""

    @property
    def has_contrast(self) -> bool:
        """Whether its trajectories earned different rewards."""
        return min(self.rewards) < max(self.rewards)


def source_name(source: Source.ValueType) -> str:
    """`online` for SOURCE_ONLINE: the names a JobSpec uses."""
    return wire_name(Source, source)


def digest_of_response(trajectory: Trajectory) -> str:
    """What tells apart the answers to one prompt: 16 hex digits of the response's tokens."""
    tokens = array("i", trajectory.response_token_ids)
    return blake2b(tokens.tobytes(), digest_size=8).hexdigest()


def fact_of(spec: JobSpec, trajectory: Trajectory) -> str:
    """What sampling must know of a trajectory, in one line.

    The group only where whole groups are drawn, behind it `~` and how many it has where it lacks some, and `#` and the
    response's digest where the run remembers.
    """
    grouped = spec.replay.unit == "group" and trajectory.source == SOURCE_ONLINE
    group = group_of(spec, trajectory) if grouped else ""
    if grouped and trajectory.group_samples:
        group += f"~{trajectory.group_samples}"
    if spec.replay.remembers:
        group += f"#{digest_of_response(trajectory)}"
    version, reward = trajectory.policy_version_first, trajectory.reward
    correct = has_succeeded(trajectory, spec.tasks.reward)
    return f"{int(correct)}:{version}:{reward!r}:{group}:{trajectory.prompt_id}"


def group_of(spec: JobSpec, trajectory: Trajectory) -> str:
    """Which group it belongs to: dispatched again on purpose another, while episodes of agents begin anew in theirs."""
    return trajectory.group_id if spec.tasks.harness else f"{trajectory.group_id}.{trajectory.attempt}"


def read_fact(trajectory_id: str, fact: str) -> tuple[Candidate, str]:
    """The candidate and the group it belongs to, '' for none."""
    correct, version, reward, member, prompt_id = fact.split(":", 4)
    group, _, digest = member.partition("#")
    return Candidate((trajectory_id,), prompt_id, int(version), correct == "1", (float(reward),), digest), group


def rule_of(spec: JobSpec, source: SourceName | str) -> SourceMix:
    """How the spec samples a source; by the defaults where its mix leaves the source out."""
    named = (part for part in spec.replay.mix if part.source == source)
    return next(named, SourceMix.model_validate({"source": source, "share": 0}))


# Groups whose members have not all come: late ones follow at once, those that were refused never.
INCOMPLETE_KEPT = 1024


class LiveWindow:
    """The newest trajectories, or the newest complete groups; older and incomplete ones are never served."""

    def __init__(self, spec: JobSpec, source: SourceName) -> None:
        # Members of a followed run's group may be left out, so shared trajectories are drawn one by one.
        grouped = spec.replay.unit == "group" and source == "online"
        capacity = groups_kept(spec) if grouped else spec.replay.online_capacity
        self.keeps_all = keeps_all = rule_of(spec, source).sampler == "uniform"
        self.unit_size = spec.rollout.samples_per_prompt if grouped else 1
        # Whether a group is complete is only known when it was read from its first member on.
        self.needs_all = keeps_all or grouped
        # Insertion numbers that completed groups of equal rewards, since they were last taken; where a rule asks.
        self.counts_equal = rule_of(spec, source).contrast_only
        self._equal: list[int] = []
        self._kept: deque[Candidate] = deque(maxlen=None if keeps_all else capacity)
        # With those that are left out: what they take of Redis ends where it did, while the window fills with others.
        self._complete: deque[Candidate] = deque(maxlen=capacity)
        self._incomplete: dict[str, list[Candidate]] = {}

    def add(self, candidate: Candidate, group: str, number: int) -> None:
        """Add the next trajectory of the ledger, and its insertion number."""
        if self.unit_size == 1:
            self._kept.append(candidate)
            return
        _, _, size = group.partition("~")
        # Alone there is nothing to compare it with.
        if size == "1":
            return
        members = self._incomplete.setdefault(group, [])
        members.append(candidate)
        if len(members) == int(size or self.unit_size):
            del self._incomplete[group]
            self._add_group(_group_of(members), number)
        elif len(self._incomplete) > INCOMPLETE_KEPT:
            del self._incomplete[next(iter(self._incomplete))]

    def _add_group(self, group: Candidate, number: int) -> None:
        if self.counts_equal:
            self._complete.append(group)
            if not group.has_contrast:
                self._equal.append(number)
                return
        self._kept.append(group)

    def candidates(self, rule: SourceMix, oldest: int) -> list[Candidate]:
        """The candidates of version `oldest` or newer that a rule admits."""
        return [
            candidate
            for candidate in self._kept
            if candidate.version >= oldest and (candidate.correct or not rule.correct_only)
        ]

    def oldest(self, version: int) -> Candidate | None:
        """The first candidate that may ever be served again; one below `version` may not, where no window ends."""
        while self.keeps_all and self._kept and self._kept[0].version < version:
            self._kept.popleft()
        found = self._complete if self.counts_equal and not self.keeps_all else self._kept
        return found[0] if found else None

    def incomplete(self) -> int:
        """Trajectories whose group still lacks members."""
        return sum(map(len, self._incomplete.values()))

    def take_equal(self) -> list[int]:
        """The insertion numbers that completed groups without contrast since the last call."""
        taken, self._equal = self._equal, []
        return taken

    def members(self) -> set[str]:
        """Ids of all trajectories that may be drawn."""
        return {trajectory_id for candidate in self._kept for trajectory_id in candidate.trajectory_ids}

    def drop(self, gone: set[str]) -> None:
        """Forget candidates of which a trajectory has left Redis, as one does whose group was completed too late."""
        self._kept = deque((one for one in self._kept if gone.isdisjoint(one.trajectory_ids)), self._kept.maxlen)


class OfflineWindow:
    """The first trajectories of each prompt; its first right ones and its first wrong ones are counted separately."""

    def __init__(self, spec: JobSpec, source: str) -> None:
        self._per_prompt = spec.replay.offline_per_prompt
        self._keeps_all = rule_of(spec, source).sampler == "uniform"
        self._kept: dict[str, list[Candidate]] = {"first": [], "right": [], "wrong": []}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, candidate: Candidate) -> None:
        """Add the next trajectory of the ledger."""
        for kind in ("first", "right" if candidate.correct else "wrong"):
            slot = (kind, candidate.prompt_id)
            if self._keeps_all or self._counts[slot] < self._per_prompt:
                self._counts[slot] += 1
                self._kept[kind].append(candidate)

    def candidates(self, rule: SourceMix) -> list[Candidate]:
        """The candidates that a rule admits."""
        if rule.correct_only:
            return self._kept["right"]
        if rule.sampler in ("outcome_balanced", "pairs"):
            return self._kept["right"] + self._kept["wrong"]
        return self._kept["first"]


def _group_of(members: Sequence[Candidate]) -> Candidate:
    return Candidate(
        trajectory_ids=tuple(member.trajectory_ids[0] for member in members),
        prompt_id=members[0].prompt_id,
        version=min(member.version for member in members),
        correct=all(member.correct for member in members),
        rewards=tuple(member.rewards[0] for member in members),
    )


def in_pairs(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those whose prompt has a right and a wrong one."""
    sides: dict[str, set[bool]] = {}
    for candidate in candidates:
        sides.setdefault(candidate.prompt_id, set()).add(candidate.correct)
    return [candidate for candidate in candidates if len(sides[candidate.prompt_id]) == 2]


def marked(trajectory_id: str) -> str:
    """An id as a batch's record names it where it was drawn from memory."""
    return trajectory_id + _MARK


def joined(trajectory_id: str) -> str:
    """An id as a batch's record names it where it was drawn from memory and joined a fresh group."""
    return trajectory_id + _JOINED


def is_remembered(recorded: str) -> bool:
    """Whether a batch's record says that this was drawn from memory."""
    return recorded.endswith((_MARK, _JOINED))


def is_served_as_memory(recorded: str) -> bool:
    """Whether it was drawn from memory by itself; what joined a group keeps its source."""
    return recorded.endswith(_MARK)


def without_mark(recorded: str) -> str:
    """The trajectory's id in a batch's record."""
    return recorded.removesuffix(_MARK).removesuffix(_JOINED)


def ids_of(record: bytes | None) -> list[str]:
    """The ids of trajectories in a batch's record, without marks; [] for none."""
    return [without_mark(name) for name in record.decode().split()] if record else []


def as_memory(payload: bytes) -> bytes:
    """A serialized trajectory as a term on `memory` reads it."""
    return payload + _SERVED_AS_MEMORY


class Memory:
    """The mirror of one run's memory; the order in which trajectories are added makes no difference."""

    def __init__(self, spec: JobSpec) -> None:
        self._per_prompt = spec.replay.memory.per_prompt
        self._min_reward = spec.replay.memory.min_reward
        # Prompt -> digest of an answer -> insertion number and candidate of its newest occurrence.
        self._answers: dict[str, dict[str, tuple[int, Candidate]]] = {}
        # Sorted: what is drawn must not depend on the order in which a process met them.
        self._prompts: list[str] = []
        self._held = 0

    def add(self, candidate: Candidate, number: int) -> None:
        """Remember a trajectory with its insertion number, if it is an answer that memory wants."""
        reward = candidate.rewards[0]
        wanted = candidate.correct if self._min_reward is None else reward >= self._min_reward
        if not wanted:
            return
        if candidate.prompt_id not in self._answers:
            self._answers[candidate.prompt_id] = {}
            insort(self._prompts, candidate.prompt_id)
        answers = self._answers[candidate.prompt_id]
        self._held -= len(answers)
        self._admit(candidate, number, answers)
        self._held += len(answers)

    def _admit(self, candidate: Candidate, number: int, answers: dict[str, tuple[int, Candidate]]) -> None:
        reward = candidate.rewards[0]
        if self._min_reward is not None:
            best = max((known.rewards[0] for _, known in answers.values()), default=reward)
            if reward < best:
                return
            if reward > best:
                answers.clear()
        if number > answers.get(candidate.digest, (0, None))[0]:
            answers[candidate.digest] = (number, candidate)
        if len(answers) > self._per_prompt:
            del answers[min(answers, key=lambda digest: answers[digest][0])]

    def drop(self, gone: set[str]) -> None:
        """Forget what has left Redis."""
        for prompt_id, answers in list(self._answers.items()):
            for digest, (_, candidate) in list(answers.items()):
                if candidate.trajectory_ids[0] in gone:
                    del answers[digest]
                    self._held -= 1
            if not answers:
                del self._answers[prompt_id]
                del self._prompts[bisect_left(self._prompts, prompt_id)]

    def draw(self, rng: np.random.Generator, count: int, prompts: Iterable[str] | None = None) -> list[Candidate]:
        """Draw `count` answers: no prompt again before each had its turn, the answers of a prompt alike.

        prompts: sorted; those that may be drawn, None for all. There must be one.
        """
        known = self._prompts if prompts is None else list(prompts)
        ranks = draw_ranks(rng, len(known), count)
        luck_N = rng.random(count)
        return [self._one(known[rank], luck) for rank, luck in zip(ranks, luck_N.tolist(), strict=True)]

    def joining(self, rng: np.random.Generator, fresh: Iterable[Candidate], most: int, places: int) -> list[Candidate]:
        """Answers that join fresh groups of equal failures: at most `most` each and `places` in all."""
        groups = list(fresh)
        there = {trajectory_id for group in groups for trajectory_id in group.trajectory_ids}
        found: list[Candidate] = []
        for group in groups:
            if group.correct or group.has_contrast:
                continue
            answers = sorted(self._answers.get(group.prompt_id, {}).values(), key=lambda answer: answer[0])
            known = [candidate for _, candidate in answers if candidate.trajectory_ids[0] not in there]
            chosen = rng.permutation(len(known))[: min(most, places - len(found))].tolist()
            found += [known[rank] for rank in chosen]
            there.update(known[rank].trajectory_ids[0] for rank in chosen)
        return found

    def prompts(self) -> list[str]:
        """Prompts with an answer, sorted."""
        return self._prompts

    def members(self) -> set[str]:
        """Ids of all trajectories that may be drawn."""
        return {candidate.trajectory_ids[0] for found in self._answers.values() for _, candidate in found.values()}

    def __len__(self) -> int:
        return self._held

    def _one(self, prompt_id: str, luck: float) -> Candidate:
        """luck, in [0, 1), chooses among a prompt's answers in the order of the ledger."""
        answers = sorted(self._answers[prompt_id].values(), key=lambda answer: answer[0])
        return answers[int(luck * len(answers))][1]
