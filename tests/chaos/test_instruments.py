"""The campaign's instruments do what they say: a fault that is none would prove nothing."""

from __future__ import annotations

import errno
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agents import AgentSession, AgentSessions
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from tests.chaos.clocks import Clocks
from tests.chaos.disks import Disk, StorageFaults
from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.faults.schedule import Schedule
from tests.chaos.invariants import missing_episodes
from tests.chaos.network import Conditions, Network
from tests.chaos.recovery import Recovery
from tests.conftest import require

SHOW_CLOCKS = "import json, time; print(json.dumps([time.time(), time.monotonic()]), flush=True)"


def test_a_preloaded_clock_steps_while_monotonic_time_goes_on(tmp_path: Path) -> None:
    require("cc")
    clocks = Clocks(tmp_path / "clocks")
    assert clocks.works
    environment = clocks.environment("trainer")
    for step in (3600.5, -86400.25, 0):
        clocks.set("trainer", step)
        shown = subprocess.run([sys.executable, "-c", SHOW_CLOCKS], env=environment, capture_output=True, check=True)
        wall, monotonic = json.loads(shown.stdout)
        assert wall == pytest.approx(time.time() + step, abs=30)
        assert monotonic == pytest.approx(time.monotonic(), abs=30)


def test_the_way_to_a_server_is_slow_then_cut_then_as_before(redis_server: str) -> None:
    with Network(["redis"]) as network:
        network.lead("redis", redis_server.removeprefix("redis://").removesuffix("/0"))
        with redis.Redis.from_url(f"redis://{network.address('redis')}/0", socket_timeout=20) as client:
            assert client.ping()
            network.set("redis", Conditions(delay_seconds=0.2))
            began = time.monotonic()
            assert client.ping()
            # There and back.
            assert time.monotonic() - began >= 0.4
            network.set("redis", Conditions(is_cut=True))
            with pytest.raises(redis.ConnectionError):
                client.ping()
            network.set("redis", Conditions())
            assert client.ping()


def test_a_full_disk_takes_nothing_until_it_is_emptied(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk", 4 << 20)
    try:
        if not disk.is_small:
            pytest.skip("this process may mount nothing")
        disk.fill()
        with pytest.raises(OSError, match="No space") as refused:
            (disk.folder / "more").write_bytes(bytes(1 << 16))
        assert refused.value.errno == errno.ENOSPC
        disk.empty()
        assert (disk.folder / "more").write_bytes(bytes(1 << 16)) == 1 << 16
    finally:
        disk.unmount()


def _faults(*kinds: str, impossible: frozenset[str] = frozenset()) -> list[Fault]:
    def fault(kind: str) -> Fault:
        def inflict(stage: Stage, random: Random) -> Inflicted | None:
            return None if kind in impossible else Inflicted(f"{kind} {random.random()}")

        return Fault(kind, inflict)

    return [fault(kind) for kind in kinds]


def _first(schedule: Schedule, count: int) -> list[str]:
    stage = Stage(None)  # type: ignore[arg-type]
    begun = (schedule.inflict(stage) for _ in itertools.count())
    return [inflicted.what for found in itertools.islice(begun, count) if found for _, inflicted in [found]]


def test_a_seed_is_a_schedule_and_another_seed_another_one() -> None:
    kinds = ("kill", "stop", "fill", "cut")
    one, again, other = (_first(Schedule(seed, _faults(*kinds)), 12) for seed in (1, 1, 2))
    assert one == again != other
    assert {what.split()[0] for what in one[:4]} == set(kinds)


def test_a_fault_that_is_not_possible_yet_keeps_nobody_waiting() -> None:
    done = _first(Schedule(1, _faults("kill", "stop", "fill", impossible=frozenset({"stop"}))), 6)
    assert len(done) == 6
    assert {what.split()[0] for what in done} == {"kill", "fill"}


def test_recovery_counts_from_readiness_to_the_next_progress() -> None:
    recovery = Recovery(_faults("kill")[0], Inflicted("kill"), time.monotonic(), 1)
    recovery.end()
    before, after = ("job", "running", 0, 7, 1), ("job", "running", 0, 8, 1)
    recovery.observe(False, before, job_has_ended=False)
    assert recovery.restart_seconds is None
    recovery.observe(True, before, job_has_ended=False)
    recovery.observe(True, None, job_has_ended=False)
    recovery.observe(True, before, job_has_ended=False)
    assert recovery.restart_seconds is not None
    assert recovery.recovery_seconds is None
    recovery.overlap()
    recovery.observe(True, before, job_has_ended=False)
    recovery.observe(True, after, job_has_ended=False)
    assert recovery.recovery_seconds is not None


def test_episodes_that_were_not_over_when_their_job_ended_are_missing_with_their_group_and_no_others_are(
    redis_client: redis.Redis,
) -> None:
    jobs = JobStore(redis_client)
    sessions, job = AgentSessions(jobs), "job_1"

    def played(group: int, sample: int, status: str | None) -> None:
        session = AgentSession("", job, "", "", "", 2**42, 0, group_id=f"{job}-{group}", sample=sample)
        session, _ = sessions.open(session)
        if status:
            sessions.close(session, {"status": status}, status)

    redis_client.hset(redis_keys.dispatch_cursor(job), "position", 4)
    redis_client.hset(own_keys.agent_lost(job), f"{job}-1/1", "its runner failed")
    # Whole; one lost; one that failed and is played again; one that nobody has begun.
    for group, statuses in enumerate((("finished", "cut"), ("finished", "failed"), ("finished", None))):
        for sample, status in enumerate(statuses):
            played(group, sample, status)
    missing = missing_episodes(redis_client, job, 2)
    assert missing == {(f"{job}-1", 1), (f"{job}-2", 0), (f"{job}-2", 1), (f"{job}-3", 0), (f"{job}-3", 1)}


TRY_STORAGE = """
import json, os, sys
def outcome(work):
    try:
        return work() and 0
    except OSError as error:
        return error.errno
folder = sys.argv[1]
print(json.dumps([
    outcome(lambda: open(folder + "/there").read()),
    outcome(lambda: open(folder + "/new", "w").write("words")),
    outcome(lambda: os.mkdir(folder + "/folder")),
    outcome(lambda: os.rename(folder + "/there", folder + "/there")),
    outcome(lambda: open("/proc/self/cmdline").read()),
]))
"""


def test_storage_of_a_service_is_read_only_or_broken_and_whole_again(tmp_path: Path) -> None:
    require("cc")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "there").write_text("words")
    storage = StorageFaults(tmp_path / "faults", tmp_path / "state")
    environment = storage.environment("trainer")

    def tried() -> list[int]:
        command = [sys.executable, "-c", TRY_STORAGE, str(tmp_path / "state")]
        ran = subprocess.run(command, env=environment, capture_output=True, check=True)
        return [number or 0 for number in json.loads(ran.stdout)]

    storage.set("trainer", errno.EROFS, can_read=True)
    assert tried() == [0, errno.EROFS, errno.EROFS, errno.EROFS, 0]
    storage.set("trainer", errno.EIO)
    assert tried() == [errno.EIO] * 4 + [0]
    storage.set("inference", errno.EIO)
    storage.set("trainer", 0)
    assert tried() == [0, 0, 0, 0, 0]


def test_half_open_connections_say_nothing_and_new_ones_are_served(redis_server: str) -> None:
    with Network(["redis"]) as network:
        network.lead("redis", redis_server.removeprefix("redis://").removesuffix("/0"))
        url = f"redis://{network.address('redis')}/0"
        with redis.Redis.from_url(url, socket_timeout=0.3) as old, redis.Redis.from_url(url, socket_timeout=20) as new:
            assert old.ping()
            assert network.silence("redis") == 1
            with pytest.raises(redis.TimeoutError):
                old.ping()
            assert new.ping()
