"""Entries that were given up on, as the API shows them."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DeadLetterSummary(BaseModel):
    """One entry that was given up on, without its payload."""

    id: str
    stream: str = Field(description="prompts, rollouts, verdicts, estimates or pivotal.")
    job_id: str | None = Field(description="Null where the entry names no job.")
    reason: str
    deliveries: int
    at_unix_ms: int
    size_bytes: int


class DeadLetterDetail(DeadLetterSummary):
    """With what the entry says: `message`, null where it cannot be decoded, and the beginning of its bytes."""

    message: dict[str, object] | None
    payload_base64: str


class DeadLetterTotals(BaseModel):
    """given_up: entries of the job that were given up on and not redriven, also those whose letters are gone.

    gone: letters of all jobs on this stream that gave way to newer ones.
    """

    given_up: int
    gone: int


class DeadLetterPage(BaseModel):
    items: list[DeadLetterSummary]
    totals: dict[str, DeadLetterTotals] = Field(description="By stream.")
    next_cursor: str | None


class Redriven(BaseModel):
    """redriven is false where the letter had been redriven before, was dropped, or gave way to newer ones."""

    redriven: bool
