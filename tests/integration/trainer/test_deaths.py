"""What a trainer leaves behind when it dies in the middle of its work, and what its successor tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.lease import LEADER, WAITING, Attempt, death_before
from services.trainer.ranks import Ranks
from spo.v1 import orchestrator_service_pb2 as wire
from tests.integration.trainer.trainer_bench import Bench


def grant_of(bench: Bench, epoch: int) -> wire.LeaseJobResponse:
    return wire.LeaseJobResponse(
        run_id=bench.job.run_id,
        epoch=epoch,
        checkpoint_path=str(bench.job.state_path / "checkpoints" / bench.job.run_id),
        checkpoints=wire.RecordedCheckpoints(items=[wire.RecordedCheckpoint(step=4)]),
    )


def notes(bench: Bench) -> Path:
    return Path(grant_of(bench, 0).checkpoint_path)


def note_of(bench: Bench) -> Path:
    return notes(bench) / LEADER


def die(ranks: Ranks, bench: Bench, error: Exception | None) -> None:
    """Leave what a trainer leaves that dies at step 7, two steps after it resumed."""
    attempt = Attempt(ranks, grant_of(bench, 0), notes(bench))

    def work() -> None:
        with attempt.noted():
            attempt.begins("resume", 4)
            attempt.resumed(4)
            attempt.begins("train", 6)
            if error:
                raise error
            # Killed: nothing that follows happens.
            left = note_of(bench).read_bytes()
        note_of(bench).write_bytes(left)

    if error:
        with pytest.raises(type(error)):
            work()
    else:
        work()


@pytest.mark.parametrize(
    ("error", "cause", "out_of_memory"),
    [
        (MemoryError(), "MemoryError: without a message", True),
        (ValueError("shapes\nand more"), "ValueError: shapes", False),
        (None, "", False),
    ],
)
def test_the_next_trainer_tells_of_a_death_and_does_the_work(
    ranks: Ranks, bench: Bench, error: Exception | None, cause: str, out_of_memory: bool
) -> None:
    die(ranks, bench, error)

    assert bench.train_until_finished().error_code == ""

    (death,) = bench.job.deaths
    assert (death.epoch, death.stage, death.step, death.steps_done) == (0, "train", 7, 2)
    assert (death.cause, death.out_of_memory, death.ranks) == (cause, out_of_memory, 1)
    assert death.memory_bytes > 1 << 20
    assert not note_of(bench).exists()


def test_a_job_that_failed_of_it_is_left_alone(ranks: Ranks, bench: Bench) -> None:
    die(ranks, bench, MemoryError())
    bench.job.directive = wire.DIRECTIVE_CANCEL

    stop = bench.start()
    bench.job.wait_until(lambda: bool(bench.job.deaths), 30, "the death is told")
    stop.set()
    bench.threads[-1][0].join(30)

    assert bench.job.metrics == {}
    assert bench.pool.asked == []


def test_whoever_waits_or_is_stopped_dies_of_nothing(ranks: Ranks, bench: Bench) -> None:
    waits, stopped = (Attempt(ranks, grant_of(bench, 1), notes(bench)) for _ in range(2))
    waits.begins("train", 6)
    waits.begins(WAITING, 7)
    assert death_before(notes(bench), 2) is None

    stopped.begins("train", 6)
    assert death_before(notes(bench), 2) is not None
    stopped.stopped()
    stopped.begins("publish", 6)

    assert death_before(notes(bench), 2) is None
    assert not note_of(bench).exists()


def fail(attempt: Attempt, error: Exception) -> None:
    with attempt.noted():
        attempt.begins("train", 8)
        raise error


def test_a_rank_that_ran_out_of_memory_says_why_the_others_lost_it(ranks: Ranks, bench: Bench) -> None:
    two = Ranks(0, 2, ranks.device, ranks.control)
    second = Ranks(1, 2, ranks.device, ranks.control)
    for rank, error in ((two, RuntimeError("Connection closed by peer")), (second, MemoryError("1 GB"))):
        with pytest.raises(type(error)):
            fail(Attempt(rank, grant_of(bench, 3), notes(bench)), error)

    death = death_before(notes(bench), 4)

    assert death is not None
    assert (death.stage, death.step, death.cause, death.out_of_memory) == ("train", 9, "MemoryError: 1 GB", True)
    # Under its own lease a note is no death.
    assert death_before(notes(bench), 3) is None
