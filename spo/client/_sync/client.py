# Made from spo/client/_async/client.py by `make sdk`: edit that.
"""The Python SDK over the REST API.

    with Client("http://127.0.0.1:8080") as spo:
        job = spo.submit({"model": {"path": "/models/pi0"}})
        for event in spo.events(job.id):
            print(event.seq, event.kind, event.body)
        print(spo.wait(job.id, timeout_seconds=600).state)

Every call has a deadline. Calls that are safe to repeat (reads, verbs, a submit with its Idempotency-Key) are repeated
for `retry_seconds` while the API is away, so a restart of the orchestrator goes unnoticed; others only when they were
surely not carried out. Failures raise the SpoError that the server's problem+json stands for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import httpx
from httpx_sse import SSEError, connect_sse
from ulid import ULID

from spo import errors
from spo.client._sync.datasets import DatasetCalls
from spo.client._sync.experience import ExperienceCalls
from spo.client._sync.platform import PlatformCalls
from spo.client._sync.training import TrainingCalls
from spo.client.http_errors import content_of, error_of, pause_asked
from spo.client.models import Event, Job, Page
from spo.spec.job_spec import JobSpec

HEARTBEAT_SECONDS = 15.0
DEFAULT_URL = "http://127.0.0.1:8080"


class Client(TrainingCalls):
    """A connection to the orchestrator's API; close it or use it as a context manager."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 15.0,
        retry_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_seconds, transport=transport, follow_redirects=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, spec: JobSpec | Mapping[str, Any], idempotency_key: str | None = None) -> Job:
        """Submit a job; the same key and spec give the same job. Raises InvalidInput with a pointer per fault."""
        key = idempotency_key or str(ULID())
        reply = self._ask("POST", "/v1/jobs", json=_document(spec), headers={"Idempotency-Key": key})
        return Job.model_validate(reply)

    def validate(self, spec: JobSpec | Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec with every default filled in, without submitting it. Raises InvalidInput."""
        reply: dict[str, Any] = self._ask("POST", "/v1/jobs", json=_document(spec), params={"validate_only": True})
        return reply

    def get(self, job_id: str) -> Job:
        """Raises NotFound."""
        return Job.model_validate(self._ask("GET", f"/v1/jobs/{job_id}"))

    def jobs(self, status: str | None = None, limit: int = 100, **filters: Any) -> list[Job]:
        """Jobs, newest first, on as many pages as it takes; filters: label=["team:red"], created_from, created_to."""
        parameters = filters | ({"status": status} if status else {})
        return [Job.model_validate(entry) for entry in self._entries("/v1/jobs", parameters, limit)]

    def fork(self, job_id: str, idempotency_key: str | None = None, **requested: Any) -> Job:
        """A new job from version= or checkpoint_step=, with overrides={...} to its spec; as_reference=True: as pi0.

        By default from the newest version, with the parent's pi0 and values. Raises NotFound, InvalidInput by field.
        """
        headers = {"Idempotency-Key": idempotency_key or str(ULID())}
        return Job.model_validate(self._ask("POST", f"/v1/jobs/{job_id}/fork", json=requested, headers=headers))

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop for good. Raises Conflict naming what is legal."""
        return self._action(job_id, "cancel")

    def pause(self, job_id: str) -> Job:
        """Ask a running job to checkpoint and wait. Raises Conflict naming what is legal."""
        return self._action(job_id, "pause")

    def resume(self, job_id: str) -> Job:
        """Let a paused job go on. Raises Conflict naming what is legal."""
        return self._action(job_id, "resume")

    def checkpoint(self, job_id: str) -> Job:
        """Ask a running job to save its state now. Raises Conflict naming what is legal."""
        return self._action(job_id, "checkpoint")

    def history(self, job_id: str, after_seq: int = 0) -> list[Event]:
        """What has happened so far."""
        found: list[Event] = []
        while True:
            cursor = found[-1].seq if found else after_seq
            page = self._ask("GET", f"/v1/jobs/{job_id}/events", params={"after_seq": cursor, "limit": 500})
            events = [Event.model_validate(entry) for entry in page["items"]]
            found += events
            if not events or not page.get("next_cursor"):
                return found

    def events(self, job_id: str, after_seq: int = 0) -> Iterator[Event]:
        """Every event after after_seq as it happens, until the job ends; reconnects without gaps or repeats.

        Raises Unreachable when the API stays away for retry_seconds.
        """
        seen = after_seq
        away_since: float | None = None
        while True:
            try:
                for event in self._stream(job_id, seen):
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
            time.sleep(0.5)

    def delete(self, job_id: str) -> None:
        """Delete an ended job; its experience stays in the store. Raises NotFound, Conflict."""
        self._ask("DELETE", f"/v1/jobs/{job_id}")

    def replicas(self) -> list[dict[str, Any]]:
        """Every live registered replica."""
        reply: dict[str, Any] = self._ask("GET", "/v1/replicas")
        return list(reply["items"])

    @property
    def platform(self) -> PlatformCalls:
        """Replicas to wish for, API keys, the audit log."""
        return PlatformCalls(self._ask, self._entries)

    @property
    def datasets(self) -> DatasetCalls:
        """Task sets that are uploaded once and named by jobs."""
        return DatasetCalls(self._ask, self._entries)

    @property
    def experience(self) -> ExperienceCalls:
        """What runs and imports have stored."""
        return ExperienceCalls(self._ask, self._http, error_of)

    def wait(self, job_id: str, timeout_seconds: float, on_poll: Callable[[Job], None] = lambda _: None) -> Job:
        """Return the job once it has ended, whatever the end. Raises NotReady (code "wait_timeout")."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            job = self.get(job_id)
            on_poll(job)
            if job.is_final:
                return job
            if time.monotonic() > deadline:
                message = f"job {job_id} is still {job.state} after {timeout_seconds:g} s"
                raise errors.NotReady(message, code="wait_timeout")
            time.sleep(1.0)

    def _action(self, job_id: str, action: str) -> Job:
        return Job.model_validate(self._ask("POST", f"/v1/jobs/{job_id}/{action}"))

    def _entries(self, path: str, parameters: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while len(found) < limit:
            asked = {**parameters, "limit": min(100, limit - len(found))} | ({"cursor": cursor} if cursor else {})
            page = Page.model_validate(self._ask("GET", path, params=asked))
            found += page.items
            cursor = page.next_cursor
            if not cursor:
                break
        return found[:limit]

    def _stream(self, job_id: str, after_seq: int) -> Iterator[Event]:
        headers = {"Last-Event-ID": str(after_seq)}
        # The server sends a comment as a heartbeat: a longer silence means a dead connection.
        timeout = httpx.Timeout(self.timeout_seconds, read=3 * HEARTBEAT_SECONDS)
        with connect_sse(self._http, "GET", f"/v1/jobs/{job_id}/events", headers=headers, timeout=timeout) as source:
            if not source.response.is_success:
                source.response.read()
                raise error_of(source.response)
            for message in source.iter_sse():
                if message.data:
                    yield Event.model_validate_json(message.data)

    def _ask(
        self, method: str, path: str, *, repeatable: bool = True, patience_seconds: float | None = None, **request: Any
    ) -> Any:
        deadline = time.monotonic() + (self.retry_seconds if patience_seconds is None else patience_seconds)
        pause = 0.2
        while True:
            wanted = 0.0
            try:
                response = self._http.request(method, path, **request)
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
            time.sleep(pause)
            pause = min(2.0, pause * 2)

    def _unreachable(self, failure: Exception) -> errors.Unreachable:
        return errors.Unreachable(
            f"the SPO API at {self.url} did not answer within {self.retry_seconds:g} s ({failure}); "
            "`spo up` starts a platform here, SPO_API_URL names one elsewhere",
            code="api_unreachable",
        )


def _document(spec: JobSpec | Mapping[str, Any]) -> dict[str, Any]:
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
