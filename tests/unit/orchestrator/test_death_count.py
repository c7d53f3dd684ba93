"""Which deaths of a trainer count as one more in the same place."""

from __future__ import annotations

import pytest

from services.orchestrator.monitor import DeathCount, in_words
from spo.spec.job_spec import parse_job_spec
from spo.spec.plan import memory_advice, named_shape
from spo.v1.orchestrator_service_pb2 import TrainerDeath

GIGABYTE = 10**9


@pytest.mark.parametrize(
    ("step", "steps_done", "counts_as"),
    [
        (15, 0, 4),  # At once, again.
        (15, 4, 4),  # Steps since the checkpoint were taken again, and the same one kills again.
        (11, 0, 4),  # Earlier than the last time, and nothing was done.
        (16, 1, 1),  # One step further.
        (13, 2, 1),  # Killed elsewhere, with steps in between.
    ],
)
def test_a_death_counts_where_no_step_came_in_between(step: int, steps_done: int, counts_as: int) -> None:
    before = DeathCount(3, 15, 2)

    after = before.after(TrainerDeath(step=step, steps_done=steps_done), of_memory=True)

    assert (after.deaths, after.step) == (counts_as, step)
    assert after.out_of_memory == (3 if counts_as == 4 else 1)


def test_a_death_is_told_with_its_step_its_cause_and_what_helps() -> None:
    spec = parse_job_spec({"model": {"path": "/models/pi0"}})
    death = TrainerDeath(step=7, stage="train", cause="OutOfMemoryError: CUDA out of memory")

    said = in_words(death, memory_advice(spec, named_shape("llama-3-8b"), 8, 40 * GIGABYTE))

    assert said.startswith("the trainer died at step 7 (training): OutOfMemoryError: CUDA out of memory; by `spo plan`")
    assert "each of 8 ranks needs 5" in said
    assert "has 36.8 GB to use; it fits with trainer.zero_stage: 3" in said


def test_where_the_plan_is_content_less_is_asked_for_all_the_same() -> None:
    spec = parse_job_spec({"model": {"path": "/models/pi0"}})
    advice = memory_advice(spec, named_shape("qwen2.5-0.5b"), 1, 80 * GIGABYTE)

    assert advice.fits
    assert advice.changes
    assert "something else takes memory there too; less is needed with trainer." in advice.words


def test_a_trainer_that_is_killed_leaves_no_word() -> None:
    assert "killed (status -9 or 137)" in in_words(TrainerDeath(step=1, stage="load"), None)
