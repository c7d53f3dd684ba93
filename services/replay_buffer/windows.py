"""What is kept of each source for sampling: the newest online experience, the first few offline ones of each prompt."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from services.replay_buffer.limiter import groups_kept
from spo.job_spec import JobSpec
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
    return f"{int(is_correct(spec, trajectory))}:{version}:{reward!r}:{group}:{trajectory.prompt_id}"


def read_fact(trajectory_id: str, fact: str) -> tuple[Candidate, str]:
    """The candidate and the group it belongs to, '' for none."""
    correct, version, reward, group, prompt_id = fact.split(":", 4)
    return Candidate((trajectory_id,), prompt_id, int(version), correct == "1", (float(reward),)), group


def is_correct(spec: JobSpec, trajectory: Trajectory) -> bool:
    """Whether it has the best reward that the spec gives."""
    return trajectory.reward >= spec.tasks.reward.scale + spec.tasks.reward.shift - 1e-9


class OnlineWindow:
    """The newest trajectories, or the newest groups of which every member has come; others are kept in the ledger."""

    def __init__(self, spec: JobSpec) -> None:
        grouped = spec.replay.unit == "group"
        self.unit_size = spec.rollout.samples_per_prompt if grouped else 1
        self._kept: deque[Candidate] = deque(maxlen=groups_kept(spec) if grouped else spec.replay.online_capacity)
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

    def candidates(self, correct_only: bool, oldest: int) -> list[Candidate]:
        """Those of version `oldest` or newer."""
        return [each for each in self._kept if each.version >= oldest and (each.correct or not correct_only)]

    def incomplete(self) -> int:
        """Trajectories whose group still lacks members."""
        return sum(map(len, self._incomplete.values()))


class OfflineWindow:
    """The first trajectories of each prompt, counted apart with and without wrong ones."""

    def __init__(self, spec: JobSpec) -> None:
        self._per_prompt = spec.replay.offline_per_prompt
        self._kept: dict[bool, list[Candidate]] = {False: [], True: []}
        self._counts: Counter[tuple[bool, str]] = Counter()

    def add(self, candidate: Candidate) -> None:
        """Take in the next trajectory of the ledger."""
        for correct_only in (False, True) if candidate.correct else (False,):
            place = (correct_only, candidate.prompt_id)
            if self._counts[place] < self._per_prompt:
                self._counts[place] += 1
                self._kept[correct_only].append(candidate)

    def candidates(self, correct_only: bool) -> list[Candidate]:
        """All that are kept."""
        return self._kept[correct_only]


def _whole(members: Sequence[Candidate]) -> Candidate:
    return Candidate(
        trajectory_ids=tuple(member.trajectory_ids[0] for member in members),
        prompt_id=members[0].prompt_id,
        version=min(member.version for member in members),
        correct=all(member.correct for member in members),
        rewards=tuple(member.rewards[0] for member in members),
    )
