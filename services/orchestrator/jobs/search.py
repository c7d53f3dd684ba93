"""Finds jobs by words of their names, newest first, in bounded pieces of a list."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.jobs.listing import JobFilter, JobIdPage, page_of_jobs
from services.orchestrator.jobs.store import JobStore
from spo import redis_keys

PIECE = 500
MOST_LOOKED_AT = 20_000


def find_jobs(jobs: JobStore, wanted: JobFilter, words: str, cursor: str | None, limit: int) -> JobIdPage:
    """Jobs whose name or id holds the words, in any case of letters.

    Up to a piece of the list more than `limit`; it looks at MOST_LOOKED_AT jobs, so that a page may hold fewer, or
    none, while its cursor says that there are more.
    """
    if not words:
        return page_of_jobs(jobs.client, wanted, cursor, limit)
    found: list[str] = []
    for _ in range(MOST_LOOKED_AT // PIECE):
        page = page_of_jobs(jobs.client, wanted, cursor, PIECE)
        found += _matching(jobs, page.job_ids, words.casefold())
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            break
    return JobIdPage(found, cursor)


def _matching(jobs: JobStore, job_ids: Sequence[str], words: str) -> list[str]:
    with jobs.client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(redis_keys.job_record(job_id), "name")
        names = pipe.execute()
    return [
        job_id
        for job_id, name in zip(job_ids, names, strict=True)
        if name is not None and words in f"{name.decode()}\n{job_id}".casefold()
    ]
