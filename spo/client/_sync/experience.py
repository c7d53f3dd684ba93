# Made from spo/client/_async/experience.py by `make sdk`: edit that.
"""The experience store's part of the SDK: `experience` of a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx

from spo import errors

# Judging and reading whole files take their time.
LONG_SECONDS = 3600.0
CONTENT_TYPES = {".jsonl": "application/x-ndjson", ".parquet": "application/vnd.apache.parquet"}
PAGE = 100

Ask = Callable[..., Any]


class ExperienceCalls:
    """What is stored across runs; filters are run and task_set."""

    def __init__(self, ask: Ask, http: httpx.Client, error_of: Callable[[httpx.Response], errors.SpoError]) -> None:
        self._ask = ask
        self._http = http
        self._error_of = error_of

    def runs(self, **filters: str) -> list[dict[str, Any]]:
        """Stored runs and imports with their lineage, newest first. Raises NotFound for a run nobody stored."""
        found: dict[str, Any] = self._ask("GET", "/v1/experience", params=filters)
        return list(found["items"])

    def statistics(self, **filters: str) -> dict[str, Any]:
        """Counts by run, source, outcome, judge and licence."""
        found: dict[str, Any] = self._ask("GET", "/v1/experience/stats", params=filters, timeout=LONG_SECONDS)
        return found

    def rows(self, limit: int = 50, **filters: str | bool) -> list[dict[str, Any]]:
        """Stored trajectories; filters also prompt_id, source and right."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while len(found) < limit:
            asked = {**filters, "limit": min(PAGE, limit - len(found)), "cursor": cursor}
            page = self._ask("GET", "/v1/experience/rows", params=asked)
            found += page["items"]
            cursor = page["next_cursor"]
            if not cursor:
                break
        return found

    def row(self, trajectory_id: str) -> dict[str, Any]:
        """One stored trajectory with every column. Raises NotFound."""
        found: dict[str, Any] = self._ask("GET", f"/v1/experience/rows/{trajectory_id}")
        return found

    def import_file(self, path: Path, name: str, **options: str | float | bool) -> dict[str, Any]:
        """Store a JSONL or Parquet file's rows under a name; the same file again changes nothing.

        Options: job or tasks (JSON), licence, reward_scale, reward_shift, judging, keep_good. Raises InvalidInput (code
        "bad_rows") with a violation per row that is refused.
        """
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is None:
            raise errors.InvalidInput(f"{path} is none of {', '.join(CONTENT_TYPES)}", code="unsupported_file")
        try:
            body = path.read_bytes()
        except OSError as error:
            raise errors.InvalidInput(f"cannot read {path}: {error.strerror}", code="unreadable_file") from None
        headers = {"Content-Type": content_type}
        given = {option: value for option, value in options.items() if value is not None} | {"name": name}
        report: dict[str, Any] = self._ask(
            "POST", "/v1/experience/import", params=given, content=body, headers=headers, timeout=LONG_SECONDS
        )
        return report

    def export(self, target: Path, export_format: Literal["jsonl", "parquet"], **requested: Any) -> int:
        """Write trajectories to a file, whole or not at all; returns its bytes. Wish: run, task_set, right."""
        writing = target.with_name(f".{target.name}.partial")
        document = {**requested, "format": export_format}
        try:
            with self._http.stream("POST", "/v1/experience/export", json=document, timeout=LONG_SECONDS) as response:
                if not response.is_success:
                    response.read()
                    raise self._error_of(response)
                with writing.open("wb") as stream:
                    for part in response.iter_bytes():
                        stream.write(part)
            writing.replace(target)
        except httpx.TransportError as error:
            raise errors.Unreachable(f"the export broke off: {error}", code="api_unreachable") from None
        except OSError as error:
            raise errors.InvalidInput(f"cannot write {target}: {error.strerror}", code="unwritable_file") from None
        finally:
            writing.unlink(missing_ok=True)
        return target.stat().st_size

    def rejudge(self, **requested: Any) -> dict[str, Any]:
        """Judge stored trajectories anew; wish: job or tasks, run, task_set, name, dry_run."""
        return self._post("rejudge", requested)

    def compact(self, **requested: Any) -> dict[str, Any]:
        """Merge many small files into few; wish: run, task_set, dry_run. Raises Conflict while another does."""
        return self._post("compact", requested)

    def prune(self, **requested: Any) -> dict[str, Any]:
        """Remove experience; wish: run, task_set, older_than_days, dry_run. Raises Conflict for a job under way."""
        return self._post("prune", requested)

    def _post(self, action: str, requested: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask(
            "POST", f"/v1/experience/{action}", json=dict(requested), timeout=LONG_SECONDS
        )
        return answer
