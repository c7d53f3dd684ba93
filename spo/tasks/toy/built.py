"""pi0 of the toy contest where it has been built: found by its folder's name, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def newest_model(models: Path, difficulty: str) -> Path | None:
    """The folder of the pi0 built last below `models`, None where there is none."""
    made = models.glob(f"toy-{difficulty}-*/config.json")
    newest = max(made, key=lambda config: config.stat().st_mtime, default=None)
    return newest.parent if newest else None


def wanted_difficulty(document: Mapping[str, Any]) -> str | None:
    """The difficulty of a spec of the toy contest that names no model, None of every other spec."""
    tasks, model = document.get("tasks"), document.get("model", {})
    if not isinstance(tasks, Mapping) or not isinstance(model, Mapping) or tasks.get("kind") != "toy":
        return None
    return None if model.get("path") else "hard" if tasks.get("difficulty") == "hard" else "standard"
