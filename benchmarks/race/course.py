"""What is kept of a contestant: the checkpoints it wrote, what they had cost, and what each was worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

STEPS_PER_CHECKPOINT = 10


@dataclass(frozen=True)
class Checkpoint:
    """Weights in a folder, and the CPU seconds spent until they were there, since all was ready to learn."""

    step: int
    cpu_seconds: float
    folder: Path

    def after(self, step: int, cpu_seconds: float) -> Checkpoint:
        """The same behind a stage that took so many steps and seconds."""
        return replace(self, step=self.step + step, cpu_seconds=self.cpu_seconds + cpu_seconds)


@dataclass(frozen=True)
class Contest:
    """What one contestant did; start_cpu_seconds is what it took to be ready: imports, services, model."""

    start_cpu_seconds: float
    checkpoints: Sequence[Checkpoint]
    load: float


@dataclass(frozen=True)
class Examined:
    """A checkpoint's price and worth, with the 95 % interval of pass@10 over problems."""

    step: int
    cpu_seconds: float
    pass_at_1: float
    pass_at_10: float
    low: float
    high: float


@dataclass(frozen=True)
class Course:
    """How a contestant fared with one seed; settings say what it ran with, load how busy the machine was."""

    contestant: str
    seed: int
    settings: str
    start_cpu_seconds: float
    load: float
    points: Sequence[Examined]

    def until(self, score: float, of: str = "pass_at_10") -> tuple[float, bool]:
        """CPU seconds until pass@10 (or a bound of it) reached `score`, and whether it did; else all that was spent."""
        for point in self.points:
            if getattr(point, of) >= score:
                return point.cpu_seconds, True
        return self.points[-1].cpu_seconds, False

    def best(self) -> Examined:
        """The first of the checkpoints with the highest pass@10."""
        return max(self.points, key=lambda point: (point.pass_at_10, -point.step))


def write_contests(path: Path, contests: dict[str, Contest]) -> None:
    """Keep what was held."""
    path.write_text(json.dumps({name: asdict(each) for name, each in contests.items()}, default=str) + "\n")


def read_contests(path: Path) -> dict[str, Contest]:
    """What was held."""
    return {
        name: Contest(
            contest["start_cpu_seconds"],
            [Checkpoint(each["step"], each["cpu_seconds"], Path(each["folder"])) for each in contest["checkpoints"]],
            contest["load"],
        )
        for name, contest in json.loads(path.read_text()).items()
    }


def read_courses(documents: Sequence[dict[str, Any]]) -> list[Course]:
    """Courses from their JSON form."""
    return [Course(**{**each, "points": [Examined(**point) for point in each["points"]]}) for each in documents]
