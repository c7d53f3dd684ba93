"""Dashboards and alert rules name only metrics that the platform has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

from spo.observability import metrics

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "spo.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
NAME = re.compile(r"\bspo_[a-z0-9_]+\b")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]


def exported() -> set[str]:
    """Every sample name that the registry of the platform can produce."""
    assert metrics.JOBS in REGISTRY._collector_to_names
    return {name for names in REGISTRY._collector_to_names.values() for name in names if name.startswith("spo_")}


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_that_is_drawn_or_watched_exists(expression: str) -> None:
    named = set(NAME.findall(expression))

    assert named <= exported(), f"unknown: {sorted(named - exported())}"


def test_the_chart_carries_the_same_dashboard() -> None:
    assert (ROOT / "helm" / "spo" / "files" / "dashboard.json").read_text() == DASHBOARD.read_text(), "make chart-files"


def test_panels_do_not_overlap_and_are_told_apart() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]

    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["targets"] and panel["title"] for panel in panels)
