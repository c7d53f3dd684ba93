"""What is served under which name."""

from __future__ import annotations

from typing import Literal, TypedDict

from pydantic import Field

from spo.client.models.document import Document, Listing


class ServedTarget(Document):
    """A weight version of a job; 0 is pi0, None whichever is the newest."""

    job_id: str
    version: int | None


class ServedModelView(ServedTarget):
    """A name and what it means since its last change; restores: the change that a roll-back brought back."""

    name: str
    tenant: str
    number: int
    at: str
    by: str
    note: str
    before: ServedTarget | None
    restores: int | None
    removed: bool
    min_replicas: int = 0


class ServedModelList(Listing[ServedModelView]):
    """Names, or the changes of one."""


class Said(TypedDict, total=False):
    """Feedback on an answer."""

    score: float
    thumbs: Literal["up", "down"]
    test: Literal["passed", "failed"]
    edited: str
    comment: str


class RedactionRule(Document):
    """A regular expression, and what stands in place of what it finds."""

    pattern: str
    replacement: str = "[redacted]"


class CapturePolicy(Document):
    """How traffic is captured where it is asked for; sampling_rate is the share of it that is kept."""

    sampling_rate: float = 1.0
    redactions: list[RedactionRule] = Field(default_factory=list)
    hook: str = ""
    retention_days: float = 30
    licence: str = ""
    consent: str = ""


class CaptureView(Document):
    """The policy, and how many completions are kept."""

    policy: CapturePolicy
    captured: int


class FeedbackReceipt(Document):
    """What the answer is worth now, best 0 and worst -1; None: nothing says so yet."""

    id: str
    index: int
    reward: float | None


class CollectReport(Document):
    """What captured traffic has become; human: edited answers, unscored: left for later."""

    run: str
    looked_at: int
    stored: int
    human: int
    judged: int
    unscored: int
    newest_unix_ms: int
