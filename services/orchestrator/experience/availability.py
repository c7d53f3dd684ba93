"""Experience stored before a job: which of its prompts may use it, and when all of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from services.orchestrator.datasets.library import prompt_of
from services.orchestrator.jobs.commit import Commit
from services.orchestrator.jobs.store import JobStore
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, NotReady
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_status import run_tenant
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import TERMINAL, decode_state
from spo.tasks.decontaminate import ContaminationIndex
from spo.tasks.problem import Problem, TaskSets

PROMPTS_PER_WRITE = 256


def needs_estimates(spec: JobSpec) -> bool:
    """Whether value-estimation has anything to do for a job before it trains."""
    offline = spec.offline
    wants_programs = offline.human_solutions or offline.wrong_human_solutions
    return spec.value is not None or wants_programs or bool(offline.experience)


def require_stored(client: RedisClient, store: ExperienceStore, spec: JobSpec, tenant: str) -> None:
    """Refuse a spec that names a run nobody has stored, or another tenant has.

    Raises InvalidInput, with a pointer to every such source.
    """
    violations = []
    for index, wanted in enumerate(spec.offline.experience):
        if wanted.run is not None and not _is_there(client, store, wanted.run, tenant):
            message = f"there is no stored run or import {wanted.run}; `spo experience ls` shows what there is"
            violations.append(FieldViolation(f"/offline/experience/{index}/run", message))
    if violations:
        raise InvalidInput("stored experience is missing", code="unknown_experience", violations=tuple(violations))


def await_stored(client: RedisClient, spec: JobSpec) -> None:
    """Raise NotReady while an ended run that the job names is still on its way into the store."""
    for run_id in {wanted.run for wanted in spec.offline.experience if wanted.run}:
        with client.pipeline(transaction=False) as pipe:
            pipe.get(redis_keys.run_state(run_id))
            pipe.hget(redis_keys.replay_counters(run_id), "number")
            pipe.hget(redis_keys.replay_stored(run_id), "written")
            state, number, written = pipe.execute()
        if decode_state(state) in TERMINAL and int(written or 0) < int(number or 0):
            raise NotReady(f"the experience of {run_id} is being stored: {int(written or 0)} of {int(number)}")


def write_prompts(jobs: JobStore, job_id: str, problems: Sequence[Problem], spec: JobSpec) -> None:
    """Write the prompts to Redis, where the replay buffer reads them when it stores their trajectories."""
    key = redis_keys.run_prompts(job_id)
    for start in range(0, len(problems), PROMPTS_PER_WRITE):
        chunk = problems[start : start + PROMPTS_PER_WRITE]
        words = [(problem.problem_id, prompt_of(problem, spec).SerializeToString()) for problem in chunk]
        jobs.commit(Commit(job_id, writes=[("HSET", key, *(word for pair in words for word in pair))]), durable=False)


class Decontamination:
    """Keeps stored experience from training problems that copy a held-out one."""

    def __init__(self, tasks: TaskSets, spec: JobSpec) -> None:
        self.tasks = tasks
        self.spec = spec
        self.left_out = 0

    def may_import(self, problem: Problem) -> bool:
        """Whether this problem may use stored experience; counts those that may not."""
        if not self.spec.offline.experience:
            return False
        copies = self._index is not None and self._index.find_copy(problem) is not None
        self.left_out += copies
        return not copies

    @cached_property
    def _index(self) -> ContaminationIndex | None:
        if not (self.spec.offline.decontaminate and self.tasks.evaluation):
            return None
        tasks = self.spec.tasks
        instruction = tasks.huggingface.instruction if tasks.huggingface else ""
        return ContaminationIndex(self.tasks.evaluation, tasks.near_duplicate_similarity, instruction)


def _is_there(client: RedisClient, store: ExperienceStore, run: str, tenant: str) -> bool:
    owner = run_tenant(client, run)
    if owner is not None:
        return owner == tenant
    return any(file.origin.tenant == tenant for file in store.files(run))
