"""What all ranks carry out together, one command after another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

from services.trainer.checkpoints.places import CheckpointPlace, SavedCheckpoint
from services.trainer.checkpoints.training_state import TrainingProgress
from services.trainer.learner import StepResult
from services.trainer.microbatches import Minibatch
from services.trainer.ranks import Ranks
from spo.errors import ResourceExhausted, SpoError
from spo.weights.store import StoredVersion


@dataclass(frozen=True)
class Command:
    """`train` on a batch; `skip` counts a quarantined batch as a step; `wait` only keeps the ranks in touch.

    minibatches: this rank's part of the batch. `update_reference`: take weight version reference_version as the
    reference.
    """

    kind: Literal["train", "skip", "publish", "checkpoint", "update_reference", "wait", "end"]
    minibatches: Sequence[Minibatch] = ()
    reference_version: int = 0


class RankRole(Protocol):
    """A rank's part in a run, beside the commands themselves: rank 0 decides and reports, the others follow."""

    def resumed(self, progress: TrainingProgress, *, packed: bool) -> None:
        """Training goes on from here; what was loaded is saved already. packed: the model computes without padding."""

    def next_command(self, progress: TrainingProgress) -> Command:
        """What this rank does next; all ranks do it together."""

    def step_done(self, progress: TrainingProgress, result: StepResult) -> None:
        """A batch was learned from, or refused."""

    def owning(self) -> AbstractContextManager[None]:
        """Around what only the owner of the job may do."""

    def published(self, written: StoredVersion | None, progress: TrainingProgress) -> None:
        """The weights were stored; rank 0 gets the version."""

    def checkpointed(
        self, saved: Future[SavedCheckpoint] | None, place: CheckpointPlace, progress: TrainingProgress
    ) -> None:
        """A checkpoint was tried; rank 0 gets what is done once it is whole, None when it could not be written."""

    def no_room(self, error: ResourceExhausted) -> None:
        """There is no room for weights or a checkpoint now: it is tried again."""

    def fail(self, error: SpoError) -> None:
        """The run cannot go on here."""

    def conclude(self, progress: TrainingProgress) -> None:
        """The work on the run has ended here."""


class Follower:
    """Every rank but the first: receives commands and reports nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def resumed(self, progress: TrainingProgress, *, packed: bool) -> None:
        """Rank 0 decides when to save."""

    def next_command(self, progress: TrainingProgress) -> Command:
        """Wait for rank 0's decision."""
        return self._ranks.scatter(None)

    def step_done(self, progress: TrainingProgress, result: StepResult) -> None:
        """Rank 0 reports."""

    def owning(self) -> AbstractContextManager[None]:
        """Rank 0 holds the lease."""
        return nullcontext()

    def published(self, written: StoredVersion | None, progress: TrainingProgress) -> None:
        """Rank 0 announces."""

    def checkpointed(
        self, saved: Future[SavedCheckpoint] | None, place: CheckpointPlace, progress: TrainingProgress
    ) -> None:
        """Rank 0 reports."""

    def no_room(self, error: ResourceExhausted) -> None:
        """Rank 0 writes."""

    def fail(self, error: SpoError) -> None:
        """The error is raised on rank 0 alike."""

    def conclude(self, progress: TrainingProgress) -> None:
        """Rank 0 gives the job back."""
