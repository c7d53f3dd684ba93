# Made from spo/client/_async/client.py by `make sdk`: edit that.
"""The Python SDK over the REST API.

    with Client("http://127.0.0.1:8080") as spo:
        job = spo.submit({"model": {"path": "/models/pi0"}})
        for event in spo.events(job.id):
            print(event.seq, event.kind, event.body)
        print(spo.wait(job.id, timeout_seconds=600).state)

Every call has a deadline. Calls that are safe to repeat (reads, actions, a submit with its Idempotency-Key) are
repeated for `retry_seconds` while the API is away, so a restart of the orchestrator goes unnoticed; others only when
they were surely not carried out. Answers are the models of `spo.client.models`. Failures raise the SpoError that the
server's problem+json stands for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, Unpack

import httpx
from httpx_sse import SSEError, connect_sse
from ulid import ULID

from spo import api, errors
from spo.client._sync.calls import (
    Connection,
    ContinualCalls,
    DatasetCalls,
    DeadLetterCalls,
    ExperienceCalls,
    PlatformCalls,
    ServingCalls,
    TrainingCalls,
)
from spo.client.models import ForkKeywords, JobFilters, RequestOptions, error_of, parsed
from spo.spec.job_spec import JobSpec

HEARTBEAT_SECONDS = 15.0
SESSIONS = "/v1/agents/sessions"
DEFAULT_URL = "http://127.0.0.1:8080"

# Tasks and models of a job are looked at before it is taken: so long may that take while the API is there.
CHECK_SECONDS = 600.0


class SyncAgentCalls:
    """Episodes that agents play in their own programs: leased, renewed and ended by runners."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def open(self, job: str, **limits: object) -> api.SessionGrant:
        """Open a session of a job's policy: a URL and a key. Options: the fields of `POST /v1/agents/sessions`."""
        body = {"job": job, **limits}
        return self._connection.ask(api.SessionGrant, "POST", SESSIONS, repeatable=False, json=body)

    def all(self, job: str, limit: int = 100) -> list[api.SessionView]:
        """Up to `limit` sessions of a job, those that end last first. Raises NotFound."""
        return self._connection.pages(api.SessionPage, SESSIONS, {"job": job}, limit)

    def get(self, session_id: str) -> api.SessionView:
        """A session, what it has used, and its outcome. Raises NotFound."""
        return self._connection.ask(api.SessionView, "GET", f"{SESSIONS}/{session_id}")

    def finish(self, session_id: str, outcome: Mapping[str, object]) -> api.SessionView:
        """End a session that was not leased, with its outcome. Raises Conflict."""
        return self._connection.ask(api.SessionView, "POST", f"{SESSIONS}/{session_id}/outcome", json=dict(outcome))

    def tree(self, session_id: str) -> api.SessionTreeView:
        """All calls of a session. Raises NotFound."""
        return self._connection.ask(api.SessionTreeView, "GET", f"{SESSIONS}/{session_id}/tree")

    def lease(self, pool: str, most: int, wait_seconds: float) -> list[api.EpisodeLease]:
        """Episodes that wait for a runner of the pool; none where there are none in time."""
        body = {"pool": pool, "most": most, "wait_seconds": wait_seconds}
        request = RequestOptions(json=body, timeout=wait_seconds + self._connection.timeout_seconds)
        return (self._connection.ask(api.LeaseList, "POST", "/v1/agents/leases", repeatable=False, **request)).items

    def renew(self, lease_id: str, token: str) -> api.RenewedLease:
        """Hold an episode for longer. Raises PreconditionFailed (code "lease_lost")."""
        path = f"/v1/agents/leases/{lease_id}/renew"
        return self._connection.ask(api.RenewedLease, "POST", path, json={"token": token})

    def give_back(self, lease_id: str, token: str) -> api.SessionView:
        """Give an episode back that is not at fault: another runner gets it. Raises PreconditionFailed."""
        path = f"/v1/agents/leases/{lease_id}/give-back"
        return self._connection.ask(api.SessionView, "POST", path, json={"token": token})

    def end(self, lease_id: str, outcome: Mapping[str, object]) -> api.SessionView:
        """End an episode with its outcome. Raises Conflict, PreconditionFailed."""
        path = f"/v1/agents/leases/{lease_id}/outcome"
        return self._connection.ask(api.SessionView, "POST", path, json=dict(outcome))


class Client(TrainingCalls):
    """A connection to the orchestrator's API; close it or use it as a context manager.

    Without a url it is that of SPO_API_URL with the key of SPO_API_KEY, else this machine's usual port.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 15.0,
        retry_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if url is None:
            # A key of the surroundings belongs to the platform of the surroundings.
            url = os.environ.get("SPO_API_URL") or DEFAULT_URL
            api_key = api_key or os.environ.get("SPO_API_KEY")
        self._connection = Connection(
            url.rstrip("/"), api_key, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards."""
        self._connection.close()

    def submit(self, spec: JobSpec | Mapping[str, object], idempotency_key: str | None = None) -> api.Job:
        """Submit a job; the same key and spec give the same job. Raises InvalidInput with a pointer per fault."""
        key = idempotency_key or str(ULID())
        headers = {"Idempotency-Key": key}
        return self._connection.ask(
            api.Job, "POST", "/v1/jobs", json=_document(spec), headers=headers, work_seconds=CHECK_SECONDS
        )

    def validate(self, spec: JobSpec | Mapping[str, object]) -> api.JsonObject:
        """The spec with all defaults and `warnings`, not submitted. Raises InvalidInput with a pointer per fault."""
        asked = {"validate_only": True}
        resolved = self._connection.ask(
            api.ResolvedSpec, "POST", "/v1/jobs", json=_document(spec), params=asked, work_seconds=CHECK_SECONDS
        )
        return resolved.root

    def get(self, job_id: str) -> api.Job:
        """One job in full. Raises NotFound."""
        return self._connection.ask(api.Job, "GET", f"/v1/jobs/{job_id}")

    def jobs(self, limit: int = 100, **filters: Unpack[JobFilters]) -> list[api.JobSummary]:
        """Jobs, newest first, on as many pages as it takes."""
        return self._connection.pages(api.JobPage, "/v1/jobs", filters, limit)

    def fork(self, job_id: str, idempotency_key: str | None = None, **requested: Unpack[ForkKeywords]) -> api.Job:
        """A new job from a version or a checkpoint of this one; as_reference: its weights become the new pi0.

        By default from the newest version, with the parent's pi0 and values. Raises NotFound, and InvalidInput with a
        pointer per fault.
        """
        headers = {"Idempotency-Key": idempotency_key or str(ULID())}
        return self._connection.ask(
            api.Job,
            "POST",
            f"/v1/jobs/{job_id}/fork",
            json=requested,
            headers=headers,
            work_seconds=CHECK_SECONDS,
        )

    def cancel(self, job_id: str) -> api.JobSummary:
        """Ask a job to stop for good. Raises NotFound, Conflict naming what is legal."""
        return self._action(job_id, "cancel")

    def pause(self, job_id: str) -> api.JobSummary:
        """Ask a running job to checkpoint and wait. Raises NotFound, Conflict naming what is legal."""
        return self._action(job_id, "pause")

    def resume(self, job_id: str) -> api.JobSummary:
        """Let a paused job go on. Raises NotFound, Conflict naming what is legal."""
        return self._action(job_id, "resume")

    def checkpoint(self, job_id: str) -> api.JobSummary:
        """Ask a running job to save its state now. Raises NotFound, Conflict naming what is legal."""
        return self._action(job_id, "checkpoint")

    def history(self, job_id: str, after_seq: int = 0) -> list[api.Event]:
        """What has happened to a job so far, in order. Raises NotFound."""
        found: list[api.Event] = []
        while True:
            asked = {"after_seq": found[-1].seq if found else after_seq, "limit": 500}
            page = self._connection.ask(api.EventPage, "GET", f"/v1/jobs/{job_id}/events", params=asked)
            found += page.items
            if not page.items or not page.next_cursor:
                return found

    def events(self, job_id: str, after_seq: int = 0) -> Iterator[api.Event]:
        """Every event after after_seq as it happens, until the job ends; reconnects without gaps or repeats.

        Raises NotFound, and Unreachable when the API stays away for retry_seconds.
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
                if time.monotonic() - away_since > self._connection.retry_seconds:
                    raise self._connection.unreachable(error) from error
            time.sleep(0.5)

    def delete(self, job_id: str) -> None:
        """Delete an ended job; its experience stays in the store. Raises NotFound, Conflict."""
        self._connection.content("DELETE", f"/v1/jobs/{job_id}")

    def delete_jobs(self, job_ids: Sequence[str]) -> api.DeletedJobs:
        """Delete several ended jobs, at most 200; those that cannot be are named with the reason."""
        body = {"job_ids": list(job_ids)}
        return self._connection.ask(api.DeletedJobs, "POST", "/v1/job-deletions", json=body)

    def rename(self, job_id: str, name: str) -> api.JobSummary:
        """Give a job another name, whatever its state; its spec keeps the one it came with. Raises NotFound."""
        return self._connection.ask(api.JobSummary, "PATCH", f"/v1/jobs/{job_id}", json={"name": name})

    def replicas(self) -> list[api.Replica]:
        """Every live registered replica."""
        return (self._connection.ask(api.Replicas, "GET", "/v1/replicas")).items

    @property
    def platform(self) -> PlatformCalls:
        """Calls about replicas, API keys, the audit log."""
        return PlatformCalls(self._connection)

    @property
    def dead_letters(self) -> DeadLetterCalls:
        """Calls about entries that were given up on."""
        return DeadLetterCalls(self._connection)

    @property
    def datasets(self) -> DatasetCalls:
        """Calls about task sets, which are uploaded once and named by jobs."""
        return DatasetCalls(self._connection)

    @property
    def experience(self) -> ExperienceCalls:
        """Calls about what runs and imports have stored."""
        return ExperienceCalls(self._connection)

    @property
    def continual(self) -> ContinualCalls:
        """Calls about jobs that train from stored experience by a schedule and serve what is better."""
        return ContinualCalls(self._connection)

    @property
    def agents(self) -> SyncAgentCalls:
        """Episodes that agents play in their own programs."""
        return SyncAgentCalls(self._connection)

    @property
    def serving(self) -> ServingCalls:
        """Calls about the names under which policies are served."""
        return ServingCalls(self._connection)

    def wait(self, job_id: str, timeout_seconds: float, on_poll: Callable[[api.Job], None] = lambda _: None) -> api.Job:
        """The job once it has ended, however; on_poll sees it every second.

        Raises NotFound, and NotReady (code "wait_timeout").
        """
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

    def _action(self, job_id: str, action: str) -> api.JobSummary:
        return self._connection.ask(api.JobSummary, "POST", f"/v1/jobs/{job_id}/{action}")

    def _stream(self, job_id: str, after_seq: int) -> Iterator[api.Event]:
        headers = {"Last-Event-ID": str(after_seq)}
        # The server sends a comment as a heartbeat: a longer silence means a dead connection.
        timeout = httpx.Timeout(self._connection.timeout_seconds, read=3 * HEARTBEAT_SECONDS)
        with connect_sse(
            self._connection.http, "GET", f"/v1/jobs/{job_id}/events", headers=headers, timeout=timeout
        ) as source:
            if not source.response.is_success:
                source.response.read()
                raise error_of(source.response)
            for message in source.iter_sse():
                if message.data:
                    yield parsed(api.Event, json.loads(message.data))


def _document(spec: JobSpec | Mapping[str, object]) -> api.JsonObject:
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
