# Made from spo/client/_async/training.py by `make sdk`: edit that.
"""What a job makes, in the SDK: curves, evaluations, trajectories, values, weights, answers of its policies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import httpx

from spo import errors
from spo.client._sync.connection import Connection
from spo.client.http_errors import error_of
from spo.client.models import (
    AnnouncedVersion,
    BatchView,
    Calibration,
    CalibrationDesign,
    Checkpoint,
    Checkpoints,
    CompletionRequest,
    Completions,
    Evaluation,
    EvaluationList,
    EvaluationRequest,
    Evaluations,
    LogFilters,
    LogLine,
    LogPage,
    MetricSeries,
    PromptPage,
    PromptSuccess,
    PromptView,
    StepEvaluation,
    TokenValues,
    Trajectory,
    TrajectoryDetail,
    TrajectoryFilters,
    TrajectoryPage,
    WeightVersion,
    WeightVersions,
)
from spo.client.received_folder import ReceivedFolder
from spo.client.results import PLOTTED, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of an answer that begins only when an adapter is merged or a version fetched.
LONG_SECONDS = 3600.0


class TrainingCalls:
    """The client's calls about one job's training; all of them raise NotFound for a job that is not there."""

    _connection: Connection

    def metrics(
        self,
        job_id: str,
        kind: Literal["training", "platform"] = "training",
        from_step: int = 0,
        max_points: int = 1000,
        to_step: int | None = None,
    ) -> MetricSeries:
        """A job's scalars as columns: of training over steps, or of queues and replicas over unix milliseconds."""
        asked = {"kind": kind, "from_step": from_step, "to_step": to_step, "max_points": max_points}
        return self._connection.ask(MetricSeries, "GET", f"/v1/jobs/{job_id}/metrics", params=asked)

    def evaluations(self, job_id: str) -> list[StepEvaluation]:
        """pass@k on the held-out problems, in order of steps."""
        return (self._connection.ask(Evaluations, "GET", f"/v1/jobs/{job_id}/evaluations")).items

    def plot(self, job_id: str, names: Sequence[str] = PLOTTED) -> Figure:
        """A matplotlib figure of pass@k with intervals and of these curves; notebooks show it.

        Raises PreconditionFailed (code "package_missing") where matplotlib is not installed.
        """
        return plot(self.metrics(job_id), self.evaluations(job_id), names)

    def requested_evaluations(self) -> list[Evaluation]:
        """Evaluations that somebody asked for, newest first, without their tables of problems."""
        return (self._connection.ask(EvaluationList, "GET", "/v1/evaluations")).items

    def request_evaluation(self, job_id: str, **wanted: Unpack[EvaluationRequest]) -> Evaluation:
        """Queue an evaluation of a weight version or checkpoint. Raises InvalidInput with a pointer per fault."""
        body = {"job_id": job_id, **wanted}
        return self._connection.ask(Evaluation, "POST", "/v1/evaluations", json=body, repeatable=False)

    def evaluation(self, evaluation_id: str) -> Evaluation:
        """An evaluation somebody asked for, with its table of problems once it succeeded. Raises NotFound."""
        return self._connection.ask(Evaluation, "GET", f"/v1/evaluations/{evaluation_id}")

    def cancel_evaluation(self, evaluation_id: str) -> Evaluation:
        """End an evaluation without a result. Raises NotFound, Conflict (code "evaluation_ended")."""
        return self._connection.ask(Evaluation, "POST", f"/v1/evaluations/{evaluation_id}/cancel")

    def wait_evaluation(self, evaluation_id: str, timeout_seconds: float) -> Evaluation:
        """The evaluation once it has ended. Raises NotFound, NotReady (code "wait_timeout")."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = self.evaluation(evaluation_id)
            if found.state in ("succeeded", "failed", "cancelled"):
                return found
            if time.monotonic() > deadline:
                message = f"{evaluation_id} is still {found.state} after {timeout_seconds:g} s; it may wait for jobs"
                raise errors.NotReady(message, code="wait_timeout")
            time.sleep(1.0)

    def trajectories(self, job_id: str, limit: int = 50, **filters: Unpack[TrajectoryFilters]) -> list[Trajectory]:
        """Trajectories of a job, on as many pages as it takes."""
        return self._connection.pages(TrajectoryPage, f"/v1/jobs/{job_id}/trajectories", filters, limit)

    def trajectory(
        self, job_id: str, trajectory_id: str, steps_from: int = 0, steps_limit: int | None = None
    ) -> TrajectoryDetail:
        """One trajectory with every hop it took, and a page of the training steps that drew it. Raises NotFound."""
        asked = {"steps_from": steps_from, "steps_limit": steps_limit}
        path = f"/v1/jobs/{job_id}/trajectories/{trajectory_id}"
        return self._connection.ask(TrajectoryDetail, "GET", path, params=asked)

    def token_values(self, job_id: str, trajectory_id: str, policy_version: int | None = None) -> TokenValues:
        """Q_t and advantage of each token of a trajectory under a weight version, default the newest."""
        asked = {"policy_version": policy_version}
        path = f"/v1/jobs/{job_id}/trajectories/{trajectory_id}/values"
        return self._connection.ask(TokenValues, "GET", path, params=asked)

    def prompt(self, job_id: str, prompt_id: str) -> PromptView:
        """A prompt's value and its latest trajectories. Raises NotFound."""
        return self._connection.ask(PromptView, "GET", f"/v1/jobs/{job_id}/prompts/{prompt_id}")

    def prompts(self, job_id: str, limit: int = 100) -> list[PromptSuccess]:
        """Training prompts in their order, with how pi0 did on each."""
        return self._connection.pages(PromptPage, f"/v1/jobs/{job_id}/prompts", {}, limit)

    def batch(self, job_id: str, step: int) -> BatchView:
        """What a training step learnt from. Raises NotFound."""
        return self._connection.ask(BatchView, "GET", f"/v1/jobs/{job_id}/batches/{step}")

    def calibration(
        self, job_id: str, timeout_seconds: float = 600, **design: Unpack[CalibrationDesign]
    ) -> Calibration:
        """Predicted Q_t against the success of fresh continuations of stored prefixes."""
        path = f"/v1/jobs/{job_id}/calibration"
        return self._connection.ask(Calibration, "GET", path, params=design, timeout=timeout_seconds)

    def weights(self, job_id: str) -> list[WeightVersion]:
        """Published weight versions and which replicas serve them."""
        return (self._connection.ask(WeightVersions, "GET", f"/v1/jobs/{job_id}/weights")).items

    def weight_version(self, job_id: str, version: int) -> WeightVersion:
        """One published version and which replicas serve it. Raises NotFound."""
        return self._connection.ask(WeightVersion, "GET", f"/v1/jobs/{job_id}/weights/{version}")

    def download_weights(self, job_id: str, version: int, folder: Path, *, merge: bool = False) -> Path:
        """A published version as a new folder that transformers and vLLM load, or peft an adapter; returns the folder.

        merge: an adapter as a whole model. Raises NotFound, InternalError (code "integrity") for a damaged one,
        InvalidInput (code "unwritable_file") for a folder that is there or cannot be written, Unreachable when the
        connection breaks.
        """
        path = f"/v1/jobs/{job_id}/weights/{version}/download"
        with ReceivedFolder(folder) as receiving:
            self._receive(path, {"merge": merge}, receiving)
        return receiving.target

    def _receive(self, path: str, asked: dict[str, bool], receiving: ReceivedFolder) -> None:
        try:
            with self._connection.http.stream("GET", path, params=asked, timeout=LONG_SECONDS) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                for piece in response.iter_bytes():
                    receiving.take(piece)
        except httpx.TransportError as error:
            raise errors.Unreachable(f"the download broke off: {error}", code="api_unreachable") from None

    def push_weights(self, job_id: str, version: int) -> AnnouncedVersion:
        """Announce a stored version again. Raises NotFound, Conflict."""
        path = f"/v1/jobs/{job_id}/weights/push"
        return self._connection.ask(AnnouncedVersion, "POST", path, json={"version": version})

    def rollback_weights(self, job_id: str, version: int) -> AnnouncedVersion:
        """Let inference go back to an older version. Raises NotFound, Conflict."""
        path = f"/v1/jobs/{job_id}/weights/rollback"
        return self._connection.ask(AnnouncedVersion, "POST", path, json={"version": version})

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Saved states of the trainer by step."""
        return (self._connection.ask(Checkpoints, "GET", f"/v1/jobs/{job_id}/checkpoints")).items

    def logs(self, job_id: str, limit: int = 200, **filters: Unpack[LogFilters]) -> list[LogLine]:
        """Latest log lines of a job, newest first."""
        return self._connection.pages(LogPage, f"/v1/jobs/{job_id}/logs", filters, limit)

    def policy_versions(self, job_id: str) -> list[WeightVersion]:
        """Versions of a job's policy that can be asked for completions."""
        return (self._connection.ask(WeightVersions, "GET", f"/v1/policies/{job_id}/versions")).items

    def complete(
        self, job_id: str, prompt: str, timeout_seconds: float = 120, **requested: Unpack[CompletionRequest]
    ) -> Completions:
        """Let a policy complete a prompt. Raises InvalidInput, NotReady while no replica serves the job."""
        body = {"prompt": prompt, **requested}
        path = f"/v1/policies/{job_id}/completions"
        return self._connection.ask(Completions, "POST", path, json=body, timeout=timeout_seconds)
