"""Checkpoints in a bucket: trainers that share no folder resume from one another, and from what is whole alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import obstore
import psutil
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.checkpoints import CheckpointBucket
from spo.errors import Conflict, IntegrityError, NotReady
from spo.local.warm_parent import WarmProcess
from spo.manifest_folder import entry_of
from spo.testing.trainer import OneJob, TrajectoryPool, served
from spo.weights.s3_backend import S3Backend
from spo.weights.store import CHECKPOINT_DIGITS, WeightStore, digest_of
from tests.integration.trainer.test_process import TORCHRUN
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, Bench, final_weights, job_spec
from tests.support.s3_server import S3Server
from tests.support.warm_services import start_warm

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")


@pytest.fixture
def url(s3_server: S3Server) -> str:
    """Of a bucket of the test; it is there when `s3_server.bucket` has made it."""
    return f"s3://states-{secrets.token_hex(8)}/checkpoints"


@pytest.fixture
def bucket(s3_server: S3Server, url: str) -> S3Backend:
    s3_server.bucket(url.split("/")[2])
    return S3Backend(url, CHECKPOINT_DIGITS)


def kept(bucket: S3Backend, run_id: str) -> dict[int, str]:
    """Manifest digests by step."""
    return {step: digest_of(bucket.manifest(run_id, step)) for step in bucket.versions(run_id)}


def test_a_trainer_on_another_machine_ends_with_the_weights_of_an_uninterrupted_one(
    bench: Bench, bucket: S3Backend, tiny_model_path: Path, tmp_path: Path
) -> None:
    bench.train_until_finished()
    straight = final_weights(bench)
    bench.job.reset(job_spec(tiny_model_path), "job_interrupted")
    bench.job.checkpoint_place = bucket.name

    bench.stop_at_step(7, state_path=tmp_path / "here")
    bench.job.lapse()
    asked = len(bench.pool.asked)
    bench.train_until_finished(state_path=tmp_path / "there")

    assert [request.step for request in bench.pool.asked[asked:]] == [8, 9, 10]
    resumed = final_weights(bench)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    recorded = {each.step: each.manifest_digest for each in bench.job.recorded}
    assert sorted(recorded) == [7, 10]
    assert kept(bucket, bench.job.run_id) == recorded
    assert bench.job.recorded[-1].path == f"{bucket.name}/{bench.job.run_id}/{10:010d}"
    # Of each machine's own folder only the newest is left, under the digest that names it.
    (part,) = (tmp_path / "there" / "checkpoints" / bench.job.run_id).rglob("*.safetensors")
    assert part.parent.name == f"{10:010d}"


def test_who_resumes_where_the_checkpoint_was_written_reads_it_from_the_disk(
    bench: Bench, bucket: S3Backend, s3_server: S3Server, tmp_path: Path
) -> None:
    bench.job.checkpoint_place = bucket.name
    bench.stop_at_step(7, state_path=tmp_path / "here")
    bench.job.lapse()
    bench.train_until_finished(state_path=tmp_path / "here")

    assert bench.job.finished[-1].error_code == ""
    assert s3_server.requests(f"GET /{bucket.name.split('/')[2]}/", ".safetensors") == 0


def test_a_damaged_object_is_passed_over_for_the_checkpoint_before(
    bench: Bench, bucket: S3Backend, tmp_path: Path
) -> None:
    bench.job.checkpoint_place = bucket.name
    bench.stop_at_step(7, state_path=tmp_path / "here")
    bench.job.lapse()
    (entry,) = bucket.manifest(bench.job.run_id, 7)["files"]
    store = obstore.store.from_url(bucket.name, client_options={"allow_http": True})
    path = f"{bench.job.run_id}/{7:010d}/{entry['blake3'][:16]}-{entry['name']}"
    content = bytes(obstore.get(store, path).bytes())
    obstore.put(store, path, bytes([*content[:-1], content[-1] ^ 1]))
    asked = len(bench.pool.asked)

    finish = bench.train_until_finished(state_path=tmp_path / "there")

    assert finish.error_code == ""
    assert bench.pool.asked[asked].step == 6


def test_training_goes_on_without_the_bucket_and_reports_nothing_that_is_not_there(
    bench: Bench, s3_server: S3Server, url: str, tmp_path: Path
) -> None:
    def make_the_bucket(step: int, batch: Any) -> None:
        if step == 8:
            assert bench.job.checkpoints == []
            s3_server.bucket(url.split("/")[2])

    bench.job.checkpoint_place = url
    bench.pool.spoil = make_the_bucket

    finish = bench.train_until_finished(state_path=tmp_path / "here")

    assert finish.error_code == ""
    recorded = {each.step: each.manifest_digest for each in bench.job.recorded}
    assert max(recorded) == 10
    assert kept(S3Backend(url, CHECKPOINT_DIGITS), bench.job.run_id) == recorded


def test_only_a_newer_lease_replaces_a_checkpoint_and_prunes_it(bucket: S3Backend, tmp_path: Path) -> None:
    part = tmp_path / "rank-00000.safetensors"
    part.write_bytes(b"state")
    for step, epoch in ((1, 1), (2, 2), (3, 1)):
        bucket.put_file("job_a", step, entry_of(part), part)
        bucket.put_manifest("job_a", step, {"step": step, "epoch": epoch, "files": [entry_of(part)]})
    checkpoints = CheckpointBucket(f"{bucket.name}/job_a", tmp_path / "cache")

    with pytest.raises(Conflict):
        bucket.put_manifest("job_a", 2, {"step": 2, "epoch": 1, "files": []})
    checkpoints.prune([3], epoch=1)

    assert bucket.versions("job_a") == [2, 3]
    assert checkpoints.manifest(3, "")["epoch"] == 1
    with pytest.raises(IntegrityError, match="not the checkpoint that was reported"):
        checkpoints.manifest(3, "another digest")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_killed_on_one_machine_is_followed_on_another_bit_for_bit(
    bucket: S3Backend, tiny_model_path: Path, trajectories: list[Any], tmp_path: Path
) -> None:
    """Two processes with nothing in common but the bucket, the orchestrator and the replay buffer."""
    job = OneJob(job_spec(tiny_model_path, steps=12, update_interval=4, checkpoint_interval=4), tmp_path / "nowhere")
    job.checkpoint_place, job.weight_place = bucket.name, f"{bucket.name}-weights"
    pool = TrajectoryPool(trajectories)  # type: ignore[abstract]
    with ExitStack() as stack:
        common = {
            **os.environ,
            "SPO_ORCHESTRATOR_ADDRESS": stack.enter_context(served(job)),
            "SPO_REPLAY_BUFFER_ADDRESS": stack.enter_context(served(pool)),
            "SPO_TRAINER_LEASE_WAIT_SECONDS": "0.5",
            "SPO_TRAINER_BATCH_WAIT_SECONDS": "0.5",
            "OMP_NUM_THREADS": "1",
        }

        def start(machine: str) -> WarmProcess:
            own = {
                "SPO_STATE_PATH": str(tmp_path / machine),
                "SPO_WEIGHT_CACHE_PATH": str(tmp_path / machine / "cache"),
            }
            process = start_warm("services.trainer", common | own, tmp_path / f"{machine}.log")
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return process

        first = start("here")

        def kill(step: int, batch: Any) -> None:
            if step < 10 or first.poll() is not None:
                return
            if not any(each.step == 8 for each in job.recorded):
                # It is reported once it has arrived, which training does not wait for.
                raise NotReady("the checkpoint of step 8 is on its way")
            first.kill()

        pool.spoil = kill
        assert first.wait(4 * LIMIT_SECONDS) == -signal.SIGKILL
        job.lapse()
        asked = len(pool.asked)
        start("there")
        job.wait_until(lambda: bool(job.finished), 4 * LIMIT_SECONDS, "the run finishes on the other machine")
        interrupted = _weights(job)
        assert job.finished[-1].error_code == ""
        assert pool.asked[asked].step == 9
        assert sorted(job.metrics) == list(range(1, 13))

        job.reset(job.spec, "job_straight")
        job.wait_until(lambda: bool(job.finished), 4 * LIMIT_SECONDS, "the run finishes in one go")
        straight = _weights(job)

    assert all(torch.equal(straight[name], interrupted[name]) for name in straight)
    assert not (tmp_path / "nowhere").exists()


# The trainer, whose second rank never ends the upload of step 8.
CUT_UPLOAD = """
import sys, time
from services.trainer.__main__ import main
from spo.weights.s3_backend import S3Backend
put = S3Backend.put_file
def put_file(self, run_id, version, entry, source):
    if version == 8 and entry["name"] == "rank-00001.safetensors":
        time.sleep(3600)
    put(self, run_id, version, entry, source)
S3Backend.put_file = put_file
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_killed_amid_an_upload_are_followed_from_the_checkpoint_that_is_whole(
    bucket: S3Backend, tiny_model_path: Path, trajectories: list[Any], tmp_path: Path
) -> None:
    job = OneJob(job_spec(tiny_model_path, steps=12, update_interval=4, checkpoint_interval=4), tmp_path / "nowhere")
    job.checkpoint_place, job.weight_place = bucket.name, f"{bucket.name}-weights"
    pool = TrajectoryPool(trajectories)  # type: ignore[abstract]
    program = tmp_path / "cut_upload.py"
    program.write_text(CUT_UPLOAD)
    store = obstore.store.from_url(bucket.name, client_options={"allow_http": True})

    def of_step_8() -> list[str]:
        found = (entry["path"] for page in obstore.list(store, prefix=f"{job.run_id}/{8:010d}/") for entry in page)
        return sorted(path.rsplit("-", 1)[-1].rsplit("/", 1)[-1] for path in found)

    with ExitStack() as stack:
        common = {
            **os.environ,
            "SPO_ORCHESTRATOR_ADDRESS": stack.enter_context(served(job)),
            "SPO_REPLAY_BUFFER_ADDRESS": stack.enter_context(served(pool)),
            "SPO_TRAINER_LEASE_WAIT_SECONDS": "0.5",
            "SPO_TRAINER_BATCH_WAIT_SECONDS": "0.5",
            # At the spec's steps alone: on a busy machine the first step would have a checkpoint of its own.
            "SPO_TRAINER_CHECKPOINT_SHARE": "0",
            "OMP_NUM_THREADS": "1",
        }

        def start(machine: str, *trainer: str) -> subprocess.Popen[bytes]:
            own = {
                "SPO_STATE_PATH": str(tmp_path / machine),
                "SPO_WEIGHT_CACHE_PATH": str(tmp_path / machine / "cache"),
            }
            process = subprocess.Popen([sys.executable, *TORCHRUN, *trainer], env=common | own)
            stack.callback(_kill, process)
            return process

        first = start("here", str(program))

        def kill(step: int, batch: Any) -> None:
            if step < 10 or first.poll() is not None:
                return
            if of_step_8() != ["00000.safetensors"]:
                raise NotReady("the first rank's part of step 8 is on its way")
            _kill(first)

        pool.spoil = kill
        first.wait(4 * LIMIT_SECONDS)
        assert of_step_8() == ["00000.safetensors"]
        assert [each.step for each in job.recorded] == [4]
        job.lapse()
        asked = len(pool.asked)
        start("there", "-m", "services.trainer")
        job.wait_until(lambda: bool(job.finished), 4 * LIMIT_SECONDS, "the run finishes on the other machine")

    assert job.finished[-1].error_code == ""
    assert pool.asked[asked].step == 5
    assert sorted(job.metrics) == list(range(1, 13))
    recorded = {each.step: each.manifest_digest for each in job.recorded}
    assert kept(bucket, job.run_id) == recorded
    assert max(recorded) == 12
    assert len(bucket.manifest(job.run_id, 12)["files"]) == 2


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        group = psutil.Process(process.pid)
        for each in [group, *group.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(60)


def _weights(job: OneJob) -> dict[str, torch.Tensor]:
    store = WeightStore(job.weight_place, cache_path=str(job.state_path.parent / "reader"))
    files = store.open(job.run_id, store.versions(job.run_id)[-1]).files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
