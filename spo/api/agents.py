"""Sessions of agents: what opens one, what its calls were, and what becomes of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spo.api.document import JOB_ID_PATTERN, Document, JsonObject, Listing, RequestBody
from spo.spec.section import HIGHEST_TEMPERATURE

SESSION_ID_PATTERN = r"^ses_[0-9A-HJKMNP-TV-Z]{26}$"

OutcomeStatus = Literal["finished", "failed", "cut"]
Token = Annotated[str, Field(min_length=1, max_length=200)]


class SessionRequest(RequestBody):
    """An episode that runs somewhere: of which job's policy, and how much it may use."""

    job: str = Field(pattern=JOB_ID_PATTERN)
    problem: str = Field(default="", max_length=128, description="Id of the problem that is played, for the trace.")
    version: int | None = Field(
        strict=True, default=None, ge=0, le=2**53, description="Weight version; default: the newest loaded."
    )
    temperature: float = Field(strict=True, default=1.0, ge=0, le=HIGHEST_TEMPERATURE, allow_inf_nan=False)
    top_p: float = Field(strict=True, default=1.0, gt=0, le=1)
    max_calls: int = Field(strict=True, default=200, ge=1, le=10_000)
    max_tokens: int = Field(strict=True, default=131_072, ge=1, le=2**31 - 1)
    max_seconds: int = Field(strict=True, default=7200, ge=1, le=7 * 86_400)


class SessionGrant(Document):
    """An open session: the agent gets base_url and key, its runner keeps the token."""

    id: str
    job_id: str
    base_url: str = Field(description="For OPENAI_BASE_URL; without its /v1 for ANTHROPIC_BASE_URL.")
    key: str
    token: str
    model: str
    deadline_unix_ms: int


class EpisodeOutcome(RequestBody):
    """How an episode ended. Only what finished, or was cut by its own limits, has a reward."""

    token: Token = Field(description="The session's, which its agent never sees.")
    status: OutcomeStatus
    reward: float | None = Field(strict=True, default=None, ge=0, le=1, allow_inf_nan=False)
    answer: str = Field(default="", max_length=1 << 20)
    metrics: dict[Annotated[str, Field(max_length=64)], float] = Field(default={}, max_length=64)


class LeaseRequest(RequestBody):
    """Which episodes a runner takes, and for how long it waits for one."""

    pool: str = Field(default="default", min_length=1, max_length=100)
    most: int = Field(default=1, ge=1, le=64, strict=True)
    wait_seconds: float = Field(default=10, ge=0, le=15, allow_inf_nan=False, strict=True)


class LeaseToken(RequestBody):
    """Whose lease it is."""

    token: Token


class EpisodeLease(Document):
    """One episode of a job: what is played, by what, and the session that its agent calls."""

    lease_id: str
    fence: int = Field(description="How often the episode was begun anew.")
    lease_until_unix_ms: int = Field(description="Renew it before; then it is another runner's.")
    harness: str
    arguments: JsonObject
    problem_id: str
    statement: str
    seed: int
    session: SessionGrant


class LeaseList(Document):
    """What was leased; empty where nothing waited in time."""

    items: list[EpisodeLease]


class RenewedLease(Document):
    lease_until_unix_ms: int


class SessionView(Document):
    """A session and what it has used."""

    id: str
    job_id: str
    problem_id: str
    created_unix_ms: int
    deadline_unix_ms: int
    calls: int
    tokens: int
    closed: str = Field(description="Why; empty while it is open.")
    outcome: JsonObject | None


class SessionList(Listing[SessionView]):
    pass


class SessionCall(Document):
    """A call: after which one it goes on, and why it does not where it could have been expected to."""

    number: int
    parent: int | None
    reason: str
    messages: list[JsonObject] = Field(description="What was read since the parent.")
    text: str
    calls: list[JsonObject]
    finish_reason: str
    version_first: int
    version_last: int
    constrained: bool
    at_unix_ms: int
    read: list[int] = Field(description="Tokens since the parent's.")
    sampled: list[int]


class SessionTreeView(Document):
    """All calls of a session in their order."""

    session: SessionView
    calls: list[SessionCall]
