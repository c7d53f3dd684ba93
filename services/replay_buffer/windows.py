"""What is kept of each source for sampling: the newest live experience, the first few offline ones of each prompt."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from services.replay_buffer.limiter import groups_kept
from spo.spec.job_spec import JobSpec, SourceMix, SourceName
from spo.spec.reward import is_success
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory


class Candidate(NamedTuple):
    """What is drawn at once, a trajectory or all of a group; version is the oldest weight version of a first token."""

    trajectory_ids: tuple[str, ...]
    prompt_id: str
    version: int
    correct: bool
    rewards: tuple[float, ...]


def fact_of(spec: JobSpec, trajectory: Trajectory) -> str:
    """What sampling must know of a trajectory, in one line; the group only where whole groups are drawn."""
    grouped = spec.replay.unit == "group" and trajectory.source == SOURCE_ONLINE
    # A group that is dispatched again on purpose is another group.
    group = f"{trajectory.group_id}.{trajectory.attempt}" if grouped else ""
    version, reward = trajectory.policy_version_first, trajectory.reward
    correct = is_success(reward, spec.tasks.reward)
    return f"{int(correct)}:{version}:{reward!r}:{group}:{trajectory.prompt_id}"


def read_fact(trajectory_id: str, fact: str) -> tuple[Candidate, str]:
    """The candidate and the group it belongs to, '' for none."""
    correct, version, reward, group, prompt_id = fact.split(":", 4)
    return Candidate((trajectory_id,), prompt_id, int(version), correct == "1", (float(reward),)), group


def rule_of(spec: JobSpec, source: SourceName | str) -> SourceMix:
    """How a source is drawn from by the spec, plainly where its mix leaves the source out."""
    named = (part for part in spec.replay.mix if part.source == source)
    return next(named, SourceMix.model_validate({"source": source, "share": 0}))


class LiveWindow:
    """The newest trajectories, or the newest groups of which every member has come; others are kept in the ledger."""

    def __init__(self, spec: JobSpec, source: SourceName) -> None:
        # Members of a followed run's group may be left out, so its trajectories are drawn one by one.
        grouped = spec.replay.unit == "group" and source == "online"
        capacity = groups_kept(spec) if grouped else spec.replay.online_capacity
        keeps_all = rule_of(spec, source).sampler == "uniform"
        self.unit_size = spec.rollout.samples_per_prompt if grouped else 1
        # Which groups are whole is only known of those that were read from their first member on.
        self.needs_all = keeps_all or grouped
        self._kept: deque[Candidate] = deque(maxlen=None if keeps_all else capacity)
        self._incomplete: dict[str, list[Candidate]] = {}

    def add(self, candidate: Candidate, group: str) -> None:
        """Take in the next trajectory of the ledger."""
        if self.unit_size == 1:
            self._kept.append(candidate)
            return
        members = self._incomplete.setdefault(group, [])
        members.append(candidate)
        if len(members) == self.unit_size:
            del self._incomplete[group]
            self._kept.append(_whole(members))

    def index(self, rule: SourceMix, oldest: int) -> list[Candidate]:
        """Those of version `oldest` or newer that the rule takes."""
        return [each for each in self._kept if each.version >= oldest and (each.correct or not rule.correct_only)]

    def incomplete(self) -> int:
        """Trajectories whose group still lacks members."""
        return sum(map(len, self._incomplete.values()))


class OfflineWindow:
    """The first trajectories of each prompt; the right ones, and the wrong ones beside them, have their own count."""

    def __init__(self, spec: JobSpec, source: str) -> None:
        self._per_prompt = spec.replay.offline_per_prompt
        self._keeps_all = rule_of(spec, source).sampler == "uniform"
        self._kept: dict[str, list[Candidate]] = {"first": [], "right": [], "wrong": []}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, candidate: Candidate) -> None:
        """Take in the next trajectory of the ledger."""
        for backend in ("first", "right" if candidate.correct else "wrong"):
            place = (backend, candidate.prompt_id)
            if self._keeps_all or self._counts[place] < self._per_prompt:
                self._counts[place] += 1
                self._kept[backend].append(candidate)

    def index(self, rule: SourceMix) -> list[Candidate]:
        """Those that the rule takes."""
        if rule.correct_only:
            return self._kept["right"]
        if rule.sampler == "outcome_balanced":
            return self._kept["right"] + self._kept["wrong"]
        return self._kept["first"]


def _whole(members: Sequence[Candidate]) -> Candidate:
    return Candidate(
        trajectory_ids=tuple(member.trajectory_ids[0] for member in members),
        prompt_id=members[0].prompt_id,
        version=min(member.version for member in members),
        correct=all(member.correct for member in members),
        rewards=tuple(member.rewards[0] for member in members),
    )
