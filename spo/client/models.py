"""What the REST API answers, as `spo.client` returns it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


class _Answer(BaseModel):
    # The API only grows: fields this version does not know are kept, not refused.
    model_config = ConfigDict(extra="allow", frozen=True)


class Progress(_Answer):
    """How far a job is; totals are None until its tasks are loaded."""

    values_done: int = 0
    values_total: int | None = None
    step: int = 0
    steps: int = 0
    weight_version: int = 0
    evaluations: int = 0


class Failure(_Answer):
    """Why a job failed."""

    code: str = ""
    message: str = ""


class Job(_Answer):
    """A submitted JobSpec and where it stands; lists and verbs leave out the longer parts."""

    id: str
    state: str
    name: str = ""
    created_at: str = ""
    progress: Progress = Progress()
    failure: Failure | None = None
    waits: list[str] = []
    spec: dict[str, Any] = {}
    # parent, version, checkpoint_step, as_reference and forked_at of a fork.
    lineage: dict[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES


class Event(_Answer):
    """One entry of a job's history; seq counts from 1 without gaps."""

    seq: int
    at: str
    actor: str = ""
    kind: str
    body: dict[str, Any] = {}

    @property
    def ends_the_job(self) -> bool:
        return self.kind == "state" and self.body.get("to") in FINAL_STATES


class Series(_Answer):
    """Named columns over steps; a missing value is None."""

    axis: str = "step"
    steps: list[int] = []
    series: dict[str, list[float | None]] = {}

    def latest(self, name: str) -> float | None:
        """The newest value of a column, None when there is none."""
        return next((value for value in reversed(self.series.get(name, [])) if value is not None), None)


class Page(_Answer):
    """Some entries of a list and where the next page begins."""

    items: list[dict[str, Any]]
    next_cursor: str | None = None
