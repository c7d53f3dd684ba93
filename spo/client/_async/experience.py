"""The experience store's part of the SDK: `experience` of a client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, Unpack

import httpx

from spo import errors
from spo.client._async.connection import AsyncConnection
from spo.client.http_errors import error_of
from spo.client.models import (
    Compact,
    CompactReport,
    Document,
    ExperienceStatistics,
    Export,
    FileFormat,
    ImportOptions,
    ImportReport,
    Prune,
    PruneReport,
    Rejudge,
    RejudgeReport,
    RowFilters,
    StoredRow,
    StoredRowDetail,
    StoredRowPage,
    StoredRun,
    StoredRuns,
    StoreFilters,
)

# Judging and reading whole files take their time.
LONG_SECONDS = 3600.0
CONTENT_TYPES = {".jsonl": "application/x-ndjson", ".parquet": "application/vnd.apache.parquet"}
Report = TypeVar("Report", bound=Document)


class AsyncExperienceCalls:
    """What is stored across runs."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def runs(self, **filters: Unpack[StoreFilters]) -> list[StoredRun]:
        """Stored runs and imports with their lineage, newest first. Raises NotFound for a run nobody stored."""
        return (await self._connection.ask(StoredRuns, "GET", "/v1/experience", params=filters)).items

    async def statistics(self, **filters: Unpack[StoreFilters]) -> ExperienceStatistics:
        """Counts by run, source, outcome, judge and licence. Raises NotFound."""
        path = "/v1/experience/stats"
        return await self._connection.ask(ExperienceStatistics, "GET", path, params=filters, timeout=LONG_SECONDS)

    async def rows(self, limit: int = 50, **filters: Unpack[RowFilters]) -> list[StoredRow]:
        """Stored trajectories without their tokens. Raises NotFound."""
        return await self._connection.pages(StoredRowPage, "/v1/experience/rows", filters, limit)

    async def row(self, trajectory_id: str) -> StoredRowDetail:
        """One stored trajectory with every column. Raises NotFound."""
        return await self._connection.ask(StoredRowDetail, "GET", f"/v1/experience/rows/{trajectory_id}")

    async def import_file(self, path: Path, name: str, **options: Unpack[ImportOptions]) -> ImportReport:
        """Store a JSONL or Parquet file's rows under a name; the same file again changes nothing.

        Raises InvalidInput: code "bad_rows" with a violation per row that is refused, "unsupported_file" or
        "unreadable_file".
        """
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is None:
            raise errors.InvalidInput(f"{path} is none of {', '.join(CONTENT_TYPES)}", code="unsupported_file")
        try:
            body = path.read_bytes()
        except OSError as error:
            raise errors.InvalidInput(f"cannot read {path}: {error.strerror}", code="unreadable_file") from None
        return await self._connection.ask(
            ImportReport,
            "POST",
            "/v1/experience/import",
            params={**options, "name": name},
            content=body,
            headers={"Content-Type": content_type},
            timeout=LONG_SECONDS,
        )

    async def export(self, target: Path, export_format: FileFormat, **requested: Unpack[Export]) -> int:
        """Write stored trajectories to a file, whole or not at all; returns its bytes.

        Raises InvalidInput (code "unwritable_file" for the target), NotFound, Unreachable when the connection breaks.
        """
        writing = target.with_name(f".{target.name}.partial")
        document = {**requested, "format": export_format}
        try:
            async with self._connection.http.stream(
                "POST", "/v1/experience/export", json=document, timeout=LONG_SECONDS
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                with writing.open("wb") as stream:
                    async for part in response.aiter_bytes():
                        stream.write(part)
            writing.replace(target)
        except httpx.TransportError as error:
            raise errors.Unreachable(f"the export broke off: {error}", code="api_unreachable") from None
        except OSError as error:
            raise errors.InvalidInput(f"cannot write {target}: {error.strerror}", code="unwritable_file") from None
        finally:
            writing.unlink(missing_ok=True)
        return target.stat().st_size

    async def rejudge(self, **requested: Unpack[Rejudge]) -> RejudgeReport:
        """Judge stored trajectories by the tests that a job or `tasks` has today. Raises InvalidInput, NotFound."""
        return await self._post(RejudgeReport, "rejudge", requested)

    async def compact(self, **requested: Unpack[Compact]) -> CompactReport:
        """Merge many small files into few. Raises NotFound, Conflict while another call does."""
        return await self._post(CompactReport, "compact", requested)

    async def prune(self, **requested: Unpack[Prune]) -> PruneReport:
        """Remove stored experience. Raises NotFound, Conflict for a job that is not over."""
        return await self._post(PruneReport, "prune", requested)

    async def _post(self, report: type[Report], action: str, requested: Mapping[str, object]) -> Report:
        path = f"/v1/experience/{action}"
        return await self._connection.ask(report, "POST", path, json=dict(requested), timeout=LONG_SECONDS)
