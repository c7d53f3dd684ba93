"""Finds jobs by state, label and name, newest first, in bounded pieces of the index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.jobs import JobStore, Page
from services.orchestrator.states import JobState
from spo import redis_keys

PIECE = 500
MOST_LOOKED_AT = 20_000


@dataclass(frozen=True)
class JobFilter:
    """What is wanted; empty fields want everything. label is `key` or `key=value`, words are part of name or id."""

    states: Sequence[JobState] = ()
    label: str = ""
    words: str = ""

    def takes(self, job_id: str, name: str, labels: dict[str, str]) -> bool:
        key, has_value, value = self.label.partition("=")
        labelled = not key or (labels.get(key) == value if has_value else key in labels)
        return labelled and self.words.casefold() in f"{name}\n{job_id}".casefold()


def find_jobs(jobs: JobStore, wanted: JobFilter, cursor: str | None, limit: int, tenant: str | None) -> Page:
    """About `limit` jobs (up to a piece of the index more); a page may hold fewer while its cursor says there are more.

    Looks at MOST_LOOKED_AT jobs at most.
    """
    if not wanted.label and not wanted.words:
        return jobs.page(list(wanted.states), cursor, limit, tenant)
    found: list[str] = []
    for _ in range(MOST_LOOKED_AT // PIECE):
        page = jobs.page(list(wanted.states), cursor, PIECE, tenant)
        found += _matching(jobs, page.job_ids, wanted)
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            break
    return Page(found, cursor)


def _matching(jobs: JobStore, job_ids: Sequence[str], wanted: JobFilter) -> list[str]:
    with jobs.client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(redis_keys.job_record(job_id), "name", "labels")
        facts: list[Any] = pipe.execute()
    return [
        job_id
        for job_id, (name, labels) in zip(job_ids, facts, strict=True)
        if name is not None and wanted.takes(job_id, name.decode(), json.loads(labels))
    ]
