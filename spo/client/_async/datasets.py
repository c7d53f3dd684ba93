"""The datasets' part of the SDK: `datasets` of a client."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from pathlib import Path

from spo import errors
from spo.client._async.connection import AsyncConnection
from spo.client.models import DatasetPage, DatasetView, FileFormat, TaskFormat

PART_BYTES = 16 << 20
PART_TYPE = "application/offset+octet-stream"
FILE_FORMATS: dict[str, FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}


class AsyncDatasetCalls:
    """Task sets that jobs name as `tasks: {kind: dataset, id: ...}`."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def upload(
        self,
        path: Path,
        name: str = "",
        task_format: TaskFormat = "jsonl",
        resume: str | None = None,
        part_bytes: int = PART_BYTES,
    ) -> DatasetView:
        """Send a JSONL or Parquet file in parts; resume: the id of an upload that was cut off and goes on where it was.

        name is the file's by default; task_format is jsonl (the platform's own), code_contests or taco. Raises
        InvalidInput, NotFound, Unreachable.
        """
        size = path.stat().st_size
        found = await self.get(resume) if resume else await self._begin(path, name or path.stem, task_format, size)
        with path.open("rb") as file:
            while found.uploaded_bytes < size:
                file.seek(found.uploaded_bytes)
                found = await self._send(found.id, found.uploaded_bytes, file.read(part_bytes))
        return found

    async def all(self, limit: int = 100) -> list[DatasetView]:
        """Datasets, newest first."""
        return await self._connection.pages(DatasetPage, "/v1/datasets", {}, limit)

    async def get(self, dataset_id: str) -> DatasetView:
        """One dataset with the report on its rows. Raises NotFound."""
        return await self._connection.ask(DatasetView, "GET", f"/v1/datasets/{dataset_id}")

    async def delete(self, dataset_id: str) -> None:
        """Remove a dataset for good. Raises NotFound, Conflict (code "dataset_in_use")."""
        await self._connection.content("DELETE", f"/v1/datasets/{dataset_id}")

    async def wait(self, dataset_id: str, timeout_seconds: float) -> DatasetView:
        """The dataset once it is "ready" or "invalid". Raises NotFound, NotReady (code "wait_timeout")."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = await self.get(dataset_id)
            if found.state in ("ready", "invalid"):
                return found
            if time.monotonic() > deadline:
                message = f"dataset {dataset_id} is still {found.state} after {timeout_seconds:g} s"
                raise errors.NotReady(message, code="wait_timeout")
            await asyncio.sleep(0.5)

    async def _begin(self, path: Path, name: str, task_format: TaskFormat, size: int) -> DatasetView:
        if path.suffix not in FILE_FORMATS:
            raise errors.InvalidInput(f"{path} is none of {', '.join(FILE_FORMATS)}", code="bad_upload")
        wanted = {
            "name": name,
            "task_format": task_format,
            "file_format": FILE_FORMATS[path.suffix],
            "size_bytes": size,
        }
        return await self._connection.ask(DatasetView, "POST", "/v1/datasets", json=wanted, repeatable=False)

    async def _send(self, dataset_id: str, offset: int, part: bytes) -> DatasetView:
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        headers = {"Content-Type": PART_TYPE, "Upload-Offset": str(offset), "Content-Digest": f"sha-256=:{digest}:"}
        path = f"/v1/datasets/{dataset_id}"
        try:
            return await self._connection.ask(DatasetView, "PATCH", path, content=part, headers=headers)
        except errors.Conflict:
            # A part whose answer was lost is there already.
            found = await self.get(dataset_id)
            if found.uploaded_bytes <= offset:
                raise
            return found
