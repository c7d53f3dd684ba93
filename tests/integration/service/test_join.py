"""What every service asks of Redis before it starts: an answer, its data, that it takes writes, a schema we know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import redis

from services.orchestrator.recovery import lacks_durability, require_append_only_file
from spo import redis_keys
from spo.errors import PreconditionFailed, Unreachable
from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect, unfit
from spo.service.process import SCHEMA, ServiceProcess, join_platform
from spo.service.settings import PlatformSettings, ServiceSettings
from spo.testing.peers import wait_until

ROOT = Path(__file__).parents[3]
OWN = f"{SCHEMA[0]}.{SCHEMA[1]}"


def version_in(client: redis.Redis) -> str:
    found = client.hget(redis_keys.platform(), "schema_version")
    assert isinstance(found, bytes)
    return found.decode()


def join(url: str, schema: tuple[int, int] = SCHEMA, seconds: float = 5) -> None:
    join_platform(PlatformSettings(redis_url=url, redis_wait_seconds=seconds), schema).close()


def test_the_first_service_states_the_schema(redis_server: str, redis_client: redis.Redis) -> None:
    join(redis_server)

    assert version_in(redis_client) == OWN


def test_a_platform_from_before_schemas_had_versions_is_taken_over(
    redis_server: str, redis_client: redis.Redis
) -> None:
    redis_client.zadd(redis_keys.job_index(), {"job_1": 1})

    join(redis_server)

    assert version_in(redis_client) == OWN


def test_a_later_minor_release_and_this_one_share_a_platform(redis_server: str, redis_client: redis.Redis) -> None:
    join(redis_server, (SCHEMA[0], SCHEMA[1] + 3))
    join(redis_server)

    assert version_in(redis_client) == f"{SCHEMA[0]}.{SCHEMA[1] + 3}"


def test_a_later_major_release_is_refused_in_one_sentence(redis_server: str, redis_client: redis.Redis) -> None:
    redis_client.hset(redis_keys.platform(), "schema_version", f"{SCHEMA[0] + 1}.0")

    with pytest.raises(
        PreconditionFailed, match=rf"holds schema {SCHEMA[0] + 1}\.0, and this release knows"
    ) as refused:
        join(redis_server)

    assert refused.value.code == "newer_schema"
    assert version_in(redis_client) == f"{SCHEMA[0] + 1}.0"


@pytest.mark.parametrize("service", ["replay_buffer", "orchestrator"])
def test_a_service_refuses_to_start_on_a_later_schema(
    service: str, redis_server: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.hset(redis_keys.platform(), "schema_version", "99.0")
    environment = os.environ | {"SPO_REDIS_URL": redis_server, "SPO_STATE_PATH": str(tmp_path)}

    ran = subprocess.run(
        [sys.executable, "-m", f"services.{service}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    said = ran.stdout + ran.stderr
    assert ran.returncode != 0
    assert "newer_schema" in said
    assert "holds schema 99.0" in said
    assert "Traceback" not in said


def test_a_replica_is_waited_for_until_it_is_promoted(redis_server: str, free_port: int, tmp_path: Path) -> None:
    process = subprocess.Popen(server_command(free_port, tmp_path), stdout=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{free_port}/0"
        with connect(url) as client:
            primary = int(redis_server.rpartition(":")[2].partition("/")[0])
            client.replicaof("127.0.0.1", primary)  # type: ignore[attr-defined]
            began = time.monotonic()
            with pytest.raises(Unreachable, match="is a replica, which takes no writes until promoted; waited 1 s"):
                join(url, seconds=1)
            assert time.monotonic() - began < 5
            client.replicaof("NO", "ONE")  # type: ignore[attr-defined]
            join(url)
    finally:
        process.terminate()
        process.wait(20)


class OldServer:
    """What INFO of another server would say."""

    def __init__(self, **told: str) -> None:
        self.info = lambda: told


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"redis_version": "7.0.15"}, "version 7.0.15"),
        ({"redis_version": "6.2.14", "maxmemory_policy": "noeviction"}, "version 6.2.14"),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, "version 7.1.0"),
        ({"redis_version": "7.2.4", "maxmemory_policy": "volatile-ttl"}, "maxmemory-policy volatile-ttl"),
        ({"redis_version": "7.2.4", "maxmemory_policy": "noeviction"}, ""),
        ({"redis_version": "255.255.255", "maxmemory_policy": "noeviction"}, ""),
        ({"redis_version": "10.0.0"}, ""),
        ({}, ""),
    ],
)
def test_a_server_that_would_lose_data_is_unfit(told: dict[str, str], reason: str) -> None:
    found = unfit(cast(RedisClient, OldServer(**told)))
    assert reason in found
    assert bool(found) is bool(reason)


@pytest.fixture
def unusual_redis(redis_server: str, redis_client: redis.Redis, request: pytest.FixtureRequest) -> Iterator[str]:
    """The server with a policy, or as a user without a command."""
    policy, forbidden = request.param
    redis_client.config_set("maxmemory-policy", policy)
    redis_client.acl_setuser("weak", enabled=True, reset=True, passwords=["+p"], keys=["*"], channels=["*"],
                             commands=["+@all", *(f"-{name}" for name in forbidden)])  # fmt: skip
    yield redis_server.replace("redis://", "redis://weak:p@")
    redis_client.config_set("maxmemory-policy", "noeviction")
    redis_client.acl_deluser("weak")


UNFIT = [
    (("allkeys-lru", []), "evicts keys.*allkeys-lru.*noeviction"),
    (("volatile-lru", []), "evicts keys.*volatile-lru"),
    (("noeviction", ["info"]), "does not answer INFO.*info"),
]


@pytest.mark.parametrize(("unusual_redis", "reason"), UNFIT, indirect=["unusual_redis"])
def test_no_service_joins_a_redis_that_would_lose_data(unusual_redis: str, reason: str) -> None:
    with pytest.raises(PreconditionFailed, match=reason) as refused:
        join(unusual_redis)
    assert refused.value.code == "redis_unfit"


@pytest.mark.parametrize("unusual_redis", [("noeviction", ["waitaof"])], indirect=True)
def test_the_orchestrator_needs_waitaof_where_writes_are_durable(unusual_redis: str) -> None:
    with connect(unusual_redis, 5) as client:
        with pytest.raises(PreconditionFailed, match="does not answer WAITAOF") as refused:
            require_append_only_file(client, "here", accept_none=False)
        assert refused.value.code == "redis_unfit"
        require_append_only_file(client, "here", accept_none=True)


def evicts(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lfu")


def hides_info(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "weak", "-info")


def hides_waitaof(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "weak", "-waitaof")


def keeps_no_file(client: redis.Redis) -> None:
    client.config_set("appendonly", "no")


def mended(client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("appendonly", "yes")
    client.execute_command("ACL", "SETUSER", "weak", "+@all")


@pytest.mark.parametrize("unusual_redis", [("noeviction", [])], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (evicts, "allkeys-lfu"),
        (hides_info, "does not answer INFO"),
        (hides_waitaof, "does not answer WAITAOF"),
        (keeps_no_file, "keeps no append-only file"),
    ],
)
def test_a_service_says_when_its_redis_becomes_unfit_and_when_it_ends(
    unusual_redis: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[redis.Redis], None],
    words: str,
) -> None:
    monkeypatch.setattr("spo.service.process.REDIS_LOOK_SECONDS", 0.02)
    process = ServiceProcess("orchestrator", ServiceSettings())
    process.needs_of_redis = lacks_durability
    with connect(unusual_redis, 5) as client:
        process.watch_redis(client)
        watch = threading.Thread(target=process.workers[-1], args=(process.stop,))
        watch.start()
        try:
            change(redis_client)
            wait_until(lambda: words in process.redis_problem, "the problem")
            mended(redis_client)
            wait_until(lambda: not process.redis_problem, "its end")
        finally:
            mended(redis_client)
            process.stop.set()
            watch.join(10)
            process.server.stop(0)


def test_every_service_with_a_redis_watches_it() -> None:
    joining = [file for file in ROOT.glob("services/*/__main__.py") if "join_platform(" in file.read_text()]
    assert len(joining) >= 6
    assert [
        file for file in joining if not re.search(r"process\.(hold_state|watch_redis)\(join", file.read_text())
    ] == []
