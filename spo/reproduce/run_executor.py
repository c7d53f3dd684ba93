"""Carries the planned runs out, one after the other on one platform, and keeps what each came to.

A finished run's result is a file; a run that has one is not run again, so a report can grow over many evenings. The
platform's Redis stays too: values of prompts, samples of pi0 and labels of pivotal tokens pass from run to run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from spo import redis_keys
from spo.client import Client
from spo.client.models import Event, Job, StepEvaluation
from spo.demo.report import seconds_between
from spo.errors import Conflict, InternalError, NotReady
from spo.local.launcher import LocalPlatform
from spo.reproduce.measure import CpuMeter, rollouts, trainer_memory_bytes
from spo.reproduce.plan import SETTINGS, PlannedRun
from spo.reproduce.results import remember_estimate

LONGEST_RUN_SECONDS = 3600.0
POLL_SECONDS = 0.5
MEMORY_EVERY_SECONDS = 2.0
CURVES = ("reward", "reward/online", "loss", "kl_to_reference", "grad_norm")
CURVE_POINTS = 50
EVALUATION_SAMPLES = 10
KEPT_EVENTS = 200
# Events that every healthy run has; the others are kept with the result.
USUAL_EVENTS = (
    "state",
    "progress",
    "evaluation",
    "lease",
    "weights",
    "weights_applied",
    "checkpoint",
    "training_ended",
)


@dataclass
class RunExecutor:
    """Submits runs over REST and follows them; on_poll is told of the job at every look."""

    platform: LocalPlatform
    client: Client
    folder: Path
    on_poll: Callable[[PlannedRun, Job], None]
    cpu: CpuMeter = field(init=False)

    def __post_init__(self) -> None:
        self.cpu = CpuMeter(self.platform)

    def carry_out(
        self, run: PlannedRun, document: Mapping[str, Any], training_task: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one job to its end and keep its result. `document` is the run's, ready to be submitted.

        With `training_task`, a task set, the policy is evaluated on that as well.

        Raises NotReady when it takes longer than LONGEST_RUN_SECONDS, InvalidInput when it is refused.
        """
        attempt = _attempt(self.folder, run)
        began, cpu_began = time.monotonic(), self.cpu.seconds()
        job = self._submit(document, f"reproduce {run.name} {attempt} {_digest(document)}")
        cpu_running, memory = None, 0
        next_memory = 0.0
        while not job.is_final:
            if time.monotonic() - began > LONGEST_RUN_SECONDS:
                waits = "; ".join(job.waits) or "nothing in particular"
                raise NotReady(f"{run.name} ({job.id}) took too long; it waits for: {waits}", code="run_timeout")
            cpu_now = self.cpu.seconds()
            if cpu_running is None and job.state == "running":
                cpu_running = cpu_now
            if job.state == "running" and time.monotonic() >= next_memory:
                next_memory = time.monotonic() + MEMORY_EVERY_SECONDS
                memory = max(memory, trainer_memory_bytes(self.platform))
            self.on_poll(run, job)
            time.sleep(POLL_SECONDS)
            job = self.client.get(job.id)
        cpu_ended = self.cpu.seconds()
        result = self._result(run, job, attempt) | {
            "trainer_memory_bytes": memory,
            "cpu_seconds": {
                "estimate": round(max(0.0, (cpu_running or cpu_ended) - cpu_began), 2),
                "train": round(max(0.0, cpu_ended - (cpu_running or cpu_ended)), 2),
            },
        }
        if training_task and job.state == "succeeded":
            result["on_training_problems"] = self._examine(job, training_task)
        path = result_path(self.folder, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n")
        remember_estimate(self.folder, run.document, result["cpu_seconds"]["estimate"])
        return result

    def _submit(self, document: Mapping[str, Any], key: str) -> Job:
        """The job of a key, also that of a command that was interrupted; what else such a command left is cancelled."""
        job = self.client.submit(document, idempotency_key=key)
        while job.state == "cancelled":
            key += " again"
            job = self.client.submit(document, idempotency_key=key)
        for other in self.client.jobs():
            # It would have its turn first, and this run would seem to wait for nothing.
            if not other.is_final and other.id != job.id and other.name.partition("/")[0] in SETTINGS:
                with contextlib.suppress(Conflict):
                    self.client.cancel(other.id)
        return job

    def _examine(self, job: Job, tasks: Mapping[str, Any]) -> dict[str, Any]:
        asked = self.client.request_evaluation(job.id, tasks=tasks, samples=EVALUATION_SAMPLES, ks=[1])
        asked = self.client.wait_evaluation(asked.id, LONGEST_RUN_SECONDS)
        if asked.result is None:
            raise InternalError(f"evaluation {asked.id}: {asked.failure.get('message')}")
        return asked.result.model_dump(exclude={"per_problem"})

    def _result(self, run: PlannedRun, job: Job, attempt: int) -> dict[str, Any]:
        events = self.client.history(job.id)
        series = self.client.metrics(job.id, max_points=CURVE_POINTS)
        return {
            "name": run.name,
            "setting": run.setting,
            "method": run.method,
            "seed": run.seed,
            "document": run.document,
            "attempt": attempt,
            "job_id": job.id,
            "state": job.state,
            "failure": job.failure and job.failure.model_dump(),
            "evaluations": [_compact(evaluation) for evaluation in self.client.evaluations(job.id)],
            "seconds": {
                "estimate": seconds_between(events, "estimating", "running"),
                "train": _training_seconds(events),
            },
            "rollouts": rollouts(self.platform, job.id, job.spec),
            "curves": {
                "step": series.steps,
                **{name: series.series[name] for name in CURVES if name in series.series},
            },
            "happened": [
                event.model_dump() for event in events if event.kind not in (*USUAL_EVENTS, "adopted", "replica_joined")
            ][-50:],
        }


def result_path(folder: Path, run: PlannedRun) -> Path:
    """Where a run's result is kept."""
    return folder / "runs" / f"{run.name.replace('/', '--')}.json"


def stored_result(folder: Path, run: PlannedRun) -> dict[str, Any] | None:
    """The result of a run that succeeded with this very document, else None."""
    path = result_path(folder, run)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    same = result["document"] == json.loads(json.dumps(run.document))
    return result if same and result["state"] == "succeeded" else None


def _attempt(folder: Path, run: PlannedRun) -> int:
    path = result_path(folder, run)
    return int(json.loads(path.read_text())["attempt"]) + 1 if path.exists() else 1


def _digest(document: Mapping[str, Any]) -> str:
    return redis_keys.digest(json.dumps(document, sort_keys=True))[:16]


def _compact(evaluation: StepEvaluation) -> dict[str, Any]:
    """An evaluation with its table of problems as columns."""
    columns = {
        "samples": [score.samples for score in evaluation.per_problem],
        "correct": [score.correct for score in evaluation.per_problem],
        "distinct": [score.distinct for score in evaluation.per_problem],
        "public_only": [score.public_only for score in evaluation.per_problem],
    }
    return {**evaluation.model_dump(exclude={"per_problem"}), "per_problem": columns}


def _training_seconds(events: Sequence[Event]) -> float | None:
    """From the first step the trainer could take to the last it took, without the evaluation after it."""
    begins = [event.at for event in events if event.kind == "state" and event.body.get("to") == "running"]
    ends = [event.at for event in events if event.kind == "training_ended"]
    if not begins or not ends:
        return None
    return round((datetime.fromisoformat(ends[-1]) - datetime.fromisoformat(begins[0])).total_seconds(), 2)
