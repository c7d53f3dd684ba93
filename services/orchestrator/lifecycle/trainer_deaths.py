"""Trainers that die: each death is an event with its step, cause and what would help; too many in a row end the job.

A death counts while no step has been completed since the one before, or where the job comes to the same step again and
dies of it again. What a trainer was doing it notes itself, beside the checkpoints; its successor tells it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Fence, Precondition
from services.orchestrator.jobs.series import latest_step
from services.orchestrator.jobs.store import JobStore
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec
from spo.spec.plan.advice import MemoryAdvice, memory_advice
from spo.spec.plan.shapes import shape_of_folder
from spo.v1.orchestrator_service_pb2 import RenewLeaseRequest, TrainerDeath

log = get_logger("trainer-deaths")

DOING = {
    "load": "loading the model",
    "resume": "loading the checkpoint",
    "train": "training",
    "publish": "publishing weights",
    "checkpoint": "writing a checkpoint",
    "update_reference": "loading the reference",
}
UNSAID = "it ended without a word, as a process does that is killed (status -9 or 137): for want of memory, or by hand"


@dataclass(frozen=True)
class DeathCount:
    """Deaths without a step in between, the last of them at `step`; so many of them were of memory."""

    deaths: int = 0
    step: int = 0
    out_of_memory: int = 0

    def after(self, death: TrainerDeath, *, of_memory: bool) -> DeathCount:
        """The count with one more death."""
        goes_on = death.steps_done == 0 or death.step == self.step
        before = self if goes_on else DeathCount()
        return DeathCount(before.deaths + 1, death.step, before.out_of_memory + of_memory)


class TrainerDeaths:
    """Tells of deaths once each, and fails the job after the most that are allowed."""

    def __init__(self, jobs: JobStore, most: int) -> None:
        self.jobs = jobs
        self.most = most

    def note(self, request: RenewLeaseRequest) -> None:
        """Count and tell the death that the holder of a lease tells of. Raises LeaseLost for a stale holder."""
        job_id, death = request.run_id, request.death
        key = own_keys.job_trainer_deaths(job_id)
        stored = self.jobs.client.hgetall(key)
        told = stored.get(b"epoch", b"").decode()
        if told and int(told) >= death.epoch:
            return
        advice = advice_on(self.jobs.spec(job_id), death)
        # What the kernel kills leaves no word; where the plan says that there is too little, that was it.
        of_memory = death.out_of_memory or (not death.cause and advice is not None and not advice.fits)
        count = count_of(stored).after(death, of_memory=of_memory)
        message = in_words(death, advice if of_memory else None)
        fields = {"epoch": death.epoch, **asdict(count), "message": message}
        body = {
            **asdict(count),
            "most": self.most,
            "stage": death.stage,
            "cause": death.cause or UNSAID,
            "message": message,
        }
        if advice is not None:
            body |= {"needed_bytes": advice.needed_bytes, "usable_bytes": advice.usable_bytes, "helps": advice.changes}
        outcome = self.jobs.fenced(
            Commit(
                job_id,
                fence=Fence(request.trainer_id, request.epoch),
                guard=Precondition(key, "epoch", told),
                writes=[("HSET", key, *(word for field in fields.items() for word in field))],
                kind="trainer_died",
                body=json.dumps(body),
            )
        )
        if outcome.done:
            log.warning("a trainer died", job=job_id, deaths=count.deaths, most=self.most, reason=message)
        if count.deaths >= self.most:
            reason = f"{count.deaths} times without a step in between: {message}"
            self.jobs.fail(job_id, "trainer_out_of_memory" if count.out_of_memory else "trainer_dies", reason)


def count_of(stored: Mapping[bytes, bytes]) -> DeathCount:
    """As it is stored, or none."""
    return DeathCount(*(int(stored.get(name, b"0")) for name in (b"deaths", b"step", b"out_of_memory")))


def advice_on(spec: JobSpec, death: TrainerDeath) -> MemoryAdvice | None:
    """What the plan says of the memory that a rank had; None where the model's folder tells no sizes."""
    if not death.memory_bytes or not death.ranks:
        return None
    try:
        shape = shape_of_folder(Path(spec.model.path))
    except InvalidInput:
        return None
    return memory_advice(spec, shape, death.ranks, death.memory_bytes)


def in_words(death: TrainerDeath, advice: MemoryAdvice | None) -> str:
    """Where the trainer died and of what, and with advice what would help."""
    doing = DOING.get(death.stage, death.stage)
    found = f"the trainer died at step {death.step} ({doing}): {death.cause or UNSAID}"
    return f"{found}; {advice.words}" if advice else found


def trouble_of_trainer(client: RedisClient, job_id: str) -> list[str]:
    """Deaths that the job has not got beyond yet, in words."""
    stored = client.hgetall(own_keys.job_trainer_deaths(job_id))
    count = count_of(stored)
    if not count.deaths or latest_step(client, job_id) >= count.step:
        return []
    return [f"{count.deaths} times without a step in between {stored[b'message'].decode()}"]
