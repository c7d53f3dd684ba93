"""What a job needs before it is trained: its tests at the judges, and a value of each training prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.scorer import upload_tests
from services.orchestrator.experience.availability import await_stored, needs_estimates, write_prompts
from services.orchestrator.jobs.record import write_fields
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.dead_letters import dead_requests, refuse_dead_letters
from services.orchestrator.values.requests import publish_estimates, publish_pivotal
from spo import redis_keys
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState
from spo.tasks.problem import Problem

PROGRESS_SECONDS = 2.0


class JobPreparation:
    """validating -> estimating -> running; every step may be repeated."""

    def __init__(self, jobs: JobStore, library: TaskLibrary, judge: RpcClient, max_dead_letter_share: float) -> None:
        self.jobs = jobs
        self.library = library
        self.judge = judge
        self.max_dead_letter_share = max_dead_letter_share
        self._reported: dict[tuple[str, str], tuple[int, float]] = {}

    def validate(self, job_id: str) -> None:
        """Give the judges every test set of the job; content-addressed, so doing it twice changes nothing."""
        spec = self.jobs.spec(job_id)
        await_stored(self.jobs.client, spec)
        tasks = self.library.load(spec.tasks)
        write_prompts(self.jobs.client, job_id, tasks.train, spec)
        problems = [*tasks.train, *tasks.evaluation]
        upload_tests(self.judge, problems)
        totals = write_fields(job_id, prompts_total=len(tasks.train), evaluation_total=len(tasks.evaluation))
        self.jobs.transition(job_id, JobState.ESTIMATING, f"{len(problems)} problems ready", writes=[totals])

    def estimate(self, job_id: str) -> None:
        """Ask for the values, and start training when every prompt has one or was given up on."""
        spec = self.jobs.spec(job_id)
        tasks = self.library.load(spec.tasks)
        problems = tasks.train
        if not needs_estimates(spec):
            self.jobs.transition(job_id, JobState.RUNNING, "the objectives need no values")
            return
        publish_estimates(self.jobs, job_id, tasks)
        done = self.jobs.client.hlen(redis_keys.run_values(job_id))
        self._report(job_id, "estimating", done, len(problems))
        given_up = self._given_up(job_id, "estimates", done, len(problems))
        if done + given_up >= len(problems) and self._pivotal_is_over(job_id, spec, problems):
            self.jobs.transition(job_id, JobState.RUNNING, f"{done} of {len(problems)} prompts have a value")

    def _pivotal_is_over(self, job_id: str, spec: JobSpec, problems: Sequence[Problem]) -> bool:
        """Ask for pivotal tokens where the spec wants them; whether training may begin."""
        if spec.value is None or spec.value.pivotal is None:
            return True
        publish_pivotal(self.jobs, job_id, problems)
        if spec.value.pivotal.when == "idle":
            return True
        done = self.jobs.client.hlen(redis_keys.run_pivotal(job_id))
        self._report(job_id, "pivotal", done, len(problems))
        return done + self._given_up(job_id, "pivotal", done, len(problems)) >= len(problems)

    def _given_up(self, job_id: str, stream: str, done: int, total: int) -> int:
        """Prompts that value-estimation gave up on. Raises PreconditionFailed when there are too many."""
        dead = len(dead_requests(self.jobs.client, job_id, stream)) if done < total else 0
        refuse_dead_letters(dead, total, stream, max_share=self.max_dead_letter_share)
        return dead

    def _report(self, job_id: str, stage: str, done: int, total: int) -> None:
        reported, at = self._reported.get((job_id, stage), (-1, 0.0))
        if done != reported and (done == total or time.monotonic() - at > PROGRESS_SECONDS):
            self._reported[job_id, stage] = (done, time.monotonic())
            self.jobs.append(job_id, "progress", {"stage": stage, "done": done, "total": total})
