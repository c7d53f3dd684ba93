"""The page of the metrics: what every service exports, which of it is drawn or watched."""

from __future__ import annotations

import json
from pathlib import Path

import yaml


def page(root: Path) -> str:
    """Markdown of the Prometheus metrics and alert rules."""
    from prometheus_client.metrics import MetricWrapperBase

    from spo import observability

    drawn = (root / "deploy" / "grafana" / "spo.json").read_text()
    rules = yaml.safe_load((root / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    watched = [rule for group in rules for rule in group["rules"]]
    lines = [
        "# Metrics",
        "",
        "Every service exports these at `/metrics` of its metrics port (`SPO_<SERVICE>_METRICS_PORT`), the",
        "orchestrator also at its API. Ids are never labels. `deploy/` has a Grafana dashboard, a scrape config and",
        "the alert rules.",
        "",
        "| Metric | Kind | Labels | Meaning | Used by |",
        "|---|---|---|---|---|",
    ]
    found = [each for each in vars(observability).values() if isinstance(each, MetricWrapperBase)]
    for each in sorted(found, key=lambda metric: metric._name):
        suffix = "_total" if each._type == "counter" else ""
        uses = (["dashboard"] if each._name in json.dumps(drawn) else []) + [
            rule["alert"] for rule in watched if each._name in rule["expr"]
        ]
        labels = ", ".join(each._labelnames)
        lines.append(
            f"| `{each._name}{suffix}` | {each._type} | {labels} | {each._documentation} | {', '.join(uses)} |"
        )
    lines += ["", "## Alerts", "", "| Alert | For | Says |", "|---|---|---|"]
    lines += [
        f"| {rule['alert']} | {rule.get('for', 'at once')} | {rule['annotations']['summary'].replace('|', '/')} |"
        for rule in watched
    ]
    return "\n".join([*lines, ""])
