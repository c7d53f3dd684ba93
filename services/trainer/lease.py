"""The trainer's hold on a job: rank 0's lease, through which all reports go, and the note of an attempt that finds
its deaths.

A trainer's attempt at a job: a note beside the checkpoints says what is in hand, and goes when the attempt ends.
A note that is found was left by a trainer that died: of an error, which it has written into the note, or without a
word, as one does that the kernel kills. Rank 0 notes what all ranks do; another rank notes only its own last error.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, TypeVar

import torch
from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, ValidationError

from services.trainer.ranks import Ranks
from spo.errors import InternalError, LeaseLost, NotReady, ResourceExhausted, SpoError
from spo.observability import get_logger, is_out_of_memory, memory_limit_bytes, oom_kills
from spo.rpc.client import RpcClient
from spo.spec.job_spec import spec_from_json
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse, TrainerDeath
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.store import StoredVersion

log = get_logger("lease")

LEADER = "attempt.json"
OTHERS = "attempt-rank-*.json"
# Nothing is in hand then; whoever ends a process that waits ends no work.
WAITING = "wait"
# What takes so long is told with the heartbeats: a job that waits for it says so.
LONG_STAGE_SECONDS = 30.0
IN_WORDS = {
    "load": "to load the model",
    "resume": "to load the checkpoint",
    "train": "a training step",
    "publish": "to publish weights",
    "checkpoint": "to write a checkpoint",
    "update_reference": "to load the reference",
}
MOST_CAUSE_CHARACTERS = 500
KILLED = "the kernel killed a process of its cgroup for want of memory"

RENEW_SECONDS = 1.0
CALL_DEADLINE_SECONDS = 10.0
LOG_SECONDS = 10.0
# For so long a trainer leaves jobs to others when it was leased one that it cannot read.
UNREADABLE_SECONDS = 30.0
LET_GO = "cancelled"
REPORTS_PER_RENEWAL = 1000
MAX_QUARANTINED_IDS = 1000

Answer = TypeVar("Answer")
# A service whose Redis is just restarting answers INTERNAL: worth asking again, like one that is away or full.
TRANSIENT = (NotReady, InternalError, ResourceExhausted)


class AttemptNote(BaseModel):
    """What a rank has written; `cause` once it knows what it ends of. oom_kills: of its cgroup, null: unknown."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    epoch: int
    stage: str = WAITING
    step: int = 0
    steps_done: int = 0
    ranks: int = 1
    memory_bytes: int = 0
    oom_kills: int | None = None
    cause: str = ""
    out_of_memory: bool = False


class Attempt:
    """This rank's part of one attempt, from the lease of a job to its end."""

    def __init__(self, ranks: Ranks, grant: LeaseJobResponse, notes: Path) -> None:
        """notes: the job's folder here, which the next trainer on this machine sees."""
        self._leads = ranks.leads
        self._alone = ranks.world_size == 1
        name = LEADER if ranks.leads else OTHERS.replace("*", str(ranks.rank))
        self._file = notes / name
        self._is_over = self._has_begun = False
        self._began_at = time.monotonic()
        # Where training begins; as far as it is known before anything is loaded.
        self._begun_after = max((saved.step for saved in grant.checkpoints.items), default=0)
        self._note = AttemptNote(
            epoch=grant.epoch,
            ranks=ranks.world_size,
            memory_bytes=rank_memory_bytes(ranks.device),
            oom_kills=oom_kills(),
        )

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around the work on the job: the note goes with its end, and stays with the cause where it raises."""
        self.begins("load", self._begun_after)
        try:
            yield
        except Exception as error:
            self._write(cause=_words(error), out_of_memory=is_out_of_memory(error))
            raise
        self._forget()

    def resumed(self, step: int) -> None:
        """Training goes on after this step."""
        self._begun_after = step

    def begins(self, stage: str, done: int) -> None:
        """Note what is in hand from now on, after so many steps of the job."""
        if self._leads and (stage, done + 1) != (self._note.stage, self._note.step):
            self._began_at = time.monotonic()
            self._write(stage=stage, step=done + 1, steps_done=done - self._begun_after)

    @property
    def long_stage(self) -> str:
        """What has been in hand for LONG_STAGE_SECONDS, in words; "" when nothing has."""
        note, seconds = self._note, time.monotonic() - self._began_at
        if self._is_over or note.stage == WAITING or seconds < LONG_STAGE_SECONDS:
            return ""
        return f"{IN_WORDS.get(note.stage, note.stage)} (step {note.step}) has taken {seconds:.0f} s so far"

    def delayed(self, words: str) -> None:
        """All ranks begin anew because of what one of them met alone: no death, and the next attempt says why."""
        if self._leads:
            self._write(stage=WAITING, cause=words[:MOST_CAUSE_CHARACTERS])

    def stopped(self) -> None:
        """The process was asked to stop, and ends in the middle of its work: no death.

        Of several ranks torchrun asks this of those that are left when one has died, so there it may be one.
        """
        if self._alone:
            self._forget()

    def _forget(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _write(self, **changes: str | int | bool) -> None:
        if self._is_over:
            return
        self._note = self._note.model_copy(update=changes)
        beside = self._file.with_suffix(f".{os.getpid()}.tmp")
        try:
            # Once: where the folder is gone since, the job is deleted, and stays so.
            if not self._has_begun:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._has_begun = True
            beside.write_text(self._note.model_dump_json())
            beside.replace(self._file)
        except OSError as error:
            # Training goes on: at worst a death of this attempt is not told.
            log.warning("what is in hand cannot be noted", reason=str(error))
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def rank_memory_bytes(device: torch.device) -> int:
    """What a rank may take: its device's memory, or on a CPU its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_limit_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def death_before(folder: Path, epoch: int) -> TrainerDeath | None:
    """How the trainer ended whose notes are here, under an older lease than `epoch`; None when none was left."""
    led = _read(folder / LEADER)
    if led is None or led.epoch >= epoch or led.stage == WAITING:
        return None
    notes = [led, *(note for file in sorted(folder.glob(OTHERS)) if (note := _read(file)))]
    said = [note for note in notes if note.cause and note.epoch == led.epoch]
    # The rank that ran out of memory says why; the others only lost it.
    last = next((note for note in said if note.out_of_memory), said[-1] if said else led)
    killed = None if led.oom_kills is None else max(0, (oom_kills() or 0) - led.oom_kills)
    return TrainerDeath(
        epoch=led.epoch,
        stage=led.stage,
        step=led.step,
        steps_done=led.steps_done,
        cause=last.cause or (KILLED if killed else ""),
        # Of several ranks the one that was killed says nothing, and the others only that they lost it.
        out_of_memory=last.out_of_memory or (bool(killed) and (not last.cause or led.ranks > 1)),
        ranks=led.ranks,
        memory_bytes=led.memory_bytes,
    )


def delay_before(folder: Path, epoch: int) -> str:
    """What made the trainer begin anew whose note is here, under an older lease than `epoch`; "" for nothing."""
    led = _read(folder / LEADER)
    return led.cause if led and led.epoch < epoch and led.stage == WAITING else ""


def forget_deaths(folder: Path) -> None:
    """What was found has been told."""
    for file in (folder / LEADER, *folder.glob(OTHERS)):
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _read(file: Path) -> AttemptNote | None:
    try:
        return AttemptNote.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"[:MOST_CAUSE_CHARACTERS]


def take_lease(
    orchestrator: RpcClient, trainer_id: str, wait_seconds: float, stop: threading.Event
) -> wire.LeaseJobResponse | None:
    """Wait up to wait_seconds for a job; None when there is none, or the orchestrator is away (logged)."""
    request = wire.LeaseJobRequest(trainer_id=trainer_id, wait_seconds=wait_seconds)
    try:
        grant: wire.LeaseJobResponse = orchestrator.call(
            "LeaseJob", request, deadline_seconds=wait_seconds + 10, stop=stop
        )
    except TRANSIENT as error:
        log.warning("waiting for a job, but the orchestrator gives none", reason=error.message)
        stop.wait(1.0)
        return None
    if not grant.run_id:
        return None
    try:
        spec_from_json(grant.spec_json)
    except NotReady as error:
        log.error("the job is left to a trainer of a later release", run=grant.run_id, reason=error.message)
        _let_go(orchestrator, trainer_id, grant)
        stop.wait(UNREADABLE_SECONDS)
        return None
    return grant


def _let_go(orchestrator: RpcClient, trainer_id: str, grant: wire.LeaseJobResponse) -> None:
    ended = wire.FinishRunRequest(
        run_id=grant.run_id, trainer_id=trainer_id, epoch=grant.epoch, error_code=LET_GO, error_message="not readable"
    )
    try:
        orchestrator.call("FinishRun", ended, deadline_seconds=CALL_DEADLINE_SECONDS)
    except SpoError as error:
        log.warning("the lease runs out by itself", run=grant.run_id, reason=error.message)


def tell_death(
    orchestrator: RpcClient, trainer_id: str, grant: wire.LeaseJobResponse, death: wire.TrainerDeath
) -> bool | None:
    """Tell how the trainer before died: whether the job goes on all the same; None when it could not be told."""
    told = wire.RenewLeaseRequest(run_id=grant.run_id, trainer_id=trainer_id, epoch=grant.epoch, death=death)
    try:
        answer: wire.RenewLeaseResponse = orchestrator.call("RenewLease", told, deadline_seconds=CALL_DEADLINE_SECONDS)
    except SpoError as error:
        log.warning("the death of the trainer before is not told; trying again", reason=error.message)
        return None
    return answer.directive != wire.DIRECTIVE_CANCEL


class _Owner(TypedDict):
    """What every request of the job's owner carries."""

    run_id: str
    trainer_id: str
    epoch: int


class JobLease:
    """One leased job. Once the orchestrator has refused its epoch every method raises LeaseLost and sends nothing."""

    def __init__(
        self,
        orchestrator: RpcClient,
        trainer_id: str,
        grant: wire.LeaseJobResponse,
        *,
        patience_seconds: float,
        stop: threading.Event,
    ) -> None:
        self.grant = grant
        self.directive: int = wire.DIRECTIVE_CONTINUE
        self.reference_version = 0
        self._orchestrator = orchestrator
        self._owner: _Owner = {"run_id": grant.run_id, "trainer_id": trainer_id, "epoch": grant.epoch}
        self._patience_seconds = patience_seconds
        self._stop = stop
        self._reports: deque[wire.StepReport] = deque()
        self._renewing = threading.Lock()
        # When the last call began that the orchestrator took as the owner's; time that the process is stopped counts.
        self._owned_at = time.monotonic()
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    def confirm(self) -> None:
        """Before files of the run are written: ask, where a whole lease has passed since the last answer.

        A process that was stopped for so long may wake up to a job that is another's or deleted. Raises LeaseLost, and
        what the orchestrator's silence raises.
        """
        if self.lost or time.monotonic() - self._owned_at > self.grant.lease_seconds:
            self._until_answered("RenewLease", self._renew)

    @property
    def has_reported_all(self) -> bool:
        """Whether every report was acknowledged; `directive` is then the answer to the last of them, or newer."""
        return not self._reports

    def report_step(
        self, step: int, metrics: Mapping[str, float], alarms: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Report a step's metrics, and alarms by name with their reasons, with the next renewal."""
        self._reports.append(wire.StepReport(step=step, metrics=metrics, alarms=alarms))

    def report_quarantine(
        self, step: int, metrics: Mapping[str, float], reason: str, trajectory_ids: Sequence[str]
    ) -> None:
        """Report a step whose batch could not be learned from, with the next renewal."""
        named = trajectory_ids[:MAX_QUARANTINED_IDS]
        self._reports.append(
            wire.StepReport(step=step, metrics=metrics, quarantine_reason=reason, quarantined_ids=named)
        )

    def publish(self, version: int, step: int, stored: StoredVersion, broadcast: BroadcastOffer | None) -> int:
        """Tell the orchestrator about a stored weight version, and where it is sent; idempotent.

        Returns how many replicas serve the run.
        """
        request = wire.PublishWeightsRequest(
            **self._owner,
            version=version,
            step=step,
            uri=stored.uri,
            manifest_digest=stored.manifest_digest,
            size_bytes=stored.size_bytes,
            broadcast=broadcast,
        )
        response = self._insist("PublishWeights", request)
        assert isinstance(response, wire.PublishWeightsResponse)
        return response.replicas

    def reference_values(self, version: int) -> dict[str, float]:
        """Qhat_0 by prompt id under a weight version that is the reference, reward units. Raises NotReady."""
        request = wire.GetReferenceValuesRequest(run_id=self.grant.run_id, version=version)
        response: wire.GetReferenceValuesResponse = self._orchestrator.call(
            "GetReferenceValues", request, deadline_seconds=CALL_DEADLINE_SECONDS
        )
        return dict(response.qhat_0)

    def report_checkpoint(
        self, step: int, *, path: str, manifest_digest: str, weight_version: int, keep: int, resumed_step: int
    ) -> list[int]:
        """Tell the orchestrator about a finished checkpoint; returns the steps of those it still records; idempotent.

        All step reports arrive before: whoever resumes from it takes only later steps again.
        """
        self._report_all()
        request = wire.ReportCheckpointRequest(
            **self._owner,
            step=step,
            path=path,
            manifest_digest=manifest_digest,
            weight_version=weight_version,
            keep=keep,
            resumed_step=resumed_step,
        )
        response = self._insist("ReportCheckpoint", request)
        assert isinstance(response, wire.ReportCheckpointResponse)
        return list(response.kept_steps)

    def finish(self, final_step: int, error_code: str = "", error_message: str = "") -> None:
        """Give the job back: done, or failed with an error. All step reports arrive before."""
        self.close()
        self._report_all()
        request = wire.FinishRunRequest(
            **self._owner, error_code=error_code, error_message=error_message, final_step=final_step
        )
        self._insist("FinishRun", request)

    def close(self) -> None:
        """Stop renewing; without `finish` the lease runs out by itself."""
        self._closed.set()
        self._thread.join(CALL_DEADLINE_SECONDS + 1)

    def _keep(self) -> None:
        while not self._closed.wait(min(RENEW_SECONDS, self.grant.lease_seconds / 3)):
            try:
                self._renew()
            except LeaseLost:
                return
            except SpoError as error:
                log.warning("could not renew the lease; trying again", run=self.grant.run_id, reason=error.message)

    def _report_all(self) -> None:
        while self._reports:
            self._until_answered("RenewLease", self._renew)

    def _renew(self) -> None:
        # One at a time: the reports that an answer acknowledges are the first in the queue.
        with self._renewing:
            reports = [self._reports[index] for index in range(min(len(self._reports), REPORTS_PER_RENEWAL))]
            request = wire.RenewLeaseRequest(**self._owner, reports=reports)
            with self._as_owner():
                response: wire.RenewLeaseResponse = self._orchestrator.call(
                    "RenewLease", request, CALL_DEADLINE_SECONDS
                )
            # Before the reports are dropped: once `has_reported_all` holds, the directive answers the last of them.
            self.directive, self.reference_version = response.directive, response.reference_version
            for _ in reports:
                self._reports.popleft()

    def _insist(self, method: str, request: Message) -> Message:
        def attempt() -> Message:
            with self._as_owner():
                answer: Message = self._orchestrator.call(method, request, CALL_DEADLINE_SECONDS)
                return answer

        return self._until_answered(method, attempt)

    def _until_answered(self, method: str, attempt: Callable[[], Answer]) -> Answer:
        """Call until the orchestrator answers; raises its error (a transient one once patience or the process ends)."""
        deadline = time.monotonic() + self._patience_seconds
        last_logged = 0.0
        while True:
            try:
                return attempt()
            except TRANSIENT as error:
                if time.monotonic() > deadline or self._stop.is_set():
                    raise
                if time.monotonic() - last_logged > LOG_SECONDS:
                    last_logged = time.monotonic()
                    log.warning("waiting for the orchestrator", call=method, reason=error.message)
                self._stop.wait(0.5)

    @contextmanager
    def _as_owner(self) -> Iterator[None]:
        """Around a call of the job's owner: the first refusal is the last call."""
        if self.lost:
            raise LeaseLost(f"the lease of {self.grant.run_id} was lost")
        began = time.monotonic()
        try:
            yield
            self._owned_at = began
        except LeaseLost:
            self._lost.set()
            log.warning("the lease was lost; this trainer stops working on the job", run=self.grant.run_id)
            raise
