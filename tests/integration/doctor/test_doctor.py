"""`spo doctor`: each finding says why it matters and what to do, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import redis


def doctor(folder: Path, **settings: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and the findings by what was looked at."""
    environment = {**os.environ, "NO_COLOR": "1", **settings}
    command = [sys.executable, "-m", "spo.cli", "doctor", "-o", "json"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, {each["what"]: each for each in json.loads(done.stdout)}


def test_each_finding_explains_itself_and_a_sound_redis_is_well(
    redis_server: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    status, checks = doctor(tmp_path, SPO_REDIS_URL=redis_server)
    words = " ".join(checks)

    assert status == (1 if any(each["finding"] == "missing" for each in checks.values()) else 0)
    assert all(each["why"] for each in checks.values())
    assert all(each["step"] for each in checks.values() if not each["well"])
    assert all(each in words for each in ("disk", "memory", "GPU", "vllm", "deepspeed", "isolation", "platform"))
    assert checks["Redis keeps an append-only file"]["well"]
    assert checks["Redis evicts nothing"]["well"]


def test_a_redis_that_would_lose_things_is_found(redis_server: str, redis_client: redis.Redis, tmp_path: Path) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        status, checks = doctor(tmp_path, SPO_REDIS_URL=redis_server)
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")

    assert status == 1
    assert checks["Redis evicts nothing"]["finding"] == "missing"
    assert "noeviction" in checks["Redis evicts nothing"]["step"]


def test_a_redis_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    status, checks = doctor(tmp_path, SPO_REDIS_URL="redis://ada:canary@127.0.0.1:1/0")

    assert status == 1
    assert checks["Redis at 127.0.0.1:1/0"]["finding"] == "missing"
    assert "canary" not in json.dumps(checks)
