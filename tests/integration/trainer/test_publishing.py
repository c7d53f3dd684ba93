"""A version is copied, and stored behind the steps: it holds the step that was copied, and none is lost or doubled."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.batches import CollapseMonitor
from services.trainer.deepspeed_engine import MOST_OF_MEMORY, WeightCopy
from spo.manifest_folder import Manifest
from spo.spec.job_spec import CollapseGuardSpec
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.store import StoredVersion, WeightStore
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, Bench, job_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

SPEC = {"steps": 15, "update_interval": 5, "checkpoint_interval": 5}


def tensors_of(bench: Bench, version: int) -> dict[str, torch.Tensor]:
    files = WeightStore(bench.job.state_path / "weights").open(bench.job.run_id, version).files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def straight(bench: Bench, tiny_model_path: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The weights of a run that nothing disturbs, by version; the bench offers the same job once more."""
    bench.job.reset(job_spec(tiny_model_path, **SPEC), "job_straight")
    bench.train_until_finished()
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10), (3, 15)]
    found = {version: tensors_of(bench, version) for version in (1, 2, 3)}
    bench.job.reset(job_spec(tiny_model_path, **SPEC), "job_behind")
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_steps_go_on_while_a_version_is_stored_which_is_of_the_step_that_was_copied(
    bench: Bench, straight: dict[int, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_store = WeightStore.write_files, threading.Event()

    def held(store: WeightStore, run_id: str, head: Manifest, *rest: Any) -> StoredVersion:
        assert head["version"] != 2 or may_store.wait(LIMIT_SECONDS)
        return write(store, run_id, head, *rest)

    monkeypatch.setattr(WeightStore, "write_files", held)
    stop = bench.start()
    bench.job.wait_until(lambda: 14 in bench.job.metrics, LIMIT_SECONDS, "step 14 while version 2 is not stored")
    announced = [each.version for each in bench.job.published]
    reported = [each.step for each in bench.job.checkpoints]
    asked = {request.step: request.policy_version for request in bench.pool.asked}
    may_store.set()
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes")
    stop.set()

    assert announced == [1]
    # Whoever resumes from a checkpoint finds the version that it names.
    assert reported == [5]
    assert asked[14] == 1
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10), (3, 15)]
    assert [each.step for each in bench.job.checkpoints][-1] == 15
    assert all(same(straight[version], tensors_of(bench, version)) for version in (1, 2, 3))


def test_a_version_that_could_not_be_stored_behind_the_steps_is_published_again_under_its_number(
    bench: Bench, straight: dict[int, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failed = WeightStore.write_files, list[int]()

    def full(store: WeightStore, run_id: str, head: Manifest, write_into: Callable[[Path], None], size: int) -> Any:
        def fill(folder: Path) -> None:
            write_into(folder)
            if head["version"] == 2 and not failed:
                failed.append(head["step"])
                raise OSError(errno.ENOSPC, "No space left on device")

        return write(store, run_id, head, fill, size)

    monkeypatch.setattr(WeightStore, "write_files", full)
    bench.train_until_finished()

    assert failed == [10]
    assert bench.job.finished[-1].error_code == ""
    # The place is left alone for a few seconds; meanwhile the steps went on to the end.
    published = [(each.version, each.step) for each in bench.job.published]
    assert [version for version, _ in published] == list(range(1, len(published) + 1))
    assert published[0] == (1, 5)
    assert published[-1][1] == 15
    assert sorted(bench.job.metrics) == list(range(1, 16))
    assert WeightStore(bench.job.state_path / "weights").versions("job_behind") == [version for version, _ in published]
    assert same(straight[3], tensors_of(bench, published[-1][0]))
    assert bench.contexts[-1].problem == ""


def test_a_version_that_was_copied_before_an_alarm_is_not_announced_after_it(
    bench: Bench, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.job.reset(job_spec(tiny_model_path, **SPEC), "job_alarmed")
    bench.job.spec = bench.job.spec.model_copy(update={"collapse_guard": CollapseGuardSpec(policy="pause")})
    write, may_store = WeightStore.write_files, threading.Event()

    def held(store: WeightStore, run_id: str, head: Manifest, *rest: Any) -> StoredVersion:
        assert head["step"] != 10 or may_store.wait(LIMIT_SECONDS)
        return write(store, run_id, head, *rest)

    def alarmed(monitor: CollapseMonitor, step: int, measured: Any) -> dict[str, str]:
        if step != 12:
            return {}
        bench.job.directive = wire.DIRECTIVE_PAUSE
        return {"reward": "fell"}

    monkeypatch.setattr(WeightStore, "write_files", held)
    monkeypatch.setattr(CollapseMonitor, "check", alarmed)
    stop = bench.start()
    bench.job.wait_until(lambda: 12 in bench.job.alarms, LIMIT_SECONDS, "the alarm is reported")
    may_store.set()
    # Reported once what was being stored is over.
    bench.job.wait_until(lambda: any(each.step == 12 for each in bench.job.checkpoints), LIMIT_SECONDS, "it is saved")
    announced = [each.version for each in bench.job.published]
    stored = WeightStore(bench.job.state_path / "weights").versions("job_alarmed")
    bench.job.directive = wire.DIRECTIVE_CONTINUE
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes once it is resumed")
    stop.set()

    assert announced == stored == [1]
    # What is trained once a person has resumed it is published under the number that is free.
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 12), (3, 15)]


def test_without_room_for_a_copy_a_step_waits_for_its_version(
    bench: Bench, straight: dict[int, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.deepspeed_engine.MOST_OF_MEMORY", MOST_OF_MEMORY * 1e-12)
    monkeypatch.setattr(WeightCopy, "take", lambda copy: pytest.fail("there is no room for a copy"))
    bench.train_until_finished()

    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10), (3, 15)]
    assert all(same(straight[version], tensors_of(bench, version)) for version in (1, 2, 3))
