"""state.json: what a launcher says about itself, so that other commands find the platform it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil


def write_state(state_file: Path, state: dict[str, Any]) -> None:
    """Write it whole: a reader sees the old or the new one."""
    state_file.parent.mkdir(parents=True, exist_ok=True)
    staging = state_file.with_suffix(".json.new")
    staging.write_text(json.dumps(state, indent=2) + "\n")
    staging.replace(state_file)


def read_state(state_file: Path) -> dict[str, Any] | None:
    """What a launcher wrote, or None when that launcher no longer lives."""
    try:
        state: dict[str, Any] = json.loads(state_file.read_text())
        # A pid alone may have been given to another process since.
        return state if psutil.Process(state["pid"]).create_time() == state["pid_created"] else None
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def running_platforms(runs_path: Path) -> list[dict[str, Any]]:
    """Every platform that runs here, the one started last first."""
    states = [read_state(state_file) for state_file in runs_path.glob("*/state.json")]
    return sorted((state for state in states if state), key=lambda state: float(state["pid_created"]), reverse=True)
