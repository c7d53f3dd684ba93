"""The campaign's instruments do what they say: a fault that is none would prove nothing."""

from __future__ import annotations

import errno
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agents import AgentSession, AgentSessions
from services.orchestrator.commit import timestamp
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from tests.chaos.clocks import Clocks
from tests.chaos.disks import Disk, StorageFaults
from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.faults.schedule import Schedule
from tests.chaos.invariants import MissingEpisodes, missing_episodes
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


def _faults(*kinds: str, impossible: frozenset[str] = frozenset(), often: bool = False) -> list[Fault]:
    def fault(kind: str) -> Fault:
        def inflict(stage: Stage, random: Random) -> Inflicted | None:
            return None if kind in impossible else Inflicted(f"{kind} {random.random()}")

        return Fault(kind, inflict, often=often)

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


def test_faults_that_a_campaign_is_about_come_in_its_first_dozen() -> None:
    others = _faults(*(f"other-{number}" for number in range(40)))
    for seed in range(20):
        done = _first(Schedule(seed, [*others, *_faults("runner", "agent", often=True)]), 14)
        assert Counter(what.split()[0] for what in done)["runner"] == 2, done


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


@dataclass
class EndedJob:
    """A job that has ended, as far as its episodes in Redis tell."""

    redis: redis.Redis
    job: str = "job_1"

    def __post_init__(self) -> None:
        self.sessions = AgentSessions(JobStore(self.redis))

    def played(
        self, group: int, statuses: Sequence[str | None], ended_before: float = 100, *, held: bool = False
    ) -> None:
        """Episodes of a group, the scored ones ended so long before the job; held: and not passed on."""
        for sample, status in enumerate(statuses):
            session = AgentSession("", self.job, "", "", "", 2**42, 0, group_id=f"{self.job}-{group}", sample=sample)
            session, _ = self.sessions.open(session)
            if status:
                self.sessions.close(session, {"status": status}, status)
                at = int((time.time() - ended_before) * 1000)
                self.redis.hset(own_keys.agent_session(session.id), "ended", at)
            if held:
                self.redis.hset(own_keys.agent_episodes(self.job), f"{self.job}-{group}/{sample}", "{}")

    def missing(self, groups: int) -> MissingEpisodes:
        self.redis.hset(redis_keys.dispatch_cursor(self.job), "position", groups)
        event = {
            "at": timestamp(),
            "actor": "test",
            "kind": "state",
            "body": "{}",
            "from": "running",
            "to": "succeeded",
        }
        self.redis.xadd(own_keys.job_events(self.job), event, id="1-0")
        return missing_episodes(self.redis, self.job, 2)


def _whole(*groups: int) -> set[tuple[str, int]]:
    return {(f"job_1-{group}", sample) for group in groups for sample in (0, 1)}


def test_episodes_that_were_not_over_when_their_job_ended_are_missing_with_their_group_and_no_others_are(
    redis_client: redis.Redis,
) -> None:
    ended = EndedJob(redis_client)
    redis_client.hset(own_keys.agent_lost(ended.job), f"{ended.job}-1/1", "its runner failed")
    # Whole; one lost; one that failed and is played again; one that nobody has begun.
    for group, statuses in enumerate((("finished", "cut"), ("finished", "failed"), ("finished", None))):
        ended.played(group, statuses)
    assert ended.missing(4) == MissingEpisodes({("job_1-1", 1)}, _whole(2, 3))


def test_a_group_that_was_over_as_its_job_ended_is_dropped_with_it_and_one_that_was_over_before_is_lost(
    redis_client: redis.Redis,
) -> None:
    ended, done = EndedJob(redis_client), ("finished", "finished")
    # Nobody came to pass it on; the same long ago, which somebody should have; passed on, and gone behind that.
    ended.played(0, done, 0.2, held=True)
    ended.played(1, done, 300, held=True)
    ended.played(2, done, 0.2)
    assert ended.missing(3) == MissingEpisodes(set(), _whole(0))


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
