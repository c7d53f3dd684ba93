"""Uploaded task sets and the reports on their rows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spo.client.models.document import Document, Page

TaskFormat = Literal["jsonl", "code_contests", "taco"]
FileFormat = Literal["jsonl", "parquet"]
DatasetState = Literal["uploading", "validating", "ready", "invalid"]


class DatasetRowFault(Document):
    """What is wrong with a row, and where."""

    place: str
    message: str


class DatasetReport(Document):
    """What became of the rows of a dataset; `faults` holds the first of faults_total."""

    rows: int
    problems: int
    left_out: int = 0
    duplicates: int = 0
    tests: int = 0
    answers: int = 0
    with_solutions: int = 0
    difficulties: dict[str, int] = Field(default_factory=dict)
    faults: list[DatasetRowFault]
    faults_total: int


class DatasetView(Document):
    """A dataset; `report` is None until its rows are looked at."""

    id: str
    name: str
    task_format: TaskFormat
    file_format: FileFormat
    state: DatasetState
    size_bytes: int
    uploaded_bytes: int
    digest: str
    created_at: str
    report: DatasetReport | None


class DatasetPage(Page[DatasetView]):
    """Datasets, newest first."""
