# Made from spo/client/_async/training.py by `make sdk`: edit that.
"""What a job makes, in the SDK: curves, evaluations, trajectories, values, weights, answers of its policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from spo.client.models import Series


class TrainingCalls:
    """A part of the client; `_ask` and `_entries` are the client's."""

    def _ask(
        self, method: str, path: str, *, repeatable: bool = True, patience_seconds: float | None = None, **request: Any
    ) -> Any:
        raise NotImplementedError

    def _entries(self, path: str, parameters: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
        raise NotImplementedError

    def metrics(
        self,
        job_id: str,
        kind: Literal["training", "platform"] = "training",
        from_step: int = 0,
        max_points: int = 1000,
        to_step: int | None = None,
    ) -> Series:
        """A job's scalars as columns: of training over steps, or of queues and replicas over unix milliseconds."""
        parameters: dict[str, Any] = {"kind": kind, "from_step": from_step, "max_points": max_points}
        if to_step is not None:
            parameters["to_step"] = to_step
        return Series.model_validate(self._ask("GET", f"/v1/jobs/{job_id}/metrics", params=parameters))

    def evaluations(self, job_id: str) -> list[dict[str, Any]]:
        """pass@k on the held-out problems, in order of steps."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/evaluations")
        return list(reply["items"])

    def asked_evaluations(self) -> list[dict[str, Any]]:
        """Evaluations that somebody asked for, newest first."""
        reply: dict[str, Any] = self._ask("GET", "/v1/evaluations")
        return list(reply["items"])

    def ask_evaluation(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Queue an evaluation: job_id, version or checkpoint_step, tasks, samples, ... Raises InvalidInput by field."""
        reply: dict[str, Any] = self._ask("POST", "/v1/evaluations", json=dict(wanted), repeatable=False)
        return reply

    def evaluation(self, evaluation_id: str) -> dict[str, Any]:
        """An evaluation somebody asked for, with its table of problems once it succeeded. Raises NotFound."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/evaluations/{evaluation_id}")
        return reply

    def trajectories(self, job_id: str, limit: int = 50, **filters: str | int) -> list[dict[str, Any]]:
        """Trajectories of a job; filters: prompt_id, source, verdict, policy_version."""
        return self._entries(f"/v1/jobs/{job_id}/trajectories", filters, limit)

    def trajectory(self, job_id: str, trajectory_id: str, **steps: int) -> dict[str, Any]:
        """One trajectory with every hop it took; steps_from and steps_limit page the steps that got it.

        Raises NotFound.
        """
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/trajectories/{trajectory_id}", params=steps)
        return reply

    def token_values(self, job_id: str, trajectory_id: str, policy_version: int | None = None) -> dict[str, Any]:
        """Q_t and advantage of each token of a trajectory under a weight version, default the newest."""
        asked = {} if policy_version is None else {"policy_version": policy_version}
        path = f"/v1/jobs/{job_id}/trajectories/{trajectory_id}/values"
        reply: dict[str, Any] = self._ask("GET", path, params=asked)
        return reply

    def prompt(self, job_id: str, prompt_id: str) -> dict[str, Any]:
        """A prompt's value, its group side by side and its pivotal tokens. Raises NotFound."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/prompts/{prompt_id}")
        return reply

    def batch(self, job_id: str, step: int) -> dict[str, Any]:
        """What a training step learnt from. Raises NotFound."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/batches/{step}")
        return reply

    def calibration(self, job_id: str, timeout_seconds: float = 600, **design: int) -> dict[str, Any]:
        """Predicted Q_t against fresh continuations; design: policy_version, trajectories, positions, ..., bins."""
        path = f"/v1/jobs/{job_id}/calibration"
        reply: dict[str, Any] = self._ask("GET", path, params=design, timeout=timeout_seconds)
        return reply

    def weights(self, job_id: str) -> list[dict[str, Any]]:
        """Published weight versions and which replicas serve them."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/weights")
        return list(reply["items"])

    def weight_version(self, job_id: str, version: int) -> dict[str, Any]:
        """One published version and which replicas serve it. Raises NotFound."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/weights/{version}")
        return reply

    def push_weights(self, job_id: str, version: int) -> dict[str, Any]:
        """Announce a stored version again. Raises NotFound, Conflict."""
        reply: dict[str, Any] = self._ask("POST", f"/v1/jobs/{job_id}/weights/push", json={"version": version})
        return reply

    def rollback_weights(self, job_id: str, version: int) -> dict[str, Any]:
        """Let inference go back to an older version; 0 is the reference. Raises NotFound, Conflict."""
        path = f"/v1/jobs/{job_id}/weights/rollback"
        reply: dict[str, Any] = self._ask("POST", path, json={"version": version})
        return reply

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """Saved states of the trainer: step, digest, weight version."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/checkpoints")
        return list(reply["items"])

    def logs(self, job_id: str, limit: int = 200, **filters: str) -> list[dict[str, Any]]:
        """Latest log lines of a job, newest first; filters: service, level."""
        return self._entries(f"/v1/jobs/{job_id}/logs", filters, limit)

    def policy_versions(self, job_id: str) -> list[dict[str, Any]]:
        """Versions of a job's policy that can be asked for completions."""
        reply: dict[str, Any] = self._ask("GET", f"/v1/policies/{job_id}/versions")
        return list(reply["items"])

    def complete(self, job_id: str, prompt: str, timeout_seconds: float = 120, **requested: Any) -> dict[str, Any]:
        """Ask a policy; wish: version (0 is the reference), samples, temperature, top_p, max_tokens, seed."""
        document = {"prompt": prompt, **requested}
        path = f"/v1/policies/{job_id}/completions"
        reply: dict[str, Any] = self._ask("POST", path, json=document, timeout=timeout_seconds)
        return reply
