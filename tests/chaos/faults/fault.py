"""What a fault is: a kind, and a function that inflicts it on the platform as it stands now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.chaos.platform import ChaosPlatform


@dataclass
class Stage:
    """Where a fault acts: the platform, the job that runs, and what faults have left that is no loss."""

    platform: ChaosPlatform
    model: str = ""
    job_id: str = ""
    injected_dead_letters: Counter[str] = field(default_factory=Counter)
    evaluations: list[str] = field(default_factory=list)
    # Of another tenant; gone before the job is checked.
    other_jobs: list[str] = field(default_factory=list)
    # Jobs that were under way when Redis was set back, and whether it was in the life of this platform.
    set_back: set[str] = field(default_factory=set)
    # What a fault itself found that did not hold.
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Inflicted:
    """A fault under way: what was done, for how long, what ends it, which children it makes restart."""

    what: str
    seconds: float = 0.0
    end: Callable[[], None] = lambda: None
    killed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A kind of fault; `inflict` gives None where it is not possible now (no weights yet, no right to mount)."""

    kind: str
    inflict: Callable[[Stage, Random], Inflicted | None]
    restarts_redis: bool = False
    # Of what the campaign is about, so that a short one has it too.
    often: bool = False
