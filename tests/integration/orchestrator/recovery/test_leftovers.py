"""What is written of a job after its deletion is found and removed; what belongs to anybody stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis
from ulid import ULID

from services.orchestrator import deletion, redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.deletion import LEFTOVER_SECONDS, Leftovers
from spo import redis_keys


class Hours:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hours:
    return Hours()


@pytest.fixture
def sweep(context: AppContext, clock: Hours) -> Callable[[float], list[str]]:
    """Look once, then again so many seconds later, and delete what was found."""
    context.watch.look()
    found = Leftovers(context.jobs, context.files, context.watch, clock)

    def later(seconds: float) -> list[str]:
        first = found.look()
        clock.now += seconds
        second = found.look()
        context.deletion.sweep()
        return [*first, *second]

    return later


def _folders(context: AppContext, job_id: str) -> list[Path]:
    return [context.settings.state_path / kind / job_id for kind in ("weights", "checkpoints", "events")]


def write_key(context: AppContext, client: redis.Redis, job_id: str) -> None:
    client.hset(redis_keys.value_progress(job_id, "prompt-0"), "value-0", "1:1")


def write_many_keys(context: AppContext, client: redis.Redis, job_id: str) -> None:
    client.mset({redis_keys.replay_batch(job_id, step): b"x" for step in range(3000)})


def write_into(number: int) -> Callable[[AppContext, redis.Redis, str], None]:
    def write(context: AppContext, client: redis.Redis, job_id: str) -> None:
        folder = _folders(context, job_id)[number] / "0000000001"
        folder.mkdir(parents=True)
        (folder / "rank-0.safetensors").write_bytes(b"x")

    return write


KINDS = {
    "a key": write_key,
    "many keys": write_many_keys,
    "weights": write_into(0),
    "a checkpoint": write_into(1),
    "events": write_into(2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_of_a_job_that_is_not_there_goes_after_a_while_and_not_before(
    context: AppContext, redis_client: redis.Redis, sweep: Callable[[float], list[str]], kind: str
) -> None:
    job_id = f"job_{ULID()}"
    KINDS[kind](context, redis_client, job_id)

    def is_left() -> bool:
        return bool(redis_client.keys(f"spo:{job_id}:*")) or any(map(Path.exists, _folders(context, job_id)))

    assert sweep(LEFTOVER_SECONDS / 2) == []
    assert is_left()
    assert set(sweep(LEFTOVER_SECONDS)) == {job_id}
    assert not is_left()
    assert redis_client.scard(own_keys.deleted_jobs()) == 0


def of_a_job(context: AppContext, api: httpx.Client, document: dict[str, object]) -> str:
    return str(api.post("/v1/jobs", json=document).json()["id"])


def of_a_lost_job(context: AppContext, api: httpx.Client, document: dict[str, object]) -> str:
    job_id = of_a_job(context, api, document)
    context.redis.delete(redis_keys.run_state(job_id), redis_keys.job_record(job_id), redis_keys.run_spec(job_id))
    return job_id


def of_a_fork_that_is_made(context: AppContext, api: httpx.Client, document: dict[str, object]) -> str:
    job_id = f"job_{ULID()}"
    context.redis.sadd(own_keys.forks_under_way(), job_id)
    return job_id


def of_an_older_platform(context: AppContext, api: httpx.Client, document: dict[str, object]) -> str:
    return f"job_{ULID.from_timestamp(1_600_000_000.0)}"


def of_somebody_else(context: AppContext, api: httpx.Client, document: dict[str, object]) -> str:
    return "my-own-folder"


def while_a_loss_is_told(context: AppContext, api: httpx.Client, document: dict[str, object]) -> str:
    context.watch.identity.tell("redis_emptied")
    return f"job_{ULID()}"


@pytest.mark.parametrize(
    "owner",
    [of_a_job, of_a_lost_job, of_a_fork_that_is_made, of_an_older_platform, of_somebody_else, while_a_loss_is_told],
)
def test_files_that_belong_to_somebody_stay(
    context: AppContext,
    api: httpx.Client,
    document: dict[str, object],
    sweep: Callable[[float], list[str]],
    owner: Callable[..., str],
) -> None:
    job_id = owner(context, api, document)
    for folder in _folders(context, job_id):
        (folder / "00000001").mkdir(parents=True)

    assert sweep(10 * LEFTOVER_SECONDS) == []
    assert all(map(Path.is_dir, _folders(context, job_id)))


def test_many_keys_are_looked_at_some_at_a_time(
    context: AppContext, redis_client: redis.Redis, clock: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "KEYS_PER_READ", 10)
    monkeypatch.setattr(deletion, "READS_PER_ROUND", 3)
    context.watch.look()
    jobs = [f"job_{ULID()}" for _ in range(50)]
    for job_id in jobs:
        redis_client.set(redis_keys.replay_batch(job_id, 1), b"x")
    sweep, rounds = Leftovers(context.jobs, context.files, context.watch, clock), 0
    found: list[str] = []
    while len(found) < len(jobs):
        clock.now += LEFTOVER_SECONDS / 4
        found += sweep.look()
        rounds += 1
        assert rounds < 200
    assert sorted(found) == sorted(jobs)
    assert rounds > 4
    assert redis_client.keys("spo:job_*:replay*") == []
