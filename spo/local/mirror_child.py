"""The launcher's child that mirrors every job's curves, where SPO_LAUNCHER_MIRROR names a target."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spo.local.child import Child


def mirror_children(target: str, http_url: str, log_path: Path) -> list[Child]:
    """The child, or none without a target; it is ready when it runs, and waits for the orchestrator by itself."""
    if not target:
        return []
    key = os.environ.get("SPO_ORCHESTRATOR_API_KEY") or os.environ.get("SPO_API_KEY")
    environment = {**os.environ, "SPO_API_URL": http_url} | ({"SPO_API_KEY": key} if key else {})
    command = [sys.executable, "-m", "spo.cli", "job", "mirror", "--all", "--to", target]
    return [Child("mirror", command, environment, log_path, "", lambda: True)]
