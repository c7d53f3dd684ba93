"""Dashboards and alert rules name only metrics that the platform has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

from spo import observability

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
    assert observability.JOBS in REGISTRY._collector_to_names
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


@pytest.fixture
def promtool() -> str:
    """The tool; it comes with the Debian package prometheus (scripts/system_deps.sh)."""
    found = shutil.which("promtool")
    if found is None:
        assert os.environ.get("CI") != "true", "promtool is missing: apt-get install prometheus"
        pytest.skip("promtool is missing: the alert rules are not tried")
    return found


def rule_tests(folder: Path, text: str) -> Path:
    """A file of rule tests beside the rules."""
    shutil.copy(ALERTS, folder / "alerts.yml")
    (folder / "tests.yml").write_text(text)
    return folder / "tests.yml"


def test_outages_and_first_dead_letters_are_seen(promtool: str, tmp_path: Path) -> None:
    file = rule_tests(tmp_path, (Path(__file__).parent / "alert_rules.yml").read_text())
    ran = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# Series by which each other rule sounds at 50 minutes, and by which it stays silent.
SOUNDS = {
    "SpoRedisNearlyFull": (["spo_replay_memory_share 0.9x300"], ["spo_replay_memory_share 0.8x300"]),
    "SpoStreamStands": (
        ['spo_stream_lag_entries{stream="rollouts"} 5x300'],
        ['spo_stream_lag_entries{stream="rollouts"} 5+1x300'],
    ),
    "SpoTrainerStarves": (
        ["spo_trainer_wait_batch_seconds_sum 0+12x300"],
        ["spo_trainer_wait_batch_seconds_sum 0+3x300"],
    ),
    "SpoFlakyPrograms": (
        ["spo_judge_flaky_programs_total 0+1x300", "spo_judge_rechecked_programs_total 0+10x300"],
        ["spo_judge_flaky_programs_total 0x300", "spo_judge_rechecked_programs_total 0+10x300"],
    ),
    "SpoHardCodedPrograms": (
        ["spo_judge_suspected_hard_coded_total 0+1x300", "spo_judge_verdicts_total 0+10x300"],
        ["spo_judge_suspected_hard_coded_total 0x300", "spo_judge_verdicts_total 0+10x300"],
    ),
    "SpoDeletionFails": (["spo_deletions_failing 1x300"], ["spo_deletions_failing 0x300"]),
    "SpoPoolEmpty": (
        ['spo_jobs{state="running"} 1x300'],
        ['spo_jobs{state="running"} 1x300', 'spo_replicas{pool="inference"} 1x300'],
    ),
}


def test_every_rule_sounds_on_what_it_is_for_and_on_nothing_else(promtool: str, tmp_path: Path) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == {*SOUNDS, "SpoServiceDown", "SpoDeadLetters"}
    wrong = []
    for alert, both in SOUNDS.items():
        for series, sounds in zip(both, (True, False), strict=True):
            inputs = [dict(zip(("series", "values"), each.rsplit(" ", 1), strict=True)) for each in series]
            # What it would say is compared by nobody here, only whether.
            expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > 0'
            expected = [{"labels": "{}", "value": 1}] if sounds else []
            checks = [{"expr": expression, "eval_time": "50m", "exp_samples": expected}]
            tests = [{"interval": "15s", "input_series": inputs, "promql_expr_test": checks}]
            document = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": tests}
            file = rule_tests(tmp_path, yaml.safe_dump(document))
            ran = subprocess.run(
                [promtool, "test", "rules", file], capture_output=True, text=True, timeout=60, check=False
            )
            if ran.returncode:
                wrong.append(f"{alert} {'does not sound' if sounds else 'sounds'}: {ran.stdout}{ran.stderr}")
    assert wrong == []
