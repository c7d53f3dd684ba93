"""Upload task sets in parts, see what is wrong with them, and name them in jobs."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path as File
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from services.orchestrator.datasets.store import Dataset, FileFormat, State, TaskFormat
from services.orchestrator.http.dependencies import ContextDep, Limit, PrincipalDep
from spo.disk_space import told_when_full
from spo.errors import FieldViolation, InvalidInput, NotFound

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])

DatasetId = Annotated[str, Path(pattern=r"^ds_[0-9A-HJKMNP-TV-Z]{26}$")]
PART_TYPE = "application/offset+octet-stream"
BYTES_PER_WRITE = 1 << 20
_PART: dict[str, object] = {
    "requestBody": {
        "required": True,
        "content": {PART_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class DatasetRequest(BaseModel):
    """What will be uploaded. Addresses are not fetched: send the bytes."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=200)
    task_format: TaskFormat = Field(default="jsonl", description="Whose schema the rows have.")
    file_format: FileFormat = "jsonl"
    size_bytes: int = Field(ge=1, le=1 << 50)
    url: str | None = Field(default=None, max_length=2000, description="Refused: this platform fetches nothing.")


class PartHeaders(BaseModel):
    upload_offset: int = Field(ge=0, le=1 << 50)
    content_digest: str = Field(pattern=r"^sha-256=:[A-Za-z0-9+/]{43}=:$", description="Of this part (RFC 9530).")


class DatasetRowFault(BaseModel):
    """place: a line or row of the file, counted from 1."""

    place: str
    message: str


class DatasetReport(BaseModel):
    """What the rows hold; left_out are those that no judge here can decide, faults the first thousand."""

    rows: int
    problems: int
    left_out: int = 0
    duplicates: int = 0
    tests: int = 0
    answers: int = 0
    with_solutions: int = 0
    difficulties: dict[str, int] = {}
    faults_total: int
    faults: list[DatasetRowFault]


class DatasetView(BaseModel):
    """uploaded_bytes is where the next part begins; usable by jobs when `ready`."""

    id: str
    name: str
    task_format: TaskFormat
    file_format: FileFormat
    size_bytes: int
    uploaded_bytes: int
    state: State
    created_at: str
    digest: str
    report: DatasetReport | None


class DatasetPage(BaseModel):
    """Reports without their faults."""

    items: list[DatasetView]
    next_cursor: str | None


@router.post("", status_code=201)
def create(context: ContextDep, principal: PrincipalDep, body: DatasetRequest, response: Response) -> DatasetView:
    """Begin an upload; its parts follow by PATCH."""
    if body.url is not None:
        message = "this platform fetches no addresses; upload the file in parts"
        raise InvalidInput(
            "addresses are not fetched", code="fetch_refused", violations=(FieldViolation("/url", message),)
        )
    made = context.datasets.create(
        body.name,
        body.task_format,
        body.file_format,
        body.size_bytes,
        principal.tenant,
    )
    response.headers["Location"] = f"/v1/datasets/{made.id}"
    return _shown(made)


@router.get("")
def list_datasets(
    context: ContextDep,
    principal: PrincipalDep,
    limit: Limit = 50,
    cursor: Annotated[str, Query(pattern=r"^(ds_[0-9A-HJKMNP-TV-Z]{26})?$")] = "",
) -> DatasetPage:
    """Newest first."""
    found, next_cursor = context.datasets.page(principal.sees_tenant, cursor, limit)
    shown = [_shown(dataset) for dataset in found]
    for dataset in shown:
        if dataset.report:
            dataset.report.faults = []
    return DatasetPage(items=shown, next_cursor=next_cursor)


@router.get("/{dataset_id}")
def get_dataset(context: ContextDep, principal: PrincipalDep, dataset_id: DatasetId) -> DatasetView:
    """One dataset with the report on its rows."""
    return _shown(context.datasets.get(dataset_id, principal.sees_tenant))


@router.delete("/{dataset_id}", status_code=204)
def delete_dataset(context: ContextDep, principal: PrincipalDep, dataset_id: DatasetId) -> None:
    """Remove a dataset with its file, or an upload with its parts; refused while a job that has not ended uses it."""
    context.datasets.delete(dataset_id, principal.sees_tenant, context.jobs.users_of)


@router.patch("/{dataset_id}", openapi_extra=_PART)
async def add_part(
    request: Request,
    response: Response,
    context: ContextDep,
    principal: PrincipalDep,
    dataset_id: DatasetId,
    headers: Annotated[PartHeaders, Header()],
) -> DatasetView:
    """Append a part. After a cut connection go on at `uploaded_bytes`: nothing counts before its digest was right."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != PART_TYPE:
        raise InvalidInput(f"send parts as {PART_TYPE}", code="unsupported_media_type")
    part = await run_in_threadpool(
        context.datasets.begin_part, dataset_id, principal.sees_tenant, headers.upload_offset
    )
    try:
        digest = await _write(request, part)
        if digest != headers.content_digest:
            message = "the part does not have the digest that came with it; send it again"
            raise InvalidInput(message, code="part_digest_mismatch")
        grown = await run_in_threadpool(context.datasets.add_part, dataset_id, headers.upload_offset, part)
    except FileNotFoundError as error:
        raise NotFound(f"dataset {dataset_id} was deleted meanwhile", code="dataset_not_found") from error
    finally:
        part.unlink(missing_ok=True)
    response.headers["Upload-Offset"] = str(grown.uploaded_bytes)
    return _shown(grown)


async def _write(request: Request, part: File) -> str:
    """Stream the body into a file, little of it in memory at a time; returns its Content-Digest."""
    digest = hashlib.sha256()
    with told_when_full(part.parent), part.open("wb") as file:

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        waiting: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            waiting.append(chunk)
            size += len(chunk)
            if size >= BYTES_PER_WRITE:
                await run_in_threadpool(write, b"".join(waiting))
                waiting.clear()
                size = 0
        await run_in_threadpool(write, b"".join(waiting))
    return f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"


def _shown(found: Dataset) -> DatasetView:
    return DatasetView.model_validate(found, from_attributes=True)
