"""Services of one release on what another one wrote, and back, in the middle of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import recorded_checkpoints
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import InvalidInput
from spo.service.process import require_schema
from spo.spec.job_spec import parse_job_spec
from spo.testing.runs import RUN
from tests.support.releases import ROOT, earlier_release

PART = Path(__file__).parent / "part_of_a_run.py"
STEPS = (10, 20, 30)


def work(release: Path, url: str, first: int, last: int, *flags: str) -> dict[int, list[str]]:
    """Let a release do its part; the ids of each step's batch."""
    command = [sys.executable, str(PART), url, str(first), str(last), *flags]
    environment = os.environ | {"PYTHONPATH": str(release)}
    ran = subprocess.run(
        command, cwd=release, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # Logs are printed too.
    lines = [line.split() for line in ran.stdout.splitlines() if line[:1].isdigit() and "traj_" in line]
    return {int(step): ids for step, *ids in lines}


def check_run(client: redis.Redis, batches: dict[int, list[str]]) -> None:
    """Nothing is lost or doubled, whichever release wrote it, and the job's history has no gap."""
    sampler = BatchSampler(ReplayStore(client))
    steps = range(1, STEPS[-1] + 1)
    assert {step: sampler.store.batch(RUN, step) for step in steps} == batches
    ledger = [raw.decode() for raw in client.zrange(redis_keys.replay_ids(RUN), 0, -1)]
    assert len(ledger) == len(set(ledger)) == 8 * STEPS[-1]
    jobs = JobStore(client)
    job_id = client.zrange(redis_keys.job_index(), 0, -1)[0].decode()
    assert jobs.refold(job_id) == "running"
    assert [event.seq for event in jobs.events(job_id)] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return earlier_release(tmp_path_factory.mktemp("release") / "earlier")


def test_a_run_goes_on_under_a_release_that_adds_fields_and_back(redis_server: str, redis_client: redis.Redis) -> None:
    first, second, third = STEPS
    batches = work(ROOT, redis_server, 1, first)
    batches |= work(ROOT, redis_server, first + 1, second, "later")
    batches |= work(ROOT, redis_server, second + 1, third)

    check_run(redis_client, batches)
    job_id = redis_client.zrange(redis_keys.job_index(), 0, -1)[0].decode()
    # What this release does not know is still there for the one that does.
    assert b"of_a_later_release" in JobStore(redis_client).spec_document(job_id)
    assert redis_client.hexists(redis_keys.job_record(job_id), "of_a_later_release")
    assert [record.step for record in recorded_checkpoints(redis_client, job_id)] == [1]
    require_schema(redis_client, "here")


def test_a_run_of_the_earlier_release_goes_on_under_this_one_and_back(
    redis_server: str, redis_client: redis.Redis, earlier: Path
) -> None:
    first, second, third = STEPS
    batches = work(earlier, redis_server, 1, first)
    batches |= work(ROOT, redis_server, first + 1, second)
    batches |= work(earlier, redis_server, second + 1, third)

    check_run(redis_client, batches)


def test_the_earlier_release_refused_what_a_later_one_added(
    redis_server: str, redis_client: redis.Redis, earlier: Path
) -> None:
    """Why compatibility begins with this release: the one before read stored specs as strictly as submitted ones."""
    work(ROOT, redis_server, 1, 1, "later")

    with pytest.raises(AssertionError, match="invalid_job_spec"):
        work(earlier, redis_server, 2, 2)


def test_nobody_may_submit_what_is_only_read_leniently() -> None:
    with pytest.raises(InvalidInput):
        parse_job_spec({"model": {"path": "/pi0"}, "of_a_later_release": 1})
