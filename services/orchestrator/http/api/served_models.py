"""Names under which policies are served: publish to them, look at their history, roll back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator.http.dependencies import ContextDep, Limit, PrincipalDep
from services.orchestrator.serving.served_models import NAME_PATTERN, Change, ServedModel, Target
from spo.errors import FieldViolation, InvalidInput

router = APIRouter(prefix="/v1/served-models", tags=["serving"])

Name = Annotated[str, Path(max_length=100, pattern=NAME_PATTERN, description="The name that clients ask for.")]
Note = Annotated[str, Field(max_length=2000, description="Why; kept in the history.")]
Expected = Annotated[
    int | None,
    Field(ge=0, le=2**53, description="Refuse unless this is the number of the name's last change; 0: none."),
]


class Publication(BaseModel):
    """What a name is to mean."""

    model_config = ConfigDict(extra="forbid")

    job_id: str = Field(pattern=r"^job_[0-9A-HJKMNP-TV-Z]{26}$")
    version: int | None = Field(default=None, ge=0, le=2**53, description="0: pi0; default: always the newest.")
    note: Note = ""
    expected_number: Expected = None
    min_replicas: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Inference replicas that stay for it whoever asks; 0: none, as at first; default: as before.",
    )


class Rollback(BaseModel):
    """Back to an earlier change, by default to what the name meant before."""

    model_config = ConfigDict(extra="forbid")

    to_number: int | None = Field(default=None, ge=1, le=2**53)
    note: Note = ""
    expected_number: Expected = None


class ServedTarget(BaseModel):
    job_id: str
    version: int | None


class ServedModelView(ServedTarget):
    """A name and what it means since its last change; `version` null: the newest of the job."""

    name: str
    tenant: str
    number: int
    at: str
    by: str
    note: str
    before: ServedTarget | None
    restores: int | None
    removed: bool
    min_replicas: int


class ServedModelList(BaseModel):
    items: list[ServedModelView]


@router.get("")
def list_served_models(context: ContextDep, principal: PrincipalDep) -> ServedModelList:
    """Every name that means something now."""
    return _list(context.served_models.all(principal.sees_tenant))


@router.get("/{name}")
def get_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> ServedModelView:
    """What a name means now."""
    return _view(context.served_models.get(principal.tenant, name))


@router.put("/{name}")
def publish_served_model(
    context: ContextDep, principal: PrincipalDep, name: Name, body: Publication
) -> ServedModelView:
    """Make a name mean a weight version of a job, or its newest; what it means already is no change."""
    _check_replicas(context, principal, body.min_replicas)
    change = Change(principal.name, body.note, body.expected_number, body.min_replicas)
    return _view(context.served_models.publish(principal.tenant, name, Target(body.job_id, body.version), change))


@router.delete("/{name}")
def remove_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> ServedModelView:
    """Let a name mean nothing; its history stays."""
    return _view(context.served_models.remove(principal.tenant, name, Change(principal.name)))


@router.post("/{name}/rollback")
def roll_back_served_model(context: ContextDep, principal: PrincipalDep, name: Name, body: Rollback) -> ServedModelView:
    """Serve again what was served before; once more goes back one further."""
    change = Change(principal.name, body.note, body.expected_number)
    return _view(context.served_models.roll_back(principal.tenant, name, change, body.to_number))


@router.get("/{name}/history")
def served_model_history(
    context: ContextDep, principal: PrincipalDep, name: Name, limit: Limit = 100
) -> ServedModelList:
    """The changes of a name, newest first: who, when, from what; the last thousand are kept."""
    return _list(context.served_models.history(principal.tenant, name, limit))


def _check_replicas(context: ContextDep, principal: PrincipalDep, replicas: int | None) -> None:
    """Raises InvalidInput: replicas that stay are everybody's cost, and so an administrator's to give."""
    most = context.settings.max_replicas
    if replicas and not principal.is_admin:
        raise InvalidInput("min_replicas needs a key with the scope admin", code="forbidden")
    if replicas and replicas > most:
        violation = FieldViolation("/min_replicas", f"must be at most {most} (SPO_ORCHESTRATOR_MAX_REPLICAS)")
        raise InvalidInput("outside the bounds", code="invalid_request", violations=(violation,))


def _list(found: list[ServedModel]) -> ServedModelList:
    return ServedModelList(items=[_view(each) for each in found])


def _view(found: ServedModel) -> ServedModelView:
    return ServedModelView.model_validate(found, from_attributes=True)
