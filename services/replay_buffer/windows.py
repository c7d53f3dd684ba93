"""Windows that batches are sampled from: the newest live trajectories, and the first offline ones of each prompt."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from services.replay_buffer.limiter import groups_kept
from spo.spec.job_spec import JobSpec, SourceMix, SourceName
from spo.spec.reward import has_succeeded
from spo.spec.wire_enums import wire_name
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_UNSPECIFIED, Source
from spo.v1.trajectory_pb2 import Trajectory

SOURCES = tuple(code for code in Source.values() if code != SOURCE_UNSPECIFIED)


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

    The group only where whole groups are drawn, behind it `#` and the response's digest where the run remembers.
    """
    grouped = spec.replay.unit == "group" and trajectory.source == SOURCE_ONLINE
    # A group that is dispatched again on purpose is another group.
    group = f"{trajectory.group_id}.{trajectory.attempt}" if grouped else ""
    if spec.replay.remembers:
        group += f"#{digest_of_response(trajectory)}"
    version, reward = trajectory.policy_version_first, trajectory.reward
    correct = has_succeeded(trajectory, spec.tasks.reward)
    return f"{int(correct)}:{version}:{reward!r}:{group}:{trajectory.prompt_id}"


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
        members = self._incomplete.setdefault(group, [])
        members.append(candidate)
        if len(members) == self.unit_size:
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
