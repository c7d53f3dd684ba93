"""Success counts of samples of pi0, as Redis holds them: `samples:successes`, and all rewards where they vary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spo.spec.job_spec import RewardSpec
from spo.spec.reward import has_succeeded
from spo.v1.trajectory_pb2 import Trajectory


@dataclass(frozen=True)
class Counts:
    """`successes` of `samples`; `rewards` holds every reward where a failure can earn more than the worst one."""

    samples: int = 0
    successes: int = 0
    rewards: tuple[float, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.samples + other.samples, self.successes + other.successes, self.rewards + other.rewards)

    def encode(self) -> str:
        """The text that `decode` reads."""
        rewards = ",".join(f"{reward:.9g}" for reward in self.rewards)
        return f"{self.samples}:{self.successes}" + (f":{rewards}" if rewards else "")

    @classmethod
    def decode(cls, text: bytes) -> Counts:
        """The inverse of `encode`."""
        samples, successes, *rewards = text.decode().split(":")
        return cls(int(samples), int(successes), tuple(map(float, rewards[0].split(","))) if rewards else ())


def count(trajectories: Sequence[Trajectory], reward: RewardSpec) -> Counts:
    """The counts of judged trajectories, with their rewards where one is neither the best nor the worst."""
    rewards = tuple(trajectory.reward for trajectory in trajectories)
    varies = reward.score == "share_of_tests" or any(_is_between(one, reward) for one in rewards)
    successes = sum(has_succeeded(trajectory, reward) for trajectory in trajectories)
    return Counts(len(rewards), successes, rewards if varies else ())


def total(parts: Iterable[Counts], reward: RewardSpec) -> Counts:
    """The sum of counts, with all rewards where any part has its own."""
    found = list(parts)
    if any(part.rewards for part in found):
        found = [replace(part, rewards=part.rewards or _best_and_worst(part, reward)) for part in found]
    return sum(found, Counts())


def _best_and_worst(part: Counts, reward: RewardSpec) -> tuple[float, ...]:
    return (reward.best,) * part.successes + (reward.shift,) * (part.samples - part.successes)


def _is_between(earned: float, reward: RewardSpec) -> bool:
    # Rewards are float32 on the wire.
    near = 1e-6 * (reward.scale + abs(reward.shift))
    return min(abs(earned - reward.best), abs(earned - reward.shift)) > near
