"""Redis in trouble: stopped, slow, full, with its clients cut off, or restored from a snapshot."""

from __future__ import annotations

import shutil
from random import Random

from spo.local.launcher import REDIS
from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.faults.processes import kill, stopped


def _stopped(stage: Stage, random: Random) -> Inflicted | None:
    return stopped(stage, REDIS, random.uniform(2, 8))


def _slow(stage: Stage, random: Random) -> Inflicted:
    """Every command waits for up to half a second, again and again."""
    seconds = random.uniform(2, 5)
    stage.platform.redis.execute_command("CLIENT", "PAUSE", int(seconds * 1000), "ALL")
    return Inflicted(f"Redis answers nobody for {seconds:.1f} s (CLIENT PAUSE)", seconds)


def _full(stage: Stage, random: Random) -> Inflicted:
    client = stage.platform.redis
    before = int(client.config_get("maxmemory")["maxmemory"] or 0)
    seconds = random.uniform(4, 8)
    client.config_set("maxmemory", "1mb")

    def make_room() -> None:
        client.config_set("maxmemory", before)

    return Inflicted(f"Redis is full for {seconds:.1f} s (maxmemory)", seconds, make_room)


def _clients_cut(stage: Stage, random: Random) -> Inflicted:
    count = 0
    for _ in range(random.randint(1, 3)):
        for kind in ("normal", "pubsub"):
            count += int(stage.platform.redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))
    return Inflicted(f"{count} connections to Redis cut (CLIENT KILL)")


def _disk_full(stage: Stage, random: Random) -> Inflicted | None:
    disk = stage.platform.redis_disk
    if not disk.is_small:
        return None
    disk.fill()
    seconds = random.uniform(3, 6)
    return Inflicted(f"the disk of Redis is full for {seconds:.1f} s", seconds, disk.empty)


def _restored(stage: Stage, random: Random) -> Inflicted | None:
    """A copy of its files, and some seconds later a Redis that begins with them again."""
    folder, copy = stage.platform.redis_folder, stage.platform.redis_folder.with_name("redis.snapshot")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(folder / "appendonlydir", copy / "appendonlydir")
    except (OSError, shutil.Error):
        # It was writing its file anew.
        return None
    seconds = random.uniform(4, 10)

    def restore() -> None:
        stage.set_back.add(stage.job_id)
        copy.replace(folder.with_name(f"{folder.name}.restore"))
        kill(stage, REDIS)

    return Inflicted(f"Redis is restored from a snapshot of {seconds:.1f} s before", seconds, restore, (REDIS,))


STORE = (
    Fault("stop redis", _stopped),
    Fault("redis slow", _slow),
    Fault("redis full", _full),
    Fault("redis clients cut", _clients_cut),
    Fault("redis disk full", _disk_full),
    Fault("redis restored", _restored, restarts_redis=True),
)
