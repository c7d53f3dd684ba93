"""Documents of the REST API as the SDK returns them (`spo.api`), and what its calls take as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from spo.api import *
from spo.api import LogLevel
from spo.spec.job_spec import SourceName
from spo.spec.section import JobState

Source = SourceName


class JobFilters(TypedDict, total=False):
    """Which jobs: in this state, with labels ("team" or "team:red"), created within these times (RFC 3339)."""

    status: JobState | None
    label: Sequence[str] | None
    created_from: str | None
    created_to: str | None


class ForkKeywords(TypedDict, total=False):
    """Where a fork starts and what differs in its JobSpec; without both numbers: from the newest version."""

    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    overrides: Mapping[str, object]


class LogFilters(TypedDict, total=False):
    """Which log lines: of this service, of this level or above."""

    service: str | None
    level: LogLevel | None


class TrajectoryFilters(TypedDict, total=False):
    """Which trajectories of a job."""

    prompt_id: str | None
    source: Source | None
    verdict: str | None
    policy_version: int | None


class CalibrationKeywords(TypedDict, total=False):
    """Which prefixes are continued, how often, and into how many bins they fall."""

    policy_version: int | None
    trajectories: int
    positions: int
    continuations: int
    bins: int


class CompletionKeywords(TypedDict, total=False):
    """How a policy is asked; version 0 is the reference, None the newest."""

    version: int | None
    samples: int
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int | None


class EvaluationKeywords(TypedDict, total=False):
    """Which policy is evaluated, on which problems, and how; by default the newest version on the job's own."""

    version: int | None
    checkpoint_step: int | None
    tasks: Mapping[str, object] | None
    samples: int
    temperature: float
    top_p: float
    ks: Sequence[int]


class StoreFilters(TypedDict, total=False):
    """Which part of the experience store."""

    run: str | None
    task_set: str | None


class RowFilters(StoreFilters, total=False):
    """Which stored trajectories; right: only successes, or only failures."""

    prompt_id: str | None
    source: Source | None
    right: bool | None


class ImportOptions(TypedDict, total=False):
    """How rows are stored: whose problems they answer (job, or tasks as JSON), their terms, which are judged here.

    reward = reward_scale * given + reward_shift; reward_best: the best reward there is in them, which becomes 0, in
    place of a shift. log: whose rows these are; fields: JSON, our columns to paths into the rows of another log, or
    what is otherwise than in the named one. keep_good stores the good rows although others are bad.
    """

    job: str | None
    tasks: str | None
    licence: str
    reward_scale: float
    reward_shift: float
    reward_best: float | None
    fields: str
    log: Literal["openai", "langfuse", "phoenix"] | None
    judging: Literal["missing", "all", "never"]
    keep_good: bool


class ExportKeywords(StoreFilters, total=False):
    """Which stored trajectories are exported; right: only successes, or only failures."""

    right: bool | None


class RejudgeKeywords(StoreFilters, total=False):
    """Which stored trajectories are judged again, by whose tests (job or tasks), under which new name."""

    job: str | None
    tasks: Mapping[str, object] | None
    name: str | None
    dry_run: bool


class CompactKeywords(StoreFilters, total=False):
    """Which files are merged; dry_run only says what would come of it."""

    dry_run: bool


class PruneKeywords(StoreFilters, total=False):
    """What is removed; dry_run only says what would be."""

    older_than_days: float | None
    dry_run: bool


class FeedbackKeywords(TypedDict, total=False):
    """Feedback on an answer."""

    score: float
    thumbs: Literal["up", "down"]
    test: Literal["passed", "failed"]
    edited: str
    comment: str
