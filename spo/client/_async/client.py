"""The Python SDK over the REST API, for asyncio. `spo/client/_sync` is made from it: edit here, then `make sdk`.

    async with AsyncClient("http://127.0.0.1:8080") as spo:
        job = await spo.submit({"model": {"path": "/models/pi0"}})
        async for event in spo.events(job.id):
            print(event.seq, event.kind, event.body)
        print((await spo.wait(job.id, timeout_seconds=600)).state)

Every call has a deadline. Calls that are safe to repeat (reads, verbs, a submit with its Idempotency-Key) are repeated
for `retry_seconds` while the API is away, so a restart of the orchestrator goes unnoticed; others only when they were
surely not carried out. Failures raise the SpoError that the server's problem+json stands for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Self

import httpx
from httpx_sse import SSEError, aconnect_sse
from ulid import ULID

from spo import errors
from spo.client._async.datasets import AsyncDatasetCalls
from spo.client._async.experience import AsyncExperienceCalls
from spo.client._async.platform import AsyncPlatformCalls
from spo.client._async.training import AsyncTrainingCalls
from spo.client.http_errors import content_of, error_of, pause_asked
from spo.client.models import Event, Job, Page
from spo.spec.job_spec import JobSpec

HEARTBEAT_SECONDS = 15.0
DEFAULT_URL = "http://127.0.0.1:8080"


class AsyncClient(AsyncTrainingCalls):
    """A connection to the orchestrator's API; close it or use it as a context manager."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 15.0,
        retry_seconds: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout_seconds, transport=transport, follow_redirects=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, spec: JobSpec | Mapping[str, Any], idempotency_key: str | None = None) -> Job:
        """Submit a job; the same key and spec give the same job. Raises InvalidInput with a pointer per fault."""
        key = idempotency_key or str(ULID())
        reply = await self._ask("POST", "/v1/jobs", json=_document(spec), headers={"Idempotency-Key": key})
        return Job.model_validate(reply)

    async def validate(self, spec: JobSpec | Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec with every default filled in, without submitting it. Raises InvalidInput."""
        reply: dict[str, Any] = await self._ask(
            "POST", "/v1/jobs", json=_document(spec), params={"validate_only": True}
        )
        return reply

    async def get(self, job_id: str) -> Job:
        """Raises NotFound."""
        return Job.model_validate(await self._ask("GET", f"/v1/jobs/{job_id}"))

    async def jobs(self, status: str | None = None, limit: int = 100, **filters: Any) -> list[Job]:
        """Jobs, newest first, on as many pages as it takes; filters: label=["team:red"], created_from, created_to."""
        parameters = filters | ({"status": status} if status else {})
        return [Job.model_validate(entry) for entry in await self._entries("/v1/jobs", parameters, limit)]

    async def fork(self, job_id: str, idempotency_key: str | None = None, **requested: Any) -> Job:
        """A new job from version= or checkpoint_step=, with overrides={...} to its spec; as_reference=True: as pi0.

        By default from the newest version, with the parent's pi0 and values. Raises NotFound, InvalidInput by field.
        """
        headers = {"Idempotency-Key": idempotency_key or str(ULID())}
        return Job.model_validate(await self._ask("POST", f"/v1/jobs/{job_id}/fork", json=requested, headers=headers))

    async def cancel(self, job_id: str) -> Job:
        """Ask a job to stop for good. Raises Conflict naming what is legal."""
        return await self._action(job_id, "cancel")

    async def pause(self, job_id: str) -> Job:
        """Ask a running job to checkpoint and wait. Raises Conflict naming what is legal."""
        return await self._action(job_id, "pause")

    async def resume(self, job_id: str) -> Job:
        """Let a paused job go on. Raises Conflict naming what is legal."""
        return await self._action(job_id, "resume")

    async def checkpoint(self, job_id: str) -> Job:
        """Ask a running job to save its state now. Raises Conflict naming what is legal."""
        return await self._action(job_id, "checkpoint")

    async def history(self, job_id: str, after_seq: int = 0) -> list[Event]:
        """What has happened so far."""
        found: list[Event] = []
        while True:
            cursor = found[-1].seq if found else after_seq
            page = await self._ask("GET", f"/v1/jobs/{job_id}/events", params={"after_seq": cursor, "limit": 500})
            events = [Event.model_validate(entry) for entry in page["items"]]
            found += events
            if not events or not page.get("next_cursor"):
                return found

    async def events(self, job_id: str, after_seq: int = 0) -> AsyncIterator[Event]:
        """Every event after after_seq as it happens, until the job ends; reconnects without gaps or repeats.

        Raises Unreachable when the API stays away for retry_seconds.
        """
        seen = after_seq
        away_since: float | None = None
        while True:
            try:
                async for event in self._stream(job_id, seen):
                    away_since = None
                    if event.seq <= seen:
                        continue
                    seen = event.seq
                    yield event
                    if event.ends_the_job:
                        return
            except (httpx.TransportError, SSEError, errors.NotReady) as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self.retry_seconds:
                    raise self._unreachable(error) from error
            await asyncio.sleep(0.5)

    async def delete(self, job_id: str) -> None:
        """Delete an ended job; its experience stays in the store. Raises NotFound, Conflict."""
        await self._ask("DELETE", f"/v1/jobs/{job_id}")

    async def replicas(self) -> list[dict[str, Any]]:
        """Every live registered replica."""
        reply: dict[str, Any] = await self._ask("GET", "/v1/replicas")
        return list(reply["items"])

    @property
    def platform(self) -> AsyncPlatformCalls:
        """Replicas to wish for, API keys, the audit log."""
        return AsyncPlatformCalls(self._ask, self._entries)

    @property
    def datasets(self) -> AsyncDatasetCalls:
        """Task sets that are uploaded once and named by jobs."""
        return AsyncDatasetCalls(self._ask, self._entries)

    @property
    def experience(self) -> AsyncExperienceCalls:
        """What runs and imports have stored."""
        return AsyncExperienceCalls(self._ask, self._http, error_of)

    async def wait(self, job_id: str, timeout_seconds: float, on_poll: Callable[[Job], None] = lambda _: None) -> Job:
        """Return the job once it has ended, whatever the end. Raises NotReady (code "wait_timeout")."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            job = await self.get(job_id)
            on_poll(job)
            if job.is_final:
                return job
            if time.monotonic() > deadline:
                message = f"job {job_id} is still {job.state} after {timeout_seconds:g} s"
                raise errors.NotReady(message, code="wait_timeout")
            await asyncio.sleep(1.0)

    async def _action(self, job_id: str, action: str) -> Job:
        return Job.model_validate(await self._ask("POST", f"/v1/jobs/{job_id}/{action}"))

    async def _entries(self, path: str, parameters: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while len(found) < limit:
            asked = {**parameters, "limit": min(100, limit - len(found))} | ({"cursor": cursor} if cursor else {})
            page = Page.model_validate(await self._ask("GET", path, params=asked))
            found += page.items
            cursor = page.next_cursor
            if not cursor:
                break
        return found[:limit]

    async def _stream(self, job_id: str, after_seq: int) -> AsyncIterator[Event]:
        headers = {"Last-Event-ID": str(after_seq)}
        # The server sends a comment as a heartbeat: a longer silence means a dead connection.
        timeout = httpx.Timeout(self.timeout_seconds, read=3 * HEARTBEAT_SECONDS)
        async with aconnect_sse(
            self._http, "GET", f"/v1/jobs/{job_id}/events", headers=headers, timeout=timeout
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise error_of(source.response)
            async for message in source.aiter_sse():
                if message.data:
                    yield Event.model_validate_json(message.data)

    async def _ask(
        self, method: str, path: str, *, repeatable: bool = True, patience_seconds: float | None = None, **request: Any
    ) -> Any:
        deadline = time.monotonic() + (self.retry_seconds if patience_seconds is None else patience_seconds)
        pause = 0.2
        while True:
            wanted = 0.0
            try:
                response = await self._http.request(method, path, **request)
                if response.is_success:
                    return content_of(response)
                error = error_of(response)
                again, wanted = error.retryable, pause_asked(response)
            except httpx.TransportError as failure:
                error = self._unreachable(failure)
                again = repeatable or isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)
            pause = max(pause, wanted)
            if not again or time.monotonic() + pause > deadline:
                raise error
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)

    def _unreachable(self, failure: Exception) -> errors.Unreachable:
        return errors.Unreachable(
            f"the SPO API at {self.url} did not answer within {self.retry_seconds:g} s ({failure}); "
            "`spo up` starts a platform here, SPO_API_URL names one elsewhere",
            code="api_unreachable",
        )


def _document(spec: JobSpec | Mapping[str, Any]) -> dict[str, Any]:
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
