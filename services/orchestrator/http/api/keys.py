"""API keys and the audit log; for admins."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator.auth.api_keys import ApiKey
from services.orchestrator.auth.audit import AuditRecord
from services.orchestrator.auth.principals import SCOPES, Scope
from services.orchestrator.http.dependencies import ContextDep, Limit

router = APIRouter(prefix="/v1", tags=["access"])

KeyId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]*$")]


class KeyRequest(BaseModel):
    """A key to make: who it is for and what it may."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    tenant: Name
    scopes: list[Scope] = Field(min_length=1, max_length=len(SCOPES))
    max_active_jobs: int | None = Field(default=None, ge=1, le=1_000_000, description="Quota; default: none.")
    expires_in_seconds: int | None = Field(default=None, ge=60, le=10 * 365 * 86400)


class Key(BaseModel):
    """A key without its secret."""

    key_id: str
    name: str
    tenant: str
    scopes: list[Scope]
    max_active_jobs: int | None
    created_at: str
    expires_unix: int
    revoked_at: str


class NewKey(Key):
    """With the token, shown this once."""

    token: str


class Keys(BaseModel):
    items: list[Key]


class AuditPage(BaseModel):
    items: list[AuditRecord]
    next_cursor: str | None


@router.post("/keys", status_code=201)
def create_key(context: ContextDep, body: KeyRequest) -> NewKey:
    """Make a key. Its token is in this response and nowhere else."""
    key, token = context.authenticator.keys.create(
        body.name,
        body.tenant,
        tuple(body.scopes),
        body.max_active_jobs,
        body.expires_in_seconds,
    )
    return NewKey.model_validate({**asdict(key), "token": token})


@router.get("/keys")
def list_keys(context: ContextDep) -> Keys:
    """Every key, revoked ones too, without secrets."""
    return Keys(items=[_shown(key) for key in context.authenticator.keys.all()])


@router.delete("/keys/{key_id}")
def revoke_key(context: ContextDep, key_id: KeyId) -> Key:
    """Make a key useless, within five seconds."""
    return _shown(context.authenticator.keys.revoke(key_id))


@router.get("/audit")
def audit(
    context: ContextDep,
    limit: Limit = 100,
    cursor: Annotated[str, Query(pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> AuditPage:
    """Changes and refusals, newest first; the last million are kept."""
    entries, next_cursor = context.audit.page(cursor, limit)
    return AuditPage(items=entries, next_cursor=next_cursor)


def _shown(key: ApiKey) -> Key:
    return Key.model_validate(key, from_attributes=True)
