"""Every environment variable that the repository names for a service is a field of its settings."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

from spo.service.settings import PlatformSettings

ROOT = Path(__file__).parents[3]
SERVICES = ("inference", "sandbox_judge", "replay_buffer", "value_estimation", "trainer", "orchestrator", "verifier")
SERVICES += ("agent_runner",)
NAMED = re.compile(rf"\bSPO_(?:{'|'.join(SERVICES).upper()})_[A-Z_]*[A-Z]\b")


def test_no_document_chart_or_test_names_a_setting_that_is_not_there() -> None:
    known = {f"SPO_{field}".upper() for field in PlatformSettings.model_fields}
    for service in SERVICES:
        fields = importlib.import_module(f"services.{service}.settings").Settings.model_fields
        known |= {f"SPO_{service}_{field}".upper() for field in fields}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    told = {"CHANGELOG.md", "docs/decisions/0001-departures-from-the-design.md"}
    unknown = set()
    for name in set(listed.stdout.splitlines()) - told:
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".yml", ".yaml", ".tpl", ".sh", ".txt", ".hcl"}:
            unknown |= {(found, name) for found in NAMED.findall(path.read_text()) if found not in known}
    assert sorted(unknown) == []
