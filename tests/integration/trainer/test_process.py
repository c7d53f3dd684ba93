"""The trainer as others run it: one process or two ranks by torchrun; killed, stopped, restarted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from spo.local.warm_parent import WarmProcess
from spo.manifest_folder import numbered_folders, open_folder
from spo.rpc.client import is_healthy
from spo.spec.job_spec import JobSpec
from spo.testing.peers import wait_until
from spo.testing.runs import toy_spec
from spo.testing.trainer import OneJob, TrajectoryPool, sampled_trajectories, served, write_random_llama
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.store import WeightStore
from tests.support.warm_services import start_warm

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 200.0
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1")


# The trainer with checkpoints that take as long as those of a large model.
SLOW_CHECKPOINTS = """
import os, sys, time
from services.trainer import loop
from services.trainer.__main__ import main
save = loop.save_checkpoint
def save_slowly(*arguments, **options):
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    return save(*arguments, **options)
loop.save_checkpoint = save_slowly
sys.exit(main())
"""

# The trainer that kills itself once at a point of storing version 2, which goes on beside its steps.
KILLED_WHILE_STORING = """
import os, signal, sys
from pathlib import Path
from services.trainer.__main__ import main
from spo.weights import store
point, mark = os.environ["POINT"], Path(os.environ["MARK"])
def at(here, version):
    if here == point and version == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
write, seal = store.WeightStore.write_files, store.seal_folder
def write_files(self, run_id, head, *rest):
    at("copied", head["version"])
    stored = write(self, run_id, head, *rest)
    at("sealed", head["version"])
    return stored
def seal_folder(writing, destination, head):
    at("written", head.get("version"))
    return seal(writing, destination, head)
store.WeightStore.write_files, store.seal_folder = write_files, seal_folder
sys.exit(main())
"""

METHODS = pytest.mark.parametrize("method", ["spo", "ppo"])
# Two models per rank, and two updates per batch.
PPO: dict[str, Any] = {
    "algorithm": {"losses": [{"objective": "ppo"}], "critic": {}},
    "rollout": {"temperature": 1.0, "top_p": 1.0},
    "replay": {"mix": [{"source": "online", "share": 1.0}]},
}
# Groups of any size: the pool draws single trajectories, so ranks get unequal shares.
GROUP_CENTRED: dict[str, Any] = {
    "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
    "replay": {"unit": "group", "mix": [{"source": "online", "share": 1.0}]},
}


def job_spec(model_path: Path, method: str = "spo", **trainer: Any) -> JobSpec:
    defaults = {"steps": 12, "batch_size": 8, "micro_batch_size": 3, "update_interval": 4, "checkpoint_interval": 4}
    document = {"model": {"path": str(model_path)}, "trainer": {**defaults, **trainer}}
    if method == "ppo":
        document |= PPO
        document["trainer"]["epochs"] = 2
    if method == "group_centred":
        document |= GROUP_CENTRED
        document["trainer"]["micro_batch_size"] = 4
    return toy_spec(document)


@dataclass
class Surroundings:
    """What a trainer process talks to, and how to start one."""

    job: OneJob
    pool: TrajectoryPool
    start: Callable[..., subprocess.Popen[bytes] | WarmProcess]

    def wait_finished(self) -> None:
        self.job.wait_until(lambda: bool(self.job.finished), LIMIT_SECONDS, "the run finishes")
        assert self.job.finished[-1].error_code == ""

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        files = WeightStore(self.job.state_path / "weights").open(self.job.run_id, version).files
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def surroundings(tiny_model_path: Path, trajectories: list[Any], tmp_path: Path) -> Iterator[Surroundings]:
    job = OneJob(job_spec(tiny_model_path), tmp_path)
    pool = TrajectoryPool(trajectories)  # type: ignore[abstract]
    processes: list[subprocess.Popen[bytes] | WarmProcess] = []
    with ExitStack() as stack:
        environment = {
            **os.environ,
            "SPO_ORCHESTRATOR_ADDRESS": stack.enter_context(served(job)),
            "SPO_REPLAY_BUFFER_ADDRESS": stack.enter_context(served(pool)),
            "SPO_STATE_PATH": str(tmp_path),
            "SPO_TRAINER_LEASE_WAIT_SECONDS": "0.5",
            "SPO_TRAINER_BATCH_WAIT_SECONDS": "0.5",
            "OMP_NUM_THREADS": "1",
        }

        def start(
            *launcher: str, program: tuple[str, ...] = ("-m", "services.trainer"), **extra: str
        ) -> subprocess.Popen[bytes] | WarmProcess:
            command = [*launcher, *program]
            process: subprocess.Popen[bytes] | WarmProcess
            if command == ["-m", "services.trainer"]:
                process = start_warm(command[-1], {**environment, **extra}, tmp_path / "trainer.log")
            else:
                process = subprocess.Popen([sys.executable, *command], env={**environment, **extra})
            processes.append(process)
            return process

        yield Surroundings(job, pool, start)
        for process in processes:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
                raise


@pytest.mark.parametrize("method", ["spo", "ppo", "group_centred", "shared_rows"])
@pytest.mark.timeout(600)
def test_two_ranks_at_zero_stage_2_learn_what_one_rank_learns(
    surroundings: Surroundings, tiny_model_path: Path, method: str, tmp_path: Path
) -> None:
    job, path = surroundings.job, tiny_model_path
    if method == "shared_rows":
        # With heads for both.
        path = tmp_path / "two_heads"
        write_random_llama(path, seed=0, width=64)
        surroundings.pool.trajectories = sampled_trajectories(path, 32)
    job.spec = job_spec(path, method, zero_stage=2, steps=6)
    single = surroundings.start()
    surroundings.wait_finished()
    single.terminate()
    single.wait(LIMIT_SECONDS)
    alone, losses = surroundings.weights(2), [job.metrics[step]["loss"] for step in range(1, 7)]
    norms = [job.metrics[step]["grad_norm"] for step in range(1, 7)]

    together = {"sequence_parallel": 2} if method == "shared_rows" else {}
    job.reset(job_spec(path, method, zero_stage=2, steps=6, **together), "job_two_ranks")
    surroundings.start(*TORCHRUN)
    surroundings.wait_finished()

    assert [job.metrics[step]["loss"] for step in range(1, 7)] == pytest.approx(losses, rel=1e-4)
    assert [job.metrics[step]["grad_norm"] for step in range(1, 7)] == pytest.approx(norms, rel=1e-4)
    ended = surroundings.weights(2)
    assert max(float((alone[name] - ended[name]).abs().max()) for name in alone) < 1e-4
    assert (Path(job.checkpoints[-1].path) / "rank-00001.safetensors").exists()


@METHODS
@pytest.mark.timeout(600)
def test_a_killed_trainer_is_followed_by_one_that_resumes_and_ends_with_the_same_weights(
    surroundings: Surroundings, tiny_model_path: Path, method: str
) -> None:
    job, pool = surroundings.job, surroundings.pool
    job.spec = job_spec(tiny_model_path, method)
    first = surroundings.start()

    def kill(step: int, batch: Any) -> None:
        if step == 10 and first.poll() is None:
            # A checkpoint is reported once its version is announced, which goes on beside the steps.
            job.wait_until(lambda: any(each.step == 8 for each in job.checkpoints), LIMIT_SECONDS, "checkpoint 8")
            first.kill()

    pool.spoil = kill
    assert first.wait(LIMIT_SECONDS) == -signal.SIGKILL
    # Whoever resumes from the checkpoint of step 8 takes only later steps again.
    assert set(range(1, 9)) <= job.metrics.keys()
    job.lapse()
    asked = len(pool.asked)
    second = surroundings.start()
    surroundings.wait_finished()
    interrupted = surroundings.weights(3)
    assert sorted(job.metrics) == list(range(1, 13))
    assert [(each.step, each.weight_version) for each in job.checkpoints] == [(4, 1), (8, 2), (12, 3)]

    job.reset(job.spec, "job_straight")
    surroundings.wait_finished()

    assert pool.asked[asked].step == 9
    assert [each.version for each in job.published] == [1, 2, 3]
    assert all(torch.equal(tensor, interrupted[name]) for name, tensor in surroundings.weights(3).items())
    assert second.poll() is None


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["copied", "written", "sealed"])
def test_a_trainer_that_is_killed_while_it_stores_a_version_loses_none_that_was_announced(
    surroundings: Surroundings, tiny_model_path: Path, tmp_path: Path, point: str
) -> None:
    job = surroundings.job
    program = ("-c", KILLED_WHILE_STORING)
    # Checkpoints at their interval alone, however slow the machine is.
    chosen = {"POINT": point, "MARK": str(tmp_path / "killed"), "SPO_TRAINER_CHECKPOINT_SHARE": "0"}
    killed = surroundings.start(program=program, **chosen)
    assert killed.wait(LIMIT_SECONDS) == -signal.SIGKILL
    assert [each.version for each in job.published] == [1]
    assert [each.step for each in job.checkpoints] == [4]
    job.lapse()
    surroundings.start()
    surroundings.wait_finished()
    interrupted = {version: surroundings.weights(version) for version in (1, 2, 3)}
    assert [(each.version, each.step) for each in job.published] == [(1, 4), (2, 8), (3, 12)]

    job.reset(job.spec, "job_straight")
    surroundings.wait_finished()

    for version, found in interrupted.items():
        assert all(torch.equal(tensor, found[name]) for name, tensor in surroundings.weights(version).items())


@pytest.mark.timeout(600)
def test_a_trainer_that_sleeps_past_its_lease_and_wakes_changes_nothing_of_its_successors(
    surroundings: Surroundings, tiny_model_path: Path
) -> None:
    job, pool = surroundings.job, surroundings.pool
    # A checkpoint and a version at every step: whatever the first does once it wakes, it writes.
    job.spec = job_spec(tiny_model_path, steps=12, checkpoint_interval=1, update_interval=1)
    first = surroundings.start()
    slept = threading.Event()

    def sleep_and_wake(step: int, batch: Any) -> None:
        if step == 6 and not slept.is_set():
            slept.set()
            first.send_signal(signal.SIGSTOP)
        elif step == 10 and job.epoch == 3:
            first.send_signal(signal.SIGCONT)
            job.wait_until(lambda: job.refused > 0, LIMIT_SECONDS, "the first hears that its lease is over")

    pool.spoil = sleep_and_wake
    assert slept.wait(LIMIT_SECONDS)
    job.lapse()
    surroundings.start()
    surroundings.wait_finished()

    recorded = {kept.step: kept for kept in job.recorded}
    folders = numbered_folders(Path(job.checkpoints[-1].path).parent)
    assert sorted(recorded) == [11, 12] == [step for step, _ in folders]
    assert all(open_folder(path).manifest_digest == recorded[step].manifest_digest for step, path in folders)
    store = WeightStore(job.state_path / "weights")
    published = {each.version: each.manifest_digest for each in job.published}
    assert all(store.open(job.run_id, version).manifest_digest == digest for version, digest in published.items())
    assert sorted(job.metrics) == list(range(1, 13))


@pytest.mark.timeout(600)
def test_a_trainer_that_sleeps_while_its_job_is_deleted_and_wakes_writes_no_folder_of_it_again(
    surroundings: Surroundings, tiny_model_path: Path
) -> None:
    job, pool = surroundings.job, surroundings.pool
    job.spec = job_spec(tiny_model_path, steps=12, checkpoint_interval=1, update_interval=1)
    job.lease_seconds = 0.5
    trainer = surroundings.start()
    slept = threading.Event()

    def sleep(step: int, batch: Any) -> None:
        if step == 6 and not slept.is_set():
            trainer.send_signal(signal.SIGSTOP)
            slept.set()

    pool.spoil = sleep
    assert slept.wait(LIMIT_SECONDS)
    job.lapse()
    # Nobody is leased a deleted job.
    job.finished.append(wire.FinishRunRequest())
    folders = [job.state_path / kind / job.run_id for kind in ("weights", "checkpoints")]
    for folder in folders:
        shutil.rmtree(folder)
    stopped_until = time.monotonic() + 3 * job.lease_seconds
    wait_until(lambda: time.monotonic() > stopped_until, "its lease is over", LIMIT_SECONDS)
    trainer.send_signal(signal.SIGCONT)
    job.wait_until(lambda: job.refused > 0, LIMIT_SECONDS, "it hears that its lease is over")
    trainer.terminate()
    assert trainer.wait(LIMIT_SECONDS) == 0

    assert not any(map(Path.exists, folders))


@pytest.mark.timeout(600)
def test_a_stopped_trainer_saves_its_last_step_and_exits_with_success(
    surroundings: Surroundings, free_port: int
) -> None:
    job, pool = surroundings.job, surroundings.pool
    process = surroundings.start(SPO_TRAINER_PORT=str(free_port))

    def stop(step: int, batch: Any) -> None:
        if step == 6:
            assert is_healthy(f"127.0.0.1:{free_port}", deadline_seconds=10)
            process.send_signal(signal.SIGTERM)
            job.wait_for_renewals(1)

    pool.spoil = stop

    assert process.wait(LIMIT_SECONDS) == 0
    last = job.checkpoints[-1].step
    assert last >= 6
    assert last == pool.asked[-1].step
    assert job.finished == []


@pytest.mark.timeout(600)
def test_a_pod_that_is_told_to_go_takes_the_whole_trainer_through_a_slow_checkpoint(
    surroundings: Surroundings, tiny_model_path: Path, tmp_path: Path, free_port: int
) -> None:
    # Two pods of one trainer; torchrun would kill ranks 30 s after SIGTERM by itself, and this takes 60.
    job = surroundings.job
    job.spec = job_spec(tiny_model_path, steps=1000, checkpoint_interval=1000)
    group = [
        *("-m", "torch.distributed.run", "--nproc-per-node=1", "--nnodes=2", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--local-addr=127.0.0.1"),
    ]
    program = tmp_path / "slow_checkpoints.py"
    program.write_text(SLOW_CHECKPOINTS)
    slow: dict[str, Any] = {
        "program": (str(program),),
        "SLOW_SECONDS": "60",
        "SPO_TRAINER_DRAIN_SECONDS": "120",
        "SPO_TRAINER_CHECKPOINT_SHARE": "0",
    }
    pods = [surroundings.start(*group, "--shutdown-timeout=135", **slow) for _ in range(2)]
    job.wait_until(lambda: 3 in job.metrics, LIMIT_SECONDS, "both pods have met and train")
    # Rank 0 may be in either: the one whose torchrun has no rank 0 is told to go.
    follower = next(pod for pod in pods if _rank_of(pod) != "0")
    follower.send_signal(signal.SIGTERM)

    follower.wait(LIMIT_SECONDS)
    job.wait_until(lambda: bool(job.checkpoints), 60, "the checkpoint is recorded")

    last = job.checkpoints[-1]
    assert last.step == max(job.metrics), "a step was learned and not kept"
    assert open_folder(Path(last.path)).manifest_digest == last.manifest_digest
    # The other pod did not end: its torchrun has its rank meet the next pod.
    leader = next(pod for pod in pods if pod is not follower)
    assert leader.poll() is None
    leader.kill()


def _rank_of(torchrun: subprocess.Popen[bytes]) -> str:
    (rank,) = (
        child.environ()["RANK"] for child in psutil.Process(torchrun.pid).children() if "RANK" in child.environ()
    )
    return rank
