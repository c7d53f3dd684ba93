"""Entries that were given up on, in the SDK."""

from __future__ import annotations

from spo.client.models.document import Document, JsonObject, Page


class DeadLetterSummary(Document):
    """One entry that was given up on; job_id is None where it names no job."""

    id: str
    stream: str
    job_id: str | None
    reason: str
    deliveries: int
    at_unix_ms: int
    size_bytes: int


class DeadLetterDetail(DeadLetterSummary):
    """With what the entry says; message is None where it cannot be decoded."""

    message: JsonObject | None
    payload_base64: str


class DeadLetterTotals(Document):
    """given_up: entries of the job given up on and not redriven; gone: letters of the stream that gave way."""

    given_up: int
    gone: int


class DeadLetterPage(Page[DeadLetterSummary]):
    """Dead letters, the newest of each stream first."""

    totals: dict[str, DeadLetterTotals]


class Redriven(Document):
    """Whether the letter was there to be put back."""

    redriven: bool
