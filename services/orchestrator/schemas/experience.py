"""The JSON of the experience store's part of the REST API; fields are only ever added."""

from __future__ import annotations

from pydantic import BaseModel


class StoredRun(BaseModel):
    """Everything stored under one name; `complete` is false while a job may still add to it."""

    run: str
    kind: str
    task_sets: list[str]
    reference_hashes: list[str]
    trajectories: int
    files: int
    size_bytes: int
    licence: str
    parents: list[str]
    stored_at: str
    complete: bool


class StoredRuns(BaseModel):
    items: list[StoredRun]


class ExperienceStatistics(BaseModel):
    """Counts over the chosen part of the store; equal responses to a prompt count once as distinct."""

    trajectories: int
    right: int
    prompts: int
    prompts_with_success: int
    distinct_responses: int
    response_tokens: int
    runs: dict[str, int]
    sources: dict[str, int]
    outcomes: dict[str, int]
    judge_versions: dict[str, int]
    licences: dict[str, int]


class StoredRow(BaseModel):
    """One stored trajectory without its tokens."""

    trajectory_id: str
    run_id: str
    run: str
    source: str
    prompt_id: str
    statement: str
    response_text: str
    reward: float | None
    outcome: str | None
    judge_version: str | None
    policy_version_first: int
    licence: str
    parents: list[str]


class StoredRowPage(BaseModel):
    items: list[StoredRow]
    next_cursor: str | None


class StoredRowDetail(BaseModel):
    """One stored trajectory with every column, by the names of the file format."""

    run: str
    file: str
    columns: dict[str, object]


class RowFault(BaseModel):
    """Why a row was refused; rows count from 1."""

    row: int
    code: str
    pointer: str
    message: str


class ImportReport(BaseModel):
    """What became of the rows of a file."""

    run: str
    rows: int
    stored: int
    refused: int
    judged: int
    duplicates: int
    faults: list[RowFault]
    faults_by_code: dict[str, int]


class ChangedVerdict(BaseModel):
    trajectory_id: str
    prompt_id: str
    before: str
    after: str


class RejudgeReport(BaseModel):
    """What other tests, or another judge, say about stored trajectories; `run` names the new lineage, if written."""

    run: str | None
    looked_at: int
    judged: int
    unknown_problems: int
    newly_accepted: int
    newly_rejected: int
    changed: list[ChangedVerdict]


class CompactReport(BaseModel):
    """Files as they were and as they are, or would be."""

    runs: list[str]
    trajectories: int
    files_before: int
    files_after: int
    left_over: int
    compacted: bool


class PruneReport(BaseModel):
    runs: list[str]
    files: int
    trajectories: int
    size_bytes: int
    removed: bool
