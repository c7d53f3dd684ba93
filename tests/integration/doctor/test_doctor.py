"""`spo doctor`: each finding says why it matters and what to do, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
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
    assert all(checks[f"judge of {kind}"]["well"] for kind in ("programs", "functions by tests", "mathematics"))
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


def test_the_platform_that_commands_would_ask_is_looked_at(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        _, checks = doctor(tmp_path, SPO_API_URL=f"{url}/")
        server.shutdown()

    assert checks[f"platform at {url} (SPO_API_URL)"]["finding"] == "ok"
    assert "platform" not in checks

    _, checks = doctor(tmp_path, SPO_API_URL="http://127.0.0.1:1")

    assert checks["platform at http://127.0.0.1:1 (SPO_API_URL)"]["finding"] == "missing"


class Ready(BaseHTTPRequestHandler):
    """Answers as an orchestrator that is ready."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()
