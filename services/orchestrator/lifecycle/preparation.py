"""What a job needs before it is trained: its tests at the judges, and a value of each training prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.scorer import upload_tests
from services.orchestrator.experience.availability import await_stored, needs_estimates, write_prompts
from services.orchestrator.jobs.record import clear_fields, while_field_is, write_fields
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.dead_letters import DeadLetterWatch
from services.orchestrator.lifecycle.model_check import ModelCheck
from services.orchestrator.values.progress import prompts_before_training, prompts_known
from services.orchestrator.values.requests import publish_estimates, publish_pivotal
from spo import redis_keys
from spo.rpc.judge_pools import JudgePools
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState
from spo.tasks.problem import Problem
from spo.v1.environment_service_pb2 import BeginRequest

PROGRESS_SECONDS = 2.0
PROMPTS_TOLD = 100
ENVIRONMENT_SECONDS = 60.0


class JobPreparation:
    """validating -> estimating -> running, or succeeded where nothing is trained; every step may be repeated."""

    def __init__(self, jobs: JobStore, library: TaskLibrary, model_check: ModelCheck, judges: JudgePools) -> None:
        self.jobs = jobs
        self.library = library
        self.model_check = model_check
        self.judges = judges
        self.dead_letters = DeadLetterWatch(jobs, model_check.max_share)
        self._reported: dict[tuple[str, str], tuple[int, float]] = {}

    def validate(self, job_id: str) -> None:
        """Try the model on every prompt, give the judges every test set of the job, and try its environment.

        All by content, so doing it twice changes nothing.
        """
        spec = self.jobs.spec(job_id)
        await_stored(self.jobs.client, spec)
        tasks = self.library.load(spec.tasks)
        too_long = self.model_check.of_all_prompts(job_id, spec, tasks)
        if too_long:
            self._tell_too_long(job_id, spec, too_long)
        write_prompts(self.jobs, job_id, tasks.train, spec)
        problems = [*tasks.train, *tasks.evaluation]
        upload_tests(self.judges, problems)
        if problems[0].environment:
            self._try_environment(problems[0])
        totals = write_fields(job_id, prompts_total=len(tasks.train), evaluation_total=len(tasks.evaluation))
        ready = "; ".join([f"{len(problems)} problems ready", *tasks.notes])
        self.jobs.transition(job_id, JobState.ESTIMATING, ready, writes=[totals])

    def _try_environment(self, problem: Problem) -> None:
        """Begin an episode that nobody plays; raises what the environment says of its name and arguments."""
        request = BeginRequest(environment=problem.environment, environment_json=problem.environment_json, seeds=[0])
        self.judges.environments.call("Begin", request, ENVIRONMENT_SECONDS)

    def _tell_too_long(self, job_id: str, spec: JobSpec, too_long: dict[str, int]) -> None:
        """Say once which prompts nothing will be sampled for."""
        body = {
            "total": len(too_long),
            "max_prompt_tokens": spec.model.max_prompt_tokens,
            "prompts": dict(list(too_long.items())[:PROMPTS_TOLD]),
        }
        writes = [write_fields(job_id, prompts_too_long=len(too_long))]
        self.jobs.once(job_id, while_field_is(job_id, "prompts_too_long"), "prompts_too_long", body, writes)

    def estimate(self, job_id: str) -> None:
        """Ask for the values, and start training when enough prompts have one, or all are done or given up on."""
        spec = self.jobs.spec(job_id)
        tasks = self.library.load(spec.tasks)
        problems = tasks.train
        if spec.trainer.steps and not needs_estimates(spec):
            self.jobs.transition(job_id, JobState.RUNNING, "the objectives need no values")
            return
        publish_estimates(self.jobs, job_id, tasks)
        if not self._are_estimated(job_id, len(problems)):
            needed, known = prompts_before_training(spec, len(problems)), prompts_known(self.jobs.client, job_id)
            if known >= needed and needed < len(problems):
                reason = f"{known} of {len(problems)} prompts have a value; the others are estimated while it trains"
                self.jobs.transition(
                    job_id, JobState.RUNNING, reason, writes=[write_fields(job_id, estimates_pending=True)]
                )
        elif self._pivotal_is_over(job_id, spec, problems):
            done = self.jobs.client.hlen(redis_keys.run_values(job_id))
            self._go_on(job_id, spec, f"{done} of {len(problems)} prompts have a value")

    def estimate_beside_training(self, job_id: str) -> None:
        """Of a running job whose estimates go on: tell their progress, and once that they are over.

        Raises PreconditionFailed (code "too_many_dead_letters").
        """
        spec = self.jobs.spec(job_id)
        tasks = self.library.load(spec.tasks)
        publish_estimates(self.jobs, job_id, tasks)
        if self._are_estimated(job_id, len(tasks.train)) and self._pivotal_is_over(job_id, spec, tasks.train):
            guard, over = while_field_is(job_id, "estimates_pending", 1), clear_fields(job_id, "estimates_pending")
            done = self.jobs.client.hlen(redis_keys.run_values(job_id))
            self.jobs.once(job_id, guard, "estimated", {"done": done, "total": len(tasks.train)}, [over])

    def _are_estimated(self, job_id: str, total: int) -> bool:
        """Whether every prompt has its final value or was given up on; tells the progress."""
        done = self.jobs.client.hlen(redis_keys.run_values(job_id))
        self._report(job_id, "estimating", done, total)
        return done + self._given_up(job_id, "estimates", done, total) >= total

    def _go_on(self, job_id: str, spec: JobSpec, reason: str) -> None:
        """Training begins, or the job has succeeded where nothing is to be trained."""
        if spec.trainer.steps:
            self.jobs.transition(job_id, JobState.RUNNING, reason)
        else:
            self.jobs.transition(job_id, JobState.SUCCEEDED, f"{reason}; no step was to be trained")

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
        return self.dead_letters.given_up(job_id, stream, total) if done < total else 0

    def _report(self, job_id: str, stage: str, done: int, total: int) -> None:
        reported, at = self._reported.get((job_id, stage), (-1, 0.0))
        if done != reported and (done == total or time.monotonic() - at > PROGRESS_SECONDS):
            self._reported[job_id, stage] = (done, time.monotonic())
            self.jobs.append(job_id, "progress", {"stage": stage, "done": done, "total": total})
