"""Where a trainer resumes: at what owners of the job reported, intact, and nowhere else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spo.manifest_folder import numbered_folders, open_folder, seal_folder, staging_folder
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, STAGES, Bench, final_weights, job_spec

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_ends_with_the_same_weights_as_an_uninterrupted_one(
    bench: Bench, tiny_model_path: Path, stage: int
) -> None:
    bench.job.spec = job_spec(tiny_model_path, zero_stage=stage)
    bench.train_until_finished()
    straight = final_weights(bench)

    bench.job.reset(job_spec(tiny_model_path, zero_stage=stage), "job_interrupted")
    bench.stop_at_step(7)
    bench.job.lapse()
    asked = len(bench.pool.asked)
    bench.train_until_finished()

    assert [request.step for request in bench.pool.asked[asked:]] == [8, 9, 10]
    assert [each.version for each in bench.job.published] == [1, 2]
    resumed = final_weights(bench)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def saved(bench: Bench) -> dict[int, int]:
    """The epoch of each checkpoint folder, by step."""
    root = bench.job.state_path / "checkpoints" / bench.job.run_id
    return {step: int(open_folder(path).manifest["epoch"]) for step, path in numbered_folders(root)}


def leave_stale_checkpoints(bench: Bench, *steps: int) -> None:
    """What a trainer that lost its lease writes before it hears of it: whole folders of other states, unreported."""
    root = bench.job.state_path / "checkpoints" / bench.job.run_id
    _, newest = numbered_folders(root)[-1]
    manifest = open_folder(newest).manifest
    head = {name: value for name, value in manifest.items() if name != "files"}
    for step in steps:
        destination = root / f"{step:010d}"
        with staging_folder(destination) as writing:
            for file in open_folder(newest).files:
                save_file({name: each + 1 for name, each in load_file(file).items()}, writing / file.name)
            seal_folder(writing, destination, head | {"step": step, "updates": step})


def test_what_a_stale_trainer_saved_is_neither_resumed_from_nor_pruned_for(bench: Bench, tiny_model_path: Path) -> None:
    bench.train_until_finished()
    straight = final_weights(bench)
    bench.job.reset(job_spec(tiny_model_path), "job_interrupted")
    bench.stop_at_step(7)
    leave_stale_checkpoints(bench, 8, 9)
    bench.job.lapse()
    asked = len(bench.pool.asked)

    bench.train_until_finished()

    assert bench.pool.asked[asked].step == 8
    resumed = final_weights(bench)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    # Those that the owners reported, the newest two.
    assert saved(bench) == {7: 2, 10: 4}


def test_a_stale_folder_in_the_place_of_a_reported_checkpoint_is_passed_over(bench: Bench) -> None:
    bench.stop_at_step(7)
    root = bench.job.state_path / "checkpoints" / bench.job.run_id
    shutil.rmtree(root / f"{7:010d}")
    leave_stale_checkpoints(bench, 7)
    bench.job.lapse()
    asked = len(bench.pool.asked)

    bench.train_until_finished()

    assert bench.pool.asked[asked].step == 6


def test_a_trainer_that_lost_its_lease_prunes_nothing(bench: Bench) -> None:
    def lose_the_lease(step: int, batch: Any) -> None:
        if step == 7 and bench.job.epoch == 1:
            bench.job.lapse()
            bench.pool.ready = False

    bench.job.spec = bench.job.spec.model_copy(
        update={"trainer": bench.job.spec.trainer.model_copy(update={"checkpoint_interval": 1, "update_interval": 1})}
    )
    bench.pool.spoil = lose_the_lease
    bench.start()
    bench.job.wait_until(lambda: bench.job.refused > 0, LIMIT_SECONDS, "the stale trainer is refused")

    assert {5, 6} <= saved(bench).keys()
    bench.pool.spoil = lambda step, batch: None
    bench.pool.ready = True
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes under the new lease")
    assert saved(bench) == {9: 3, 10: 3}


def test_a_resumed_trainer_does_not_save_again_what_it_loaded_and_notes_the_version_of_its_own_weights(
    bench: Bench, tiny_model_path: Path
) -> None:
    def lose_the_lease(step: int, batch: Any) -> None:
        if step == 10:
            bench.job.wait_until(lambda: len(bench.job.published) == 3, LIMIT_SECONDS, "version 3, beside the steps")
            bench.job.lapse()
            bench.pool.ready = False

    bench.job.spec = job_spec(tiny_model_path, update_interval=3, checkpoint_interval=6)
    bench.pool.spoil = lose_the_lease
    stop = bench.start()
    bench.job.wait_until(lambda: bench.job.epoch == 3, LIMIT_SECONDS, "it leases the job again")
    bench.job.wait_for_renewals(1)
    stop.set()
    bench.pool.ready = True
    bench.job.lapse()
    bench.stop_at_step(7)
    bench.job.lapse()
    bench.train_until_finished()

    assert [(each.version, each.step) for each in bench.job.published] == [(1, 3), (2, 6), (3, 9), (4, 9), (5, 10)]
    # At step 7 the weights' own line was at version 2; version 3 is of what was trained before and is taken again.
    assert [(each.step, each.weight_version) for each in bench.job.checkpoints] == [(6, 2), (7, 2), (10, 5)]


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    bench: Bench, tiny_model_path: Path, damage: str
) -> None:
    bench.stop_at_step(7)
    newest = Path(bench.job.checkpoints[-1].path)
    part = newest / "rank-00000.safetensors"
    content = part.read_bytes()
    match damage:
        case "flipped bit":
            part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "truncated":
            part.write_bytes(content[:-1])
        case "no manifest":
            (newest / "manifest.json").unlink()
    bench.job.lapse()
    asked = len(bench.pool.asked)

    finish = bench.train_until_finished()

    assert (newest.name, finish.error_code) == ("0000000007", "")
    assert bench.pool.asked[asked].step == 6


def test_a_checkpoint_of_another_zero_stage_is_refused_with_a_reason(bench: Bench, tiny_model_path: Path) -> None:
    bench.stop_at_step(6)
    bench.job.lapse()
    bench.job.spec = job_spec(tiny_model_path, zero_stage=2)

    finish = bench.train_until_finished()

    assert finish.error_code == "checkpoint_layout"
    assert "was written at ZeRO stage 1" in finish.error_message


@pytest.mark.parametrize("damage", ["flipped bit", "gone"])
def test_the_last_weights_that_were_damaged_are_published_again_from_the_checkpoint(bench: Bench, damage: str) -> None:
    bench.train_until_finished()
    # Copies: the tensors are read from the very file that is damaged.
    whole = {name: tensor.clone() for name, tensor in final_weights(bench).items()}
    folder = bench.job.state_path / "weights" / bench.job.run_id / f"{bench.job.published[-1].version:08d}"
    part = next(folder.glob("*.safetensors"))
    if damage == "gone":
        part.unlink()
    else:
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    asked = len(bench.pool.asked)

    bench.job.finished.clear()
    bench.job.lapse()
    bench.train_until_finished()

    assert len(bench.pool.asked) == asked, "it trains no step"
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10), (3, 10)]
    again = final_weights(bench)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
