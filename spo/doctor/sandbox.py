"""What `spo doctor` finds of the sandbox: the judge's own probe of its tiers."""

from __future__ import annotations

import ctypes.util
import json
import shutil
import subprocess
import sys

from spo.doctor.check import DoctorCheck

PROBE_SECONDS = 120
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
        probed = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
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
