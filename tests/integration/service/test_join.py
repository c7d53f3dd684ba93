"""What every service asks of Redis before it starts: an answer, its data, that it takes writes, a schema we know."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from spo import redis_keys
from spo.errors import PreconditionFailed, Unreachable
from spo.local.redis_server import server_command
from spo.messaging.connection import connect
from spo.service.join import SCHEMA, join_platform
from spo.service.settings import PlatformSettings

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
