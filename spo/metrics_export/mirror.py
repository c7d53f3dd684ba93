"""Follows jobs' curves over the API and writes each point once to a sink; may be stopped and started at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from spo.client import Client
from spo.client.models import EvaluationResult, JobSummary
from spo.metrics_export.sinks import open_sink

# The API thins longer answers, so no more steps are asked for at once.
WINDOW_STEPS = 1000
POLL_SECONDS = 2.0


class JobMirror:
    """One job and its sink. A step that a resumed trainer repeats stays as it was written first."""

    def __init__(self, client: Client, job: JobSummary, target: str) -> None:
        self._client = client
        self._job_id = job.id
        self._sink = open_sink(target, job.id, job.name or job.id)
        self._steps = {curve: self._sink.last_step(curve) for curve in ("training", "evaluation")}
        self.written = 0

    def catch_up(self) -> None:
        """Write every point that the API has and the sink has not."""
        newest = self._client.get(self._job_id).progress.step
        while True:
            start = max(0, self._steps["training"] + 1)
            end = start + WINDOW_STEPS - 1
            series = self._client.metrics(self._job_id, from_step=start, to_step=end, max_points=WINDOW_STEPS)
            for index, step in enumerate(series.steps):
                point = {name: column[index] for name, column in series.series.items()}
                self._write("training", step, point)
            if end >= newest:
                break
            # Steps without a report, if any, are gone past.
            self._steps["training"] = max(self._steps["training"], end)
        for result in self._client.evaluations(self._job_id):
            self._write("evaluation", result.step, _scores(result))
        self._sink.flush()

    def _write(self, curve: str, step: int, point: dict[str, float | None]) -> None:
        if step <= self._steps[curve]:
            return
        self._sink.write(curve, step, {name: value for name, value in point.items() if value is not None})
        self._steps[curve] = step
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
