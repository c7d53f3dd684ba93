"""A trainer's attempt at a job: a note beside the checkpoints says what is in hand, and goes when the attempt ends.

A note that is found was left by a trainer that died: of an error, which it has written into the note, or without a
word, as one does that the kernel kills. Rank 0 notes what all ranks do; another rank notes only its own last error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from services.trainer.ranks import Ranks
from spo.observability.logs import get_logger
from spo.observability.memory import is_out_of_memory, memory_limit_bytes, oom_kills
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse, TrainerDeath

log = get_logger("attempt")

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
