"""The datasets' part of the SDK: `datasets` of a client."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spo import errors

PART_BYTES = 16 << 20
PART_TYPE = "application/offset+octet-stream"
FILE_FORMATS = {".jsonl": "jsonl", ".parquet": "parquet"}
UNFINISHED = ("uploading", "validating")

Ask = Callable[..., Any]


class AsyncDatasetCalls:
    """Task sets that jobs name as `tasks: {kind: dataset, id: ...}`."""

    def __init__(self, ask: Ask, entries: Callable[[str, dict[str, Any], int], Any]) -> None:
        self._ask = ask
        self._entries = entries

    async def upload(
        self,
        path: Path,
        name: str = "",
        task_format: str = "jsonl",
        resume: str | None = None,
        part_bytes: int = PART_BYTES,
    ) -> dict[str, Any]:
        """Send a JSONL or Parquet file in parts; resume: the id of an upload that was cut off goes on where it was.

        task_format is jsonl (the platform's own), code_contests or taco. Raises InvalidInput, Unreachable.
        """
        size = path.stat().st_size
        found = await self.get(resume) if resume else await self._begin(path, name or path.stem, task_format, size)
        offset = int(found.get("uploaded_bytes", 0))
        with path.open("rb") as file:
            while offset < size:
                file.seek(offset)
                part = file.read(part_bytes)
                found = await self._send(found["id"], offset, part)
                offset = int(found.get("uploaded_bytes", offset + len(part)))
        return found

    async def all(self, limit: int = 100) -> list[dict[str, Any]]:
        """Newest first."""
        found: list[dict[str, Any]] = await self._entries("/v1/datasets", {}, limit)
        return found

    async def get(self, dataset_id: str) -> dict[str, Any]:
        """One dataset with the report on its rows. Raises NotFound."""
        found: dict[str, Any] = await self._ask("GET", f"/v1/datasets/{dataset_id}")
        return found

    async def delete(self, dataset_id: str) -> None:
        """Remove a dataset for good. Raises NotFound, Conflict (code "dataset_in_use")."""
        await self._ask("DELETE", f"/v1/datasets/{dataset_id}")

    async def wait(self, dataset_id: str, timeout_seconds: float) -> dict[str, Any]:
        """The dataset once it is `ready` or `invalid`. Raises NotReady (code "wait_timeout")."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = await self.get(dataset_id)
            if found["state"] not in UNFINISHED:
                return found
            if time.monotonic() > deadline:
                message = f"dataset {dataset_id} is still {found['state']} after {timeout_seconds:g} s"
                raise errors.NotReady(message, code="wait_timeout")
            await asyncio.sleep(0.5)

    async def _begin(self, path: Path, name: str, task_format: str, size: int) -> dict[str, Any]:
        if path.suffix not in FILE_FORMATS:
            raise errors.InvalidInput(f"{path} is none of {', '.join(FILE_FORMATS)}", code="bad_upload")
        wanted = {
            "name": name,
            "task_format": task_format,
            "file_format": FILE_FORMATS[path.suffix],
            "size_bytes": size,
        }
        found: dict[str, Any] = await self._ask("POST", "/v1/datasets", json=wanted, repeatable=False)
        return found

    async def _send(self, dataset_id: str, offset: int, part: bytes) -> dict[str, Any]:
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        headers = {"Content-Type": PART_TYPE, "Upload-Offset": str(offset), "Content-Digest": f"sha-256=:{digest}:"}
        try:
            found: dict[str, Any] = await self._ask(
                "PATCH", f"/v1/datasets/{dataset_id}", content=part, headers=headers
            )
        except errors.Conflict:
            # A part whose answer was lost is there already.
            found = await self.get(dataset_id)
            if int(found["uploaded_bytes"]) <= offset:
                raise
        return found
