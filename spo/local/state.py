"""state.json: what a launcher says about itself, so that other commands find the platform it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

import psutil

from spo.local.child import ChildStatus


class PlatformState(TypedDict):
    """The document; pid_created tells the launcher from a later process of the same pid."""

    name: str
    pid: int
    pid_created: float
    ready: bool
    http_url: str
    redis_url: str
    state_path: str
    services: list[ChildStatus]


def write_state(state_file: Path, state: PlatformState) -> None:
    """Write it whole: a reader sees the old or the new one."""
    state_file.parent.mkdir(parents=True, exist_ok=True)
    staging = state_file.with_suffix(".json.new")
    staging.write_text(json.dumps(state, indent=2) + "\n")
    staging.replace(state_file)


def read_state(state_file: Path) -> PlatformState | None:
    """What a launcher wrote, or None when that launcher no longer lives."""
    try:
        state: PlatformState = json.loads(state_file.read_text())
        # A pid alone may have been given to another process since.
        return state if psutil.Process(state["pid"]).create_time() == state["pid_created"] else None
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def running_platforms(runs_path: Path) -> list[PlatformState]:
    """Every platform that runs here, the one started last first."""
    states = [read_state(state_file) for state_file in runs_path.glob("*/state.json")]
    return sorted((state for state in states if state), key=lambda state: state["pid_created"], reverse=True)
