"""When a checkpoint is due, by what happened before: each row is a course of events and what then holds."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from services.trainer.checkpoints import (
    MIN_CHECKPOINT_SECONDS,
    STORAGE_SECONDS,
    CheckpointFolder,
    CheckpointSchedule,
    PendingCheckpoint,
    SavedCheckpoint,
)

INTERVAL = 10
SHARE = 0.1


class Course:
    """A schedule and a clock; events are called by name."""

    def __init__(self, share: float) -> None:
        self.now = 0.0
        self.schedule = CheckpointSchedule(INTERVAL, share, lambda: self.now)
        self.saved: Future[SavedCheckpoint] = Future()

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def resumes(self, step: int) -> None:
        self.schedule.resumed(step)

    def writes(self, step: int, seconds: float = 0.0) -> None:
        self.saved = Future()
        began, self.now = self.now, self.now + seconds
        self.schedule.ended(step, PendingCheckpoint(step, self.saved, CheckpointFolder(Path("unused"))), began)

    def fails(self, step: int) -> None:
        self.schedule.write_failed()
        self.schedule.ended(step, None, self.now)

    def asks(self, step: int) -> None:
        assert not self.schedule.due(step)

    def arrives(self) -> None:
        self.saved.set_exception(OSError("how it ended is the controller's"))
        assert self.schedule.take_whole()

    def is_lost(self) -> None:
        self.arrives()
        self.schedule.lost()


# Events in order, then the step that is asked about: is one due, is the step settled, may be written, is one pending.
ROWS = {
    "a run that begins owes nothing": ([], 1, (False, False, True, False)),
    "the interval asks for one": ([], INTERVAL, (True, False, True, False)),
    "what was resumed is saved": ([("resumes", 3)], 3, (False, True, True, False)),
    "one that is written is pending": ([("writes", 10)], 11, (False, False, True, True)),
    "one that is written settles its step": ([("writes", 10)], 10, (False, True, True, True)),
    "one at a time": ([("writes", 10)], 20, (False, False, True, True)),
    "what was due meanwhile follows": ([("writes", 10), ("asks", 20), ("arrives",)], 23, (True, False, True, False)),
    "what was not due does not": ([("writes", 10), ("asks", 19), ("arrives",)], 23, (False, False, True, False)),
    "a full place settles its step for a moment": ([("fails", 10)], 10, (True, True, False, False)),
    "training goes on without it": ([("fails", 10)], 11, (False, False, False, False)),
    "and it is owed a moment later": (
        [("fails", 10), ("passes", STORAGE_SECONDS)],
        12,
        (True, False, True, False),
    ),
    "of the same step too": ([("fails", 10), ("passes", STORAGE_SECONDS)], 10, (True, False, True, False)),
    "one that is written owes nothing more": (
        [("fails", 10), ("passes", STORAGE_SECONDS), ("writes", 12), ("arrives",)],
        13,
        (False, False, True, False),
    ),
    "a lost one is owed": ([("writes", 10), ("is_lost",)], 11, (False, False, False, False)),
    "a lost one is tried again": (
        [("writes", 10), ("is_lost",), ("passes", STORAGE_SECONDS)],
        10,
        (True, False, True, False),
    ),
    "none so soon": ([("passes", MIN_CHECKPOINT_SECONDS)], 1, (False, False, True, False)),
    "one between the intervals": ([("passes", MIN_CHECKPOINT_SECONDS + 1)], 1, (True, False, True, False)),
    "a slow one pauses by its share": (
        [("writes", 10, 4.0), ("arrives",), ("passes", 4.0 / SHARE)],
        11,
        (False, False, True, False),
    ),
    "and no longer": (
        [("writes", 10, 4.0), ("arrives",), ("passes", 4.0 / SHARE + 1)],
        11,
        (True, False, True, False),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_due_follows_from_what_happened(name: str) -> None:
    events, step, expected = ROWS[name]
    course = Course(SHARE)
    for event, *arguments in events:
        getattr(course, str(event))(*arguments)
    schedule = course.schedule
    # In the controller's order: it asks for none of a step that is settled.
    settled = schedule.settled(step)
    assert (schedule.due(step), settled, schedule.may_write(), schedule.pending is not None) == expected


def test_without_a_share_only_the_interval_asks_for_checkpoints() -> None:
    course = Course(share=0)
    course.passes(1e6)
    assert not course.schedule.due(1)
    assert course.schedule.due(INTERVAL)


def test_a_pending_checkpoint_is_handed_out_once() -> None:
    course = Course(SHARE)
    course.writes(10)
    assert course.schedule.take_whole() is None
    course.arrives()
    assert course.schedule.take_whole() is None
