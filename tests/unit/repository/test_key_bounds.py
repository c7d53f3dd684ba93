"""Everything in Redis has a bound that is written down: each function that names a key is in the document's table."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODULES = ["spo.redis_keys", "services.orchestrator.redis_keys"]
# They make parts of keys, or ids.
NO_KEYS = {"digest", "digest_of", "framed", "trajectory_id", "rollouts_of"}
SECTION = "## What is in Redis, and what bounds it"


def key_functions() -> set[str]:
    found = set()
    for name in MODULES:
        module = importlib.import_module(name)
        found |= {
            name for name, each in inspect.getmembers(module, inspect.isfunction) if each.__module__ == module.__name__
        }
    return found - NO_KEYS


def rows() -> list[tuple[str, str]]:
    document = (ROOT / "docs" / "operations_at_scale.md").read_text()
    section = document.split(SECTION)[1].split("\n## ")[0]
    return re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)


def test_every_key_family_has_one_row_and_every_row_names_families_that_exist() -> None:
    named = Counter(name for keys, _ in rows() for name in re.findall(r"`(\w+)`", keys))

    assert key_functions() - set(named) == set(), "say in docs/operations_at_scale.md what bounds them"
    assert set(named) - key_functions() == set()
    assert [name for name, times in named.items() if times > 1] == []
