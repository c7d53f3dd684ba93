"""Jobs' curves mirrored into TensorBoard, MLflow or Weights & Biases: the sinks, and the mirror that follows a job
over the API.

Where curves can be mirrored to: TensorBoard, MLflow, Weights & Biases, each through its own library (extra `sinks`).
A target is `tensorboard:FOLDER`, `mlflow:TRACKING_URI` or `wandb:PROJECT`. Secrets are never part of it: the libraries
read them from their own environment variables (MLFLOW_TRACKING_TOKEN, WANDB_API_KEY). A sink says itself how far it has
got, so that a follower that starts again writes nothing twice.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from spo.client import Client
from spo.client.models import EvaluationResult, JobSummary
from spo.errors import InvalidInput

LIBRARIES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
NEVER = -1

# The API thins longer answers, so no more steps are asked for at once.
WINDOW_STEPS = 1000
POLL_SECONDS = 2.0


class Sink(Protocol):
    """Takes the points of one job; `curve` is "training" or "evaluation"."""

    def steps(self, curve: str) -> Collection[int]:
        """The steps it has of a curve; of "training", whose points come in order, the last one is enough."""

    def write(self, curve: str, step: int, scalars: Mapping[str, float]) -> None:
        """Take one point."""

    def flush(self) -> None:
        """Return when what was written is there to be read."""

    def close(self) -> None:
        """Flush and let go."""


def open_sink(target: str, job_id: str, name: str) -> Sink:
    """The sink of a job at a target. Raises InvalidInput for a target that nothing here writes to."""
    kind, _, place = target.partition(":")
    if kind not in LIBRARIES or not place:
        raise InvalidInput(
            f"{target!r} is no target: tensorboard:FOLDER, mlflow:TRACKING_URI or wandb:PROJECT", code="unknown_sink"
        )
    if urlsplit(place).password:
        raise InvalidInput(
            "a target holds no secrets; the libraries take them from their environment variables, such as "
            "MLFLOW_TRACKING_PASSWORD",
            code="secret_in_target",
        )
    try:
        importlib.import_module(LIBRARIES[kind])
    except ImportError:
        message = f"{kind} is not installed: pip install '.[sinks]' in a checkout"
        raise InvalidInput(message, code="sink_missing") from None
    match kind:
        case "tensorboard":
            return TensorBoardSink(Path(place) / job_id)
        case "mlflow":
            return MlflowSink(place, job_id, name)
        case _:
            return WandbSink(place, job_id, name)


class TensorBoardSink:
    """Event files in a folder of the job's own, read back for the last step."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._steps: dict[str, set[int]] = {"training": set(), "evaluation": set()}
        for file in sorted(folder.glob("*tfevents*")):
            for event in EventFileLoader(str(file)).Load():
                for curve in {value.tag.partition("/")[0] for value in event.summary.value} & self._steps.keys():
                    self._steps[curve].add(event.step)
        self._open: Callable[[], Any] = lambda: EventFileWriter(str(folder))
        self._writer: Any = None

    def steps(self, curve: str) -> Collection[int]:
        return self._steps[curve]

    def write(self, curve: str, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{curve}/{name}", simple_value=value) for name, value in scalars.items()]
        # Only now: a job that has all its points gets no further, empty file.
        self._writer = self._writer or self._open()
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


class MlflowSink:
    """A run of the experiment "spo", found again by the tag spo.job."""

    def __init__(self, tracking_uri: str, job_id: str, name: str) -> None:
        from mlflow import MlflowClient

        if is_file_store(tracking_uri):
            # MLflow 3 refuses folders unless it is told that they are meant; whoever names one means it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name("spo")
        experiment = known.experiment_id if known else self._client.create_experiment("spo")
        found = self._client.search_runs([experiment], f"tags.`spo.job` = '{job_id}'", max_results=1)
        run = found[0] if found else self._client.create_run(experiment, run_name=name, tags={"spo.job": job_id})
        self._run_id = run.info.run_id
        self._steps: dict[str, set[int]] = {"training": set(), "evaluation": set()}
        for tag in run.data.metrics:
            if (curve := tag.partition("/")[0]) in self._steps:
                history = self._client.get_metric_history(self._run_id, tag)
                self._steps[curve].update(point.step for point in history)

    def steps(self, curve: str) -> Collection[int]:
        return self._steps[curve]

    def write(self, curve: str, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # One call holds at most 1000 metrics, which is one transaction in a store.
        metrics = [Metric(mlflow_name(curve, name), value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics[:1000])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def mlflow_name(curve: str, name: str) -> str:
    """A scalar's name in MLflow: without "@", and no folder below the curve's, since its file stores make folders of
    slashes and "log_ratio" could not lie beside "log_ratio/online".
    """
    return f"{curve}/{name.replace('@', '_at_').replace('/', '.')}"


def is_file_store(tracking_uri: str) -> bool:
    """Whether MLflow keeps runs of this URI in a folder."""
    return urlsplit(tracking_uri).scheme in ("", "file")


class WandbSink:
    """A run with the job's id, gone on with; each curve has an axis of its own, so late points are not refused.

    What was written is noted in a file beside W&B's own (WANDB_DIR), since an offline run cannot be asked.
    """

    def __init__(self, project: str, job_id: str, name: str) -> None:
        import wandb

        self._run = wandb.init(
            project=project, id=job_id.replace("_", "-").lower(), name=name, resume="allow", config={"spo.job": job_id}
        )
        for curve in ("training", "evaluation"):
            self._run.define_metric(f"{curve}/step")
            self._run.define_metric(f"{curve}/*", step_metric=f"{curve}/step")
        self._note = Path(self._run.settings.wandb_dir) / f"spo-{job_id}.json"
        self._steps: dict[str, set[int]] = {"training": set(), "evaluation": set()}
        with contextlib.suppress(OSError, ValueError):
            for curve, written in json.loads(self._note.read_text()).items():
                # An earlier version noted the last step alone.
                self._steps[curve] = set(written if isinstance(written, list) else range(written + 1))

    def steps(self, curve: str) -> Collection[int]:
        return self._steps[curve]

    def write(self, curve: str, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({f"{curve}/step": step, **{f"{curve}/{name}": value for name, value in scalars.items()}})
        self._steps[curve] = self._steps[curve] | {step} if curve == "evaluation" else {step}

    def flush(self) -> None:
        writing = self._note.with_suffix(f".{os.getpid()}.partial")
        writing.write_text(json.dumps({curve: sorted(steps) for curve, steps in self._steps.items()}))
        writing.replace(self._note)

    def close(self) -> None:
        self._run.finish()
        self.flush()


class JobMirror:
    """One job and its sink. A step that a resumed trainer repeats stays as it was written first."""

    def __init__(self, client: Client, job: JobSummary, target: str) -> None:
        self._client = client
        self._job_id = job.id
        self._sink = open_sink(target, job.id, job.name or job.id)
        self._last_step = max(self._sink.steps("training"), default=NEVER)
        # One that took long may come after those of later steps.
        self._evaluated = set(self._sink.steps("evaluation"))
        self.written = 0

    def catch_up(self) -> None:
        """Write every point that the API has and the sink has not."""
        newest = self._client.get(self._job_id).progress.step
        while True:
            start = max(0, self._last_step + 1)
            end = start + WINDOW_STEPS - 1
            series = self._client.metrics(self._job_id, from_step=start, to_step=end, max_points=WINDOW_STEPS)
            for index, step in enumerate(series.steps):
                point = {name: column[index] for name, column in series.series.items()}
                if step > self._last_step:
                    self._write("training", step, point)
                    self._last_step = step
            if end >= newest:
                break
            # Steps without a report, if any, are gone past.
            self._last_step = max(self._last_step, end)
        for result in self._client.evaluations(self._job_id):
            if result.step not in self._evaluated:
                self._write("evaluation", result.step, _scores(result))
                self._evaluated.add(result.step)
        self._sink.flush()

    def _write(self, curve: str, step: int, point: dict[str, float | None]) -> None:
        self._sink.write(curve, step, {name: value for name, value in point.items() if value is not None})
        self.written += 1

    def close(self) -> None:
        self._sink.close()


def mirror(
    client: Client,
    target: str,
    stop: threading.Event,
    job_id: str | None = None,
    on_points: Callable[[str, int], None] = lambda job_id, written: None,
) -> None:
    """Mirror one job until it has ended, or all jobs, present and to come, until stop is set.

    on_points is told a job's id and how many of its points were written so far. Raises NotFound, InvalidInput for a
    target, Unreachable when the API stays away for the client's retry_seconds.
    """
    under_way: dict[str, JobMirror] = {}
    done: set[str] = set()
    try:
        while True:
            jobs: Sequence[JobSummary] = [client.get(job_id)] if job_id else client.jobs(limit=1000)
            for job in jobs:
                if job.id in done:
                    continue
                if job.id not in under_way:
                    under_way[job.id] = JobMirror(client, job, target)
                # The state was read before the points: one that has ended gets no more.
                under_way[job.id].catch_up()
                on_points(job.id, under_way[job.id].written)
                if job.is_final:
                    under_way.pop(job.id).close()
                    done.add(job.id)
            if (job_id and job_id in done) or stop.wait(POLL_SECONDS):
                return
    finally:
        for open_one in under_way.values():
            open_one.close()


def _scores(result: EvaluationResult) -> dict[str, float | None]:
    """The numbers of an evaluation, pass@k with its interval."""
    numbers: dict[str, float | None] = {
        name: float(value)
        for name, value in result.model_dump().items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    for k, score in result.pass_at_k.items():
        numbers |= {f"pass@{k}": score.value, f"pass@{k}/low": score.low, f"pass@{k}/high": score.high}
    return numbers
