"""What a continual job is: which served model it improves, from what, when, and by which gate."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from pydantic import Field, model_validator

from services.orchestrator.serving.served_models import NAME_PATTERN
from spo.spec.job_spec import TasksSpec
from spo.spec.section import MOST_COUNT, Section, Share, Temperature, TopP
from spo.spec.violations import impossible

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
MOST_HOURS = 24.0 * 366


class RoundSchedule(Section):
    """When a round begins: at a time of day, every so many hours, or as soon as there is enough that is new.

    A round never begins without `min_new_trajectories`, and never while another one is under way.
    """

    daily_at: str | None = Field(default=None, pattern=r"^([01]\d|2[0-3]):[0-5]\d$", description="HH:MM, UTC.")
    every_hours: float | None = Field(default=None, gt=0, le=MOST_HOURS)
    min_new_trajectories: int = Field(
        default=1, ge=1, le=MOST_COUNT, description="Stored since the last round began, as its experience counts them."
    )

    @model_validator(mode="after")
    def one_clock(self) -> Self:
        if self.daily_at is not None and self.every_hours is not None:
            raise impossible(("every_hours", "name daily_at or every_hours, not both"))
        return self

    def next_at(self, last: datetime) -> datetime:
        """The earliest time of the next round, UTC; `last` is when the one before began, or the job was made."""
        if self.every_hours is not None:
            return last + timedelta(hours=self.every_hours)
        if self.daily_at is None:
            return last
        hour, minute = map(int, self.daily_at.split(":"))
        same_day = last.astimezone(UTC).replace(hour=hour, minute=minute, second=0, microsecond=0)
        return same_day if same_day > last else same_day + timedelta(days=1)


class GateSpec(Section):
    """What a new version must show before it is served: pass@1 of the same problems, new against served.

    The interval is a bootstrap over problems of the paired difference; its lower end must lie above `min_gain`.
    """

    tasks: TasksSpec | None = Field(default=None, description="Whose held-out problems; default: the job's own.")
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    min_gain: float = Field(default=0.0, ge=-1, le=1, description="In pass@1; below 0 lets through what is no worse.")
    level: Share = Field(default=0.95, description="Of the two-sided interval.")


class TrafficSpec(Section):
    """Captured traffic as experience: it is stored under a name before each round, with what was said of it."""

    name: str = Field(pattern=NAME, description="Of the stored experience; a name of its own.")
    judge_unscored: bool = Field(
        default=False, description="Judge what nobody scored, where it answers a problem of the served job's tasks."
    )


class ContinualSpec(Section):
    """A served model that is trained from stored experience again and again."""

    serves: str = Field(
        pattern=NAME_PATTERN, description="The served model: where each round starts, and what it replaces."
    )
    experience: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="Names of stored runs, imports or captures that are learned from; default: all of the tenant.",
    )
    traffic: TrafficSpec | None = Field(default=None, description="Captured traffic that is learned from as well.")
    schedule: RoundSchedule = RoundSchedule()
    gate: GateSpec = GateSpec()
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="What of the served job's spec each round changes (RFC 7386), as a fork takes it.",
    )
    paused: bool = False

    @property
    def runs(self) -> tuple[str, ...]:
        """Names in the experience store that it learns from; empty: all of the tenant."""
        return (*self.experience, self.traffic.name) if self.traffic else self.experience

    def round_overrides(self, name: str, number: int) -> Mapping[str, Any]:
        """The changes of one round: what it learns from and its name are said, unless `overrides` says them."""
        offline = dict(self.overrides.get("offline") or {})
        offline.setdefault("experience", [{"run": run} for run in self.runs] or [{}])
        return {"name": f"{name} round {number}", **self.overrides, "offline": offline}
