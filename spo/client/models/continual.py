"""Continual jobs and their rounds, in the SDK."""

from __future__ import annotations

from spo.client.models.document import Document, JsonObject, Listing


class RoundComparison(Document):
    """Mean pass@1 over `problems` of what was served and of the new version, their difference and its interval."""

    served: float
    candidate: float
    gain: float
    low: float
    high: float
    problems: int


class RoundSource(Document):
    """A source of feedback: mean |Q_T - r| in reward units, how much above the others' median, whether that is bad."""

    source: str
    residual: float
    excess: float
    excess_error: float
    suspect: bool


class ContinualRound(Document):
    """One round; learned_from: rows of each stored run when it began. state: starting, training, evaluating, then
    served (its version was put in service), kept (the served one stayed) or failed; reason says why.
    """

    number: int
    state: str
    parent_job: str
    parent_version: int
    job_id: str
    version: int
    learned_from: dict[str, int]
    evaluations: list[str]
    comparison: RoundComparison | None
    reason: str
    began_at: str
    ended_at: str
    sources: tuple[RoundSource, ...] = ()


class ContinualSummary(Document):
    """A continual job as it was made; waits: what keeps it from going on, such as a name that nothing is served as."""

    name: str
    tenant: str
    spec: JsonObject
    created_at: str
    waits: str = ""
    waits_since: str = ""


class ContinualDetail(ContinualSummary):
    """With its rounds, newest first; new_trajectories: stored since the newest round began."""

    new_trajectories: int
    round_wanted: bool
    history: list[ContinualRound]


class ContinualList(Listing[ContinualSummary]):
    """All of the tenant, by name."""
