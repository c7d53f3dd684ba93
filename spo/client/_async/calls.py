"""The SDK's calls by subject, on one HTTP connection that asks again while the API is away."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack

import httpx
from pydantic import BaseModel
from ulid import ULID

from spo import api, errors
from spo.client.models import (
    PLOTTED,
    CalibrationKeywords,
    CompactKeywords,
    CompletionKeywords,
    EvaluationKeywords,
    ExportKeywords,
    FeedbackKeywords,
    ImportOptions,
    LogFilters,
    PruneKeywords,
    ReceivedFolder,
    RejudgeKeywords,
    RequestOptions,
    RowFilters,
    StoreFilters,
    TrajectoryFilters,
    content_of,
    error_of,
    parsed,
    pause_asked,
    plot,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Answer = TypeVar("Answer", bound=BaseModel)
PAGE_ENTRIES = 100

PART_BYTES = 16 << 20
PART_TYPE = "application/offset+octet-stream"
FILE_FORMATS: dict[str, api.FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}

# Judging and reading whole files take their time.
LONG_SECONDS = 3600.0
CONTENT_TYPES = {".jsonl": "application/x-ndjson", ".parquet": "application/vnd.apache.parquet"}
Report = TypeVar("Report", bound=api.Document)

PATH = "/v1/continual"

# Of an answer that begins only when an adapter is merged or a version fetched.
DOWNLOAD_SECONDS = 3600.0


class AsyncConnection:
    """Reads and other calls that are safe to repeat are repeated for `retry_seconds` while the API is away."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        timeout_seconds: float,
        retry_seconds: float,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout_seconds, transport=transport, follow_redirects=False
        )

    async def close(self) -> None:
        """Close the connections; the object cannot be used afterwards."""
        await self.http.aclose()

    async def ask(
        self,
        answer: type[Answer],
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        work_seconds: float = 0.0,
        **request: Unpack[RequestOptions],
    ) -> Answer:
        """The API's answer as a model. Raises what `content` raises, InternalError for an answer of another form."""
        return parsed(
            answer, await self.content(method, path, repeatable=repeatable, work_seconds=work_seconds, **request)
        )

    async def pages(
        self, page: type[api.Page[api.Entry]], path: str, parameters: Mapping[str, object], limit: int
    ) -> list[api.Entry]:
        """Up to `limit` entries of a list, on as many pages as it takes."""
        found: list[api.Entry] = []
        cursor: str | None = None
        while len(found) < limit:
            asked = {**parameters, "limit": min(PAGE_ENTRIES, limit - len(found)), "cursor": cursor}
            part = await self.ask(page, "GET", path, params=asked)
            found += part.items
            cursor = part.next_cursor
            if not cursor:
                break
        return found[:limit]

    async def content(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        patience_seconds: float | None = None,
        work_seconds: float = 0.0,
        **request: Unpack[RequestOptions],
    ) -> object:
        """What the API answered: decoded JSON, else text, None when empty; patience_seconds replaces retry_seconds.

        work_seconds: so long may it work on the answer, or be too busy for it, as long as it is there.
        Raises the SpoError of a problem, and Unreachable.
        """
        if "params" in request:
            request["params"] = {name: value for name, value in request["params"].items() if value is not None}
        patience = self.retry_seconds if patience_seconds is None else patience_seconds
        begun = time.monotonic()
        away_since: float | None = None
        if work_seconds:
            request.setdefault("timeout", httpx.Timeout(self.timeout_seconds, read=work_seconds))
        pause = 0.2
        while True:
            wanted = 0.0
            try:
                response = await self.http.request(method, path, **request)  # type: ignore[arg-type]
                if response.is_success:
                    return content_of(response)
                error, away_since = error_of(response), None
                again, wanted = error.retryable, pause_asked(response)
            except httpx.TransportError as failure:
                error = self.unreachable(failure)
                is_away = isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)
                again = repeatable or is_away
                away_since = (away_since or time.monotonic()) if is_away else None
            pause = max(pause, wanted)
            until = begun + max(patience, work_seconds) if away_since is None else away_since + patience
            if not again or time.monotonic() + pause > until:
                raise error
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)

    def unreachable(self, failure: Exception) -> errors.Unreachable:
        """The error that says where the API was looked for."""
        return errors.Unreachable(
            f"the SPO API at {self.url} did not answer within {self.retry_seconds:g} s ({failure}); "
            "`spo up` starts a platform here, SPO_API_URL names one elsewhere",
            code="api_unreachable",
        )


class AsyncDatasetCalls:
    """Task sets that jobs name as `tasks: {kind: dataset, id: ...}`."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def upload(
        self,
        path: Path,
        name: str = "",
        task_format: api.TaskFormat = "jsonl",
        resume: str | None = None,
        part_bytes: int = PART_BYTES,
    ) -> api.DatasetView:
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

    async def all(self, limit: int = 100) -> list[api.DatasetView]:
        """Datasets, newest first."""
        return await self._connection.pages(api.DatasetPage, "/v1/datasets", {}, limit)

    async def get(self, dataset_id: str) -> api.DatasetView:
        """One dataset with the report on its rows. Raises NotFound."""
        return await self._connection.ask(api.DatasetView, "GET", f"/v1/datasets/{dataset_id}")

    async def delete(self, dataset_id: str) -> None:
        """Remove a dataset for good. Raises NotFound, Conflict (code "dataset_in_use")."""
        await self._connection.content("DELETE", f"/v1/datasets/{dataset_id}")

    async def wait(self, dataset_id: str, timeout_seconds: float) -> api.DatasetView:
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

    async def _begin(self, path: Path, name: str, task_format: api.TaskFormat, size: int) -> api.DatasetView:
        if path.suffix not in FILE_FORMATS:
            raise errors.InvalidInput(f"{path} is none of {', '.join(FILE_FORMATS)}", code="bad_upload")
        wanted = {
            "name": name,
            "task_format": task_format,
            "file_format": FILE_FORMATS[path.suffix],
            "size_bytes": size,
        }
        return await self._connection.ask(api.DatasetView, "POST", "/v1/datasets", json=wanted, repeatable=False)

    async def _send(self, dataset_id: str, offset: int, part: bytes) -> api.DatasetView:
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        headers = {"Content-Type": PART_TYPE, "Upload-Offset": str(offset), "Content-Digest": f"sha-256=:{digest}:"}
        path = f"/v1/datasets/{dataset_id}"
        try:
            return await self._connection.ask(api.DatasetView, "PATCH", path, content=part, headers=headers)
        except errors.Conflict:
            # A part whose answer was lost is there already.
            found = await self.get(dataset_id)
            if found.uploaded_bytes <= offset:
                raise
            return found


class AsyncExperienceCalls:
    """What is stored across runs."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def runs(self, **filters: Unpack[StoreFilters]) -> list[api.StoredRun]:
        """Stored runs and imports with their lineage, newest first. Raises NotFound for a run nobody stored."""
        return (await self._connection.ask(api.StoredRuns, "GET", "/v1/experience", params=filters)).items

    async def statistics(self, **filters: Unpack[StoreFilters]) -> api.ExperienceStatistics:
        """Counts by run, source, outcome, judge and licence. Raises NotFound."""
        path = "/v1/experience/stats"
        return await self._connection.ask(api.ExperienceStatistics, "GET", path, params=filters, timeout=LONG_SECONDS)

    async def rows(self, limit: int = 50, **filters: Unpack[RowFilters]) -> list[api.StoredRow]:
        """Stored trajectories without their tokens. Raises NotFound."""
        return await self._connection.pages(api.StoredRowPage, "/v1/experience/rows", filters, limit)

    async def row(self, trajectory_id: str) -> api.StoredRowDetail:
        """One stored trajectory with every column. Raises NotFound."""
        return await self._connection.ask(api.StoredRowDetail, "GET", f"/v1/experience/rows/{trajectory_id}")

    async def import_file(self, path: Path, name: str, **options: Unpack[ImportOptions]) -> api.ImportReport:
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
            api.ImportReport,
            "POST",
            "/v1/experience/import",
            params={**options, "name": name},
            content=body,
            headers={"Content-Type": content_type},
            timeout=LONG_SECONDS,
        )

    async def export(self, target: Path, export_format: api.FileFormat, **requested: Unpack[ExportKeywords]) -> int:
        """Write stored trajectories to a file, whole or not at all; returns its bytes.

        Raises InvalidInput (code "unwritable_file" for the target), NotFound, Unreachable when the connection breaks.
        """
        writing = target.with_name(f".{target.name}.{ULID()}.partial")
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

    async def rejudge(self, **requested: Unpack[RejudgeKeywords]) -> api.RejudgeReport:
        """Judge stored trajectories by the tests that a job or `tasks` has today. Raises InvalidInput, NotFound."""
        return await self._post(api.RejudgeReport, "rejudge", requested)

    async def compact(self, **requested: Unpack[CompactKeywords]) -> api.CompactReport:
        """Merge many small files into few. Raises NotFound, Conflict while another call does."""
        return await self._post(api.CompactReport, "compact", requested)

    async def prune(self, **requested: Unpack[PruneKeywords]) -> api.PruneReport:
        """Remove stored experience. Raises NotFound, Conflict for a job that is not over."""
        return await self._post(api.PruneReport, "prune", requested)

    async def _post(self, report: type[Report], action: str, requested: Mapping[str, object]) -> Report:
        path = f"/v1/experience/{action}"
        return await self._connection.ask(report, "POST", path, json=dict(requested), timeout=LONG_SECONDS)


class AsyncServingCalls:
    """Names under which policies are served, and what is said of their answers."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def models(self) -> list[api.ServedModelView]:
        """Every name that means something now."""
        return (await self._connection.ask(api.ServedModelList, "GET", "/v1/served-models")).items

    async def get(self, name: str) -> api.ServedModelView:
        """What a name means now. Raises NotFound."""
        return await self._connection.ask(api.ServedModelView, "GET", f"/v1/served-models/{name}")

    async def publish(
        self,
        name: str,
        job_id: str,
        version: int | None = None,
        note: str = "",
        *,
        expected_number: int | None = None,
        min_replicas: int | None = None,
    ) -> api.ServedModelView:
        """Let a name mean a weight version of a job, None: always its newest; so many replicas stay for it.

        Raises NotFound, and Conflict when the name's last change is not number `expected_number` (0: none).
        """
        body = {"job_id": job_id, "version": version, "note": note, "expected_number": expected_number}
        body |= {} if min_replicas is None else {"min_replicas": min_replicas}
        return await self._connection.ask(api.ServedModelView, "PUT", f"/v1/served-models/{name}", json=body)

    async def roll_back(self, name: str, to_number: int | None = None, note: str = "") -> api.ServedModelView:
        """Serve again what was served before, or after change `to_number`. Raises NotFound, PreconditionFailed."""
        body = {"to_number": to_number, "note": note}
        path = f"/v1/served-models/{name}/rollback"
        return await self._connection.ask(api.ServedModelView, "POST", path, json=body, repeatable=False)

    async def remove(self, name: str) -> api.ServedModelView:
        """Let a name mean nothing; its history stays. Raises NotFound."""
        return await self._connection.ask(api.ServedModelView, "DELETE", f"/v1/served-models/{name}")

    async def history(self, name: str) -> list[api.ServedModelView]:
        """The last hundred changes of a name, newest first. Raises NotFound."""
        return (await self._connection.ask(api.ServedModelList, "GET", f"/v1/served-models/{name}/history")).items

    async def capture(self) -> api.CaptureView:
        """How traffic is captured where it is asked for, and how much is kept."""
        return await self._connection.ask(api.CaptureView, "GET", "/v1/capture")

    async def set_capture_policy(self, policy: Mapping[str, object]) -> api.CaptureView:
        """Change how traffic is captured from now on; what is not said has its default. Raises InvalidInput."""
        return await self._connection.ask(api.CaptureView, "PUT", "/v1/capture", json=dict(policy))

    async def captured(self) -> list[api.JsonObject]:
        """All that is kept, oldest first, with what was said of it."""
        lines = await self._connection.content("GET", "/v1/capture/export")
        return [json.loads(line) for line in str(lines or "").splitlines() if line]

    async def forget(self, completion_id: str) -> None:
        """Remove a captured completion and what was said of it."""
        await self._connection.content("DELETE", f"/v1/capture/completions/{completion_id}")

    async def feedback(
        self, completion_id: str, index: int = 0, **said: Unpack[FeedbackKeywords]
    ) -> api.FeedbackReceipt:
        """Join a score, thumbs, a test's result, an edited answer or a comment to a captured completion.

        The same again changes nothing. Raises NotFound when the completion was not captured.
        """
        body = {"id": completion_id, "index": index, **said}
        return await self._connection.ask(api.FeedbackReceipt, "POST", "/v1/feedback", json=body)

    async def collect(
        self, name: str, job: str | None = None, *, judge_unscored: bool = False, after_unix_ms: int = 0
    ) -> api.CollectReport:
        """Store captured traffic as trajectories under a name; prompts are those of a job. Raises Conflict."""
        body = {"name": name, "job": job, "judge_unscored": judge_unscored, "after_unix_ms": after_unix_ms}
        return await self._connection.ask(api.CollectReport, "POST", "/v1/capture/collect", json=body)


class AsyncContinualCalls:
    """Continual jobs of the tenant, by name."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def put(self, name: str, spec: Mapping[str, object]) -> api.ContinualDetail:
        """Make one or change it; its rounds stay. Raises InvalidInput, and NotFound where nothing is so served."""
        return await self._connection.ask(api.ContinualDetail, "PUT", f"{PATH}/{name}", json=dict(spec))

    async def all(self) -> list[api.ContinualSummary]:
        """All of them, by name."""
        return (await self._connection.ask(api.ContinualList, "GET", PATH)).items

    async def get(self, name: str) -> api.ContinualDetail:
        """One with its rounds, newest first. Raises NotFound."""
        return await self._connection.ask(api.ContinualDetail, "GET", f"{PATH}/{name}")

    async def begin_round(self, name: str) -> api.ContinualDetail:
        """Begin a round as soon as none is under way and anything is new. Raises NotFound."""
        return await self._connection.ask(api.ContinualDetail, "POST", f"{PATH}/{name}/rounds")

    async def delete(self, name: str) -> None:
        """Forget it and its rounds; jobs, weights and what is served stay. Raises NotFound."""
        await self._connection.content("DELETE", f"{PATH}/{name}")


class AsyncDeadLetterCalls:
    """Dead letters of a job; without one, those of entries that name no job, which need the scope admin."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def newest(
        self, job_id: str | None = None, stream: str = "", limit: int = 200
    ) -> list[api.DeadLetterSummary]:
        """The letters, the newest of each stream first. Raises NotFound."""
        return await self._connection.pages(api.DeadLetterPage, _path(job_id), {"stream": stream}, limit)

    async def totals(self, job_id: str) -> dict[str, api.DeadLetterTotals]:
        """How many entries of a job were given up on, by stream. Raises NotFound."""
        return (await self._connection.ask(api.DeadLetterPage, "GET", _path(job_id), params={"limit": 1})).totals

    async def get(self, letter_id: str, job_id: str | None = None) -> api.DeadLetterDetail:
        """One letter with what it says. Raises NotFound."""
        return await self._connection.ask(api.DeadLetterDetail, "GET", f"{_path(job_id)}/{letter_id}")

    async def redrive(self, letter_id: str, job_id: str | None = None) -> bool:
        """Put an entry back on its stream; False when it is no letter any more. Raises NotFound, Conflict."""
        return (await self._connection.ask(api.Redriven, "POST", f"{_path(job_id)}/{letter_id}/redrive")).redriven

    async def drop(self, letter_id: str, job_id: str | None = None) -> None:
        """Forget a letter; its job goes on counting it. Raises NotFound."""
        await self._connection.content("DELETE", f"{_path(job_id)}/{letter_id}")


def _path(job_id: str | None) -> str:
    return f"/v1/jobs/{job_id}/dead-letters" if job_id else "/v1/dead-letters"


class AsyncPlatformCalls:
    """What operators ask; keys and the audit log need the scope admin."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def scale(self) -> api.ScaleView:
        """Desired and live replicas of each pool, with bounds."""
        return await self._connection.ask(api.ScaleView, "GET", "/v1/scale")

    async def set_scale(self, **replicas: int) -> api.ScaleView:
        """Ask for so many replicas: inference=3, sandbox_judge=2. Raises InvalidInput with a pointer per pool."""
        pools = {pool.replace("_", "-"): count for pool, count in replicas.items()}
        return await self._connection.ask(api.ScaleView, "PUT", "/v1/scale", json=pools)

    async def attention(self) -> list[api.AttentionEntry]:
        """What is wrong now and what to do about it, errors first."""
        return (await self._connection.ask(api.AttentionList, "GET", "/v1/attention")).items

    async def create_key(
        self,
        name: str,
        tenant: str,
        scopes: Sequence[str],
        max_active_jobs: int | None = None,
        expires_in_seconds: int | None = None,
    ) -> api.NewKey:
        """Make an API key; its `token` is in this answer and nowhere else. Raises InvalidInput."""
        body = {
            "name": name,
            "tenant": tenant,
            "scopes": list(scopes),
            "max_active_jobs": max_active_jobs,
            "expires_in_seconds": expires_in_seconds,
        }
        return await self._connection.ask(api.NewKey, "POST", "/v1/keys", json=body, repeatable=False)

    async def keys(self) -> list[api.Key]:
        """Every API key, revoked ones too, without secrets."""
        return (await self._connection.ask(api.Keys, "GET", "/v1/keys")).items

    async def revoke_key(self, key_id: str) -> api.Key:
        """Make a key useless, within five seconds. Raises NotFound."""
        return await self._connection.ask(api.Key, "DELETE", f"/v1/keys/{key_id}")

    async def audit(self, limit: int = 100) -> list[api.AuditRecord]:
        """Changes and refusals, newest first."""
        return await self._connection.pages(api.AuditPage, "/v1/audit", {}, limit)

    async def describe(self) -> api.PlatformView:
        """Which platform this is, what it lost, and the jobs whose records are gone."""
        return await self._connection.ask(api.PlatformView, "GET", "/v1/platform")

    async def rebuild(self, job_ids: Sequence[str] | None = None, *, resume: bool = False) -> list[api.RebuiltJob]:
        """Make the records of lost jobs again, by default of all, and acknowledge the loss. Raises InvalidInput."""
        body = {"job_ids": None if job_ids is None else list(job_ids), "resume": resume}
        return (await self._connection.ask(api.RebuiltJobs, "POST", "/v1/platform/rebuild", json=body)).items

    async def version(self) -> api.Version:
        """The orchestrator's release."""
        return await self._connection.ask(api.Version, "GET", "/version")

    async def is_ready(self) -> bool:
        """Whether the platform takes requests now; false while it drains or lacks Redis, or does not answer."""
        try:
            await self._connection.content("GET", "/readyz", patience_seconds=0)
        except errors.NotReady:
            return False
        return True

    async def is_alive(self) -> bool:
        """Whether the orchestrator answers at all. Raises Unreachable when it does not."""
        return bool(await self._connection.content("GET", "/healthz"))

    async def prometheus(self) -> str:
        """The orchestrator's metrics in Prometheus' text format."""
        return str(await self._connection.content("GET", "/metrics"))


class AsyncTrainingCalls:
    """The client's calls about one job's training; all of them raise NotFound for a job that is not there."""

    _connection: AsyncConnection

    async def metrics(
        self,
        job_id: str,
        kind: Literal["training", "platform"] = "training",
        from_step: int = 0,
        max_points: int = 1000,
        to_step: int | None = None,
    ) -> api.MetricSeries:
        """A job's scalars as columns: of training over steps, or of queues and replicas over unix milliseconds."""
        asked = {"kind": kind, "from_step": from_step, "to_step": to_step, "max_points": max_points}
        return await self._connection.ask(api.MetricSeries, "GET", f"/v1/jobs/{job_id}/metrics", params=asked)

    async def evaluations(self, job_id: str) -> list[api.StepEvaluation]:
        """pass@k on the held-out problems, in order of steps."""
        return (await self._connection.ask(api.Evaluations, "GET", f"/v1/jobs/{job_id}/evaluations")).items

    async def plot(self, job_id: str, names: Sequence[str] = PLOTTED) -> Figure:
        """A matplotlib figure of pass@k with intervals and of these curves; notebooks show it.

        Raises PreconditionFailed (code "package_missing") where matplotlib is not installed.
        """
        return plot(await self.metrics(job_id), await self.evaluations(job_id), names)

    async def requested_evaluations(self) -> list[api.Evaluation]:
        """Evaluations that somebody asked for, newest first, without their tables of problems."""
        return (await self._connection.ask(api.EvaluationList, "GET", "/v1/evaluations")).items

    async def request_evaluation(self, job_id: str, **wanted: Unpack[EvaluationKeywords]) -> api.Evaluation:
        """Queue an evaluation of a weight version or checkpoint. Raises InvalidInput with a pointer per fault."""
        body = {"job_id": job_id, **wanted}
        return await self._connection.ask(api.Evaluation, "POST", "/v1/evaluations", json=body, repeatable=False)

    async def evaluation(self, evaluation_id: str) -> api.Evaluation:
        """An evaluation somebody asked for, with its table of problems once it succeeded. Raises NotFound."""
        return await self._connection.ask(api.Evaluation, "GET", f"/v1/evaluations/{evaluation_id}")

    async def cancel_evaluation(self, evaluation_id: str) -> api.Evaluation:
        """End an evaluation without a result. Raises NotFound, Conflict (code "evaluation_ended")."""
        return await self._connection.ask(api.Evaluation, "POST", f"/v1/evaluations/{evaluation_id}/cancel")

    async def wait_evaluation(self, evaluation_id: str, timeout_seconds: float) -> api.Evaluation:
        """The evaluation once it has ended. Raises NotFound, NotReady (code "wait_timeout")."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = await self.evaluation(evaluation_id)
            if found.state in ("succeeded", "failed", "cancelled"):
                return found
            if time.monotonic() > deadline:
                message = f"{evaluation_id} is still {found.state} after {timeout_seconds:g} s; it may wait for jobs"
                raise errors.NotReady(message, code="wait_timeout")
            await asyncio.sleep(1.0)

    async def trajectories(
        self, job_id: str, limit: int = 50, **filters: Unpack[TrajectoryFilters]
    ) -> list[api.Trajectory]:
        """Trajectories of a job, on as many pages as it takes."""
        return await self._connection.pages(api.TrajectoryPage, f"/v1/jobs/{job_id}/trajectories", filters, limit)

    async def trajectory(
        self, job_id: str, trajectory_id: str, steps_from: int = 0, steps_limit: int | None = None
    ) -> api.TrajectoryDetail:
        """One trajectory with every hop it took, and a page of the training steps that drew it. Raises NotFound."""
        asked = {"steps_from": steps_from, "steps_limit": steps_limit}
        path = f"/v1/jobs/{job_id}/trajectories/{trajectory_id}"
        return await self._connection.ask(api.TrajectoryDetail, "GET", path, params=asked)

    async def token_values(self, job_id: str, trajectory_id: str, policy_version: int | None = None) -> api.TokenValues:
        """Q_t and advantage of each token of a trajectory under a weight version, default the newest."""
        asked = {"policy_version": policy_version}
        path = f"/v1/jobs/{job_id}/trajectories/{trajectory_id}/values"
        return await self._connection.ask(api.TokenValues, "GET", path, params=asked)

    async def prompt(self, job_id: str, prompt_id: str) -> api.PromptView:
        """A prompt's value and its latest trajectories. Raises NotFound."""
        return await self._connection.ask(api.PromptView, "GET", f"/v1/jobs/{job_id}/prompts/{prompt_id}")

    async def prompts(self, job_id: str, limit: int = 100) -> list[api.PromptSuccess]:
        """Training prompts in their order, with how pi0 did on each."""
        return await self._connection.pages(api.PromptPage, f"/v1/jobs/{job_id}/prompts", {}, limit)

    async def batch(self, job_id: str, step: int) -> api.BatchView:
        """What a training step learnt from. Raises NotFound."""
        return await self._connection.ask(api.BatchView, "GET", f"/v1/jobs/{job_id}/batches/{step}")

    async def calibration(
        self, job_id: str, timeout_seconds: float = 600, **design: Unpack[CalibrationKeywords]
    ) -> api.Calibration:
        """Predicted Q_t against the success of fresh continuations of stored prefixes."""
        path = f"/v1/jobs/{job_id}/calibration"
        return await self._connection.ask(api.Calibration, "GET", path, params=design, timeout=timeout_seconds)

    async def weights(self, job_id: str) -> list[api.WeightVersion]:
        """Published weight versions and which replicas serve them."""
        return (await self._connection.ask(api.WeightVersions, "GET", f"/v1/jobs/{job_id}/weights")).items

    async def weight_version(self, job_id: str, version: int) -> api.WeightVersion:
        """One published version and which replicas serve it. Raises NotFound."""
        return await self._connection.ask(api.WeightVersion, "GET", f"/v1/jobs/{job_id}/weights/{version}")

    async def download_weights(self, job_id: str, version: int, folder: Path, *, merge: bool = False) -> Path:
        """A published version as a new folder that transformers and vLLM load, or peft an adapter; returns the folder.

        merge: an adapter as a whole model. Raises NotFound, InternalError (code "integrity") for a damaged one,
        InvalidInput (code "unwritable_file") for a folder that is there or cannot be written, Unreachable when the
        connection breaks.
        """
        path = f"/v1/jobs/{job_id}/weights/{version}/download"
        with ReceivedFolder(folder) as receiving:
            await self._receive(path, {"merge": merge}, receiving)
        return receiving.target

    async def _receive(self, path: str, asked: dict[str, bool], receiving: ReceivedFolder) -> None:
        try:
            async with self._connection.http.stream("GET", path, params=asked, timeout=DOWNLOAD_SECONDS) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for piece in response.aiter_bytes():
                    receiving.take(piece)
        except httpx.TransportError as error:
            raise errors.Unreachable(f"the download broke off: {error}", code="api_unreachable") from None

    async def push_weights(self, job_id: str, version: int) -> api.AnnouncedVersion:
        """Announce a stored version again. Raises NotFound, Conflict."""
        path = f"/v1/jobs/{job_id}/weights/push"
        return await self._connection.ask(api.AnnouncedVersion, "POST", path, json={"version": version})

    async def rollback_weights(self, job_id: str, version: int) -> api.AnnouncedVersion:
        """Let inference go back to an older version. Raises NotFound, Conflict."""
        path = f"/v1/jobs/{job_id}/weights/rollback"
        return await self._connection.ask(api.AnnouncedVersion, "POST", path, json={"version": version})

    async def checkpoints(self, job_id: str) -> list[api.Checkpoint]:
        """Saved states of the trainer by step."""
        return (await self._connection.ask(api.Checkpoints, "GET", f"/v1/jobs/{job_id}/checkpoints")).items

    async def logs(self, job_id: str, limit: int = 200, **filters: Unpack[LogFilters]) -> list[api.LogLine]:
        """Latest log lines of a job, newest first."""
        return await self._connection.pages(api.LogPage, f"/v1/jobs/{job_id}/logs", filters, limit)

    async def policy_versions(self, job_id: str) -> list[api.WeightVersion]:
        """Versions of a job's policy that can be asked for completions."""
        return (await self._connection.ask(api.WeightVersions, "GET", f"/v1/policies/{job_id}/versions")).items

    async def complete(
        self, job_id: str, prompt: str, timeout_seconds: float = 120, **requested: Unpack[CompletionKeywords]
    ) -> api.Completions:
        """Let a policy complete a prompt. Raises InvalidInput, NotReady while no replica serves the job."""
        body = {"prompt": prompt, **requested}
        path = f"/v1/policies/{job_id}/completions"
        return await self._connection.ask(api.Completions, "POST", path, json=body, timeout=timeout_seconds)
