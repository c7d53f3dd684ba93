# Made from spo/client/_async/serving.py by `make sdk`: edit that.
"""The serving part of the SDK: `serving` of a client; completions themselves are asked for with any OpenAI client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Unpack

from spo.client._sync.connection import Connection
from spo.client.models import (
    CaptureView,
    CollectReport,
    FeedbackReceipt,
    JsonObject,
    Said,
    ServedModelList,
    ServedModelView,
)


class ServingCalls:
    """Names under which policies are served, and what is said of their answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def models(self) -> list[ServedModelView]:
        """Every name that means something now."""
        return (self._connection.ask(ServedModelList, "GET", "/v1/served-models")).items

    def get(self, name: str) -> ServedModelView:
        """What a name means now. Raises NotFound."""
        return self._connection.ask(ServedModelView, "GET", f"/v1/served-models/{name}")

    def publish(
        self,
        name: str,
        job_id: str,
        version: int | None = None,
        note: str = "",
        *,
        expected_number: int | None = None,
        min_replicas: int | None = None,
    ) -> ServedModelView:
        """Let a name mean a weight version of a job, None: always its newest; so many replicas stay for it.

        Raises NotFound, and Conflict when the name's last change is not number `expected_number` (0: none).
        """
        body = {"job_id": job_id, "version": version, "note": note, "expected_number": expected_number}
        body |= {} if min_replicas is None else {"min_replicas": min_replicas}
        return self._connection.ask(ServedModelView, "PUT", f"/v1/served-models/{name}", json=body)

    def roll_back(self, name: str, to_number: int | None = None, note: str = "") -> ServedModelView:
        """Serve again what was served before, or after change `to_number`. Raises NotFound, PreconditionFailed."""
        body = {"to_number": to_number, "note": note}
        path = f"/v1/served-models/{name}/rollback"
        return self._connection.ask(ServedModelView, "POST", path, json=body, repeatable=False)

    def remove(self, name: str) -> ServedModelView:
        """Let a name mean nothing; its history stays. Raises NotFound."""
        return self._connection.ask(ServedModelView, "DELETE", f"/v1/served-models/{name}")

    def history(self, name: str) -> list[ServedModelView]:
        """The last hundred changes of a name, newest first. Raises NotFound."""
        return (self._connection.ask(ServedModelList, "GET", f"/v1/served-models/{name}/history")).items

    def capture(self) -> CaptureView:
        """How traffic is captured where it is asked for, and how much is kept."""
        return self._connection.ask(CaptureView, "GET", "/v1/capture")

    def set_capture_policy(self, policy: Mapping[str, object]) -> CaptureView:
        """Change how traffic is captured from now on; what is not said has its default. Raises InvalidInput."""
        return self._connection.ask(CaptureView, "PUT", "/v1/capture", json=dict(policy))

    def captured(self) -> list[JsonObject]:
        """All that is kept, oldest first, with what was said of it."""
        lines = self._connection.content("GET", "/v1/capture/export")
        return [json.loads(line) for line in str(lines or "").splitlines() if line]

    def forget(self, completion_id: str) -> None:
        """Remove a captured completion and what was said of it."""
        self._connection.content("DELETE", f"/v1/capture/completions/{completion_id}")

    def feedback(self, completion_id: str, index: int = 0, **said: Unpack[Said]) -> FeedbackReceipt:
        """Join a score, thumbs, a test's result, an edited answer or a comment to a captured completion.

        The same again changes nothing. Raises NotFound when the completion was not captured.
        """
        body = {"id": completion_id, "index": index, **said}
        return self._connection.ask(FeedbackReceipt, "POST", "/v1/feedback", json=body)

    def collect(
        self, name: str, job: str | None = None, *, judge_unscored: bool = False, after_unix_ms: int = 0
    ) -> CollectReport:
        """Store captured traffic as trajectories under a name; prompts are those of a job. Raises Conflict."""
        body = {"name": name, "job": job, "judge_unscored": judge_unscored, "after_unix_ms": after_unix_ms}
        return self._connection.ask(CollectReport, "POST", "/v1/capture/collect", json=body)
