"""What is served under which name."""

from __future__ import annotations

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


class ServedModelList(Listing[ServedModelView]):
    """Names, or the changes of one."""
