"""`spo doctor`: what this machine has and lacks, why that matters, and what to do about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import httpx
import psutil
import redis
from rich.markup import escape
from rich.table import Table

from spo.console import Output, console, print_document
from spo.doctor.check import DoctorCheck
from spo.doctor.sandbox import sandbox_findings
from spo.doctor.versions import version_findings
from spo.errors import SpoError
from spo.local.launcher import LauncherSettings
from spo.local.state import PlatformState, running_platforms
from spo.messaging.connection import NO_EVICTION, OLDEST_REDIS, connect, public_address, version_number
from spo.messaging.redis_client import RedisClient
from spo.service.settings import PlatformSettings

DEMO_MEMORY_BYTES = 8 << 30
DEMO_DISK_BYTES = 2 << 30
PROBE_SECONDS = 20


def examine(*, deep: bool = False, output: Output = Output.TABLE) -> bool:
    """Print every finding; True when nothing needed is missing."""
    checks = [
        *_machine(),
        _gpu(),
        *version_findings(deep=deep),
        *sandbox_findings(),
        *_redis(),
        *_platform(),
    ]
    if output is Output.TABLE:
        _print(checks)
    else:
        print_document([{"finding": check.mark, **asdict(check)} for check in checks], output)
    return all(check.well or not check.needed for check in checks)


def _print(checks: list[DoctorCheck]) -> None:
    colours = {"ok": "green", "missing": "red", "absent": "yellow"}
    table = Table(box=None, header_style="bold")
    for column in ("", "what", "why", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        mark = f"[{colours[check.mark]}]{check.mark}[/]"
        table.add_row(mark, escape(check.what), escape(check.why), "" if check.well else escape(check.step))
    console.print(table)


def _machine() -> list[DoctorCheck]:
    memory_bytes = psutil.virtual_memory().available
    disk_bytes = psutil.disk_usage(str(Path.cwd())).free
    python = f"Python {sys.version.split()[0]}"
    return [
        DoctorCheck(python, sys.version_info >= (3, 11), "the services need 3.11", "install Python 3.11 or newer"),
        DoctorCheck("Linux", sys.platform == "linux", "the sandbox is made of Linux parts", "run it on Linux"),
        DoctorCheck(
            f"{memory_bytes >> 30} GiB of memory free",
            memory_bytes >= DEMO_MEMORY_BYTES,
            "the demo's services take 8 GiB",
            "end other programs, or take a larger machine",
        ),
        DoctorCheck(
            f"{disk_bytes >> 30} GiB of disk free here",
            disk_bytes >= DEMO_DISK_BYTES,
            "weights, checkpoints and logs are written below the present folder",
            "free 2 GiB, or set SPO_STATE_PATH and SPO_LAUNCHER_RUNS_PATH",
        ),
        DoctorCheck(
            "C++ compiler",
            shutil.which("c++") is not None,
            "DeepSpeed and vLLM may build small parts",
            "install g++",
            needed=False,
        ),
    ]


def _gpu() -> DoctorCheck:
    why = "the toy contest trains on a CPU; real models need CUDA"
    step = "with an NVIDIA GPU: its driver, then pip install -c constraints/gpu.txt '.[gpu]'"
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return DoctorCheck("GPU", False, why, step, needed=False)
    return DoctorCheck(f"GPU {'; '.join(asked.stdout.strip().splitlines())}", True, why, step, needed=False)


def _redis() -> list[DoctorCheck]:
    """The Redis that is set or that a platform here runs; none is needed where `spo up` starts its own."""
    settings = PlatformSettings()
    running = running_platforms(LauncherSettings().runs_path)
    own = settings.redis_url != PlatformSettings.model_fields["redis_url"].default
    url = settings.redis_url if own else (running[0]["redis_url"] if running else "")
    why = "all state and every stream is in it"
    if not url:
        return [DoctorCheck("Redis: `spo up` starts its own", True, why, "")]
    what = "Redis"
    try:
        what = f"Redis at {public_address(url)}"
        client = connect(url, 2)
    except SpoError as error:
        return [DoctorCheck(what, False, why, f"{error.message}; start it or correct SPO_REDIS_URL")]
    with client:
        return [DoctorCheck(what, True, why, ""), *_redis_settings(client)]


def _redis_settings(client: RedisClient) -> list[DoctorCheck]:
    try:
        # INFO, since managed servers refuse CONFIG.
        told = client.info("server", "persistence", "memory")
        version = told.get("valkey_version") or told["redis_version"]
    except (redis.RedisError, KeyError) as error:
        step = f"allow INFO to see them ({error})"
        return [DoctorCheck("Redis' settings", False, "durability rests on them", step, needed=False)]
    return [
        DoctorCheck(
            f"Redis {version}",
            version_number(version) >= OLDEST_REDIS,
            "WAITAOF came with 7.2",
            "use Redis 7.2 or newer, or Valkey",
        ),
        DoctorCheck(
            "Redis keeps an append-only file",
            bool(told.get("aof_enabled")),
            "an accepted job must outlive a crash",
            "CONFIG SET appendonly yes, and in its configuration; or accept it: SPO_ORCHESTRATOR_DURABLE_WRITES=false",
        ),
        DoctorCheck(
            "Redis evicts nothing",
            told.get("maxmemory_policy") == NO_EVICTION,
            "an evicted key is lost experience",
            "CONFIG SET maxmemory-policy noeviction, and in its configuration",
        ),
    ]


def _platform() -> list[DoctorCheck]:
    running = running_platforms(LauncherSettings().runs_path)
    why = "jobs are submitted to it"
    url = os.environ.get("SPO_API_URL", "").rstrip("/")
    if url and all(state["http_url"] != url for state in running):
        step = "it does not answer: correct SPO_API_URL, or start it there"
        named = DoctorCheck(f"platform at {url} (SPO_API_URL)", _answers(f"{url}/readyz"), why, step)
        return [named, *_running_here(running, why)]
    if not running:
        return [DoctorCheck("platform", False, why, "`spo up` starts one", needed=False)]
    return _running_here(running, why)


def _running_here(running: list[PlatformState], why: str) -> list[DoctorCheck]:
    return [
        DoctorCheck(
            f"platform {state['name']} at {state['http_url']}",
            _answers(f"{state['http_url']}/readyz"),
            why,
            f"it does not answer: its logs are in {LauncherSettings().runs_path / str(state['name']) / 'logs'}",
        )
        for state in running
    ]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False
