"""Success counts of samples of pi0, as Redis holds them: `samples:successes`, and all rewards where they vary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spo.spec.job_spec import RewardSpec
from spo.spec.reward import is_success
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
    """The counts of judged trajectories."""
    rewards = [trajectory.reward for trajectory in trajectories]
    varying = tuple(rewards) if reward.score == "share_of_tests" else ()
    return Counts(len(rewards), sum(is_success(value, reward) for value in rewards), varying)


def total(parts: Iterable[Counts]) -> Counts:
    """The sum of counts."""
    return sum(parts, Counts())
