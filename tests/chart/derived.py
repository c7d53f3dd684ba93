"""What is derived in the chart: the README's table, the schema's settings, the Grafana dashboard.

`make chart-files` rewrites them; tests hold them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from spo.service.settings import PlatformSettings

CHART = Path(__file__).parents[2] / "helm" / "spo"
BEGIN = "<!-- values:"
END = "<!-- end of values -->"
LONGEST_DEFAULT = 60
# Service -> its section of the values.
SECTIONS = {
    "orchestrator": "orchestrator",
    "inference": "inference",
    "sandbox-judge": "sandboxJudge",
    "verifier": "verifier",
    "replay-buffer": "replayBuffer",
    "value-estimation": "valueEstimation",
    "trainer": "trainer",
    "tinker": "tinker",
    "agent-runner": "agentRunner",
}
# Set by the chart itself from what it knows: where the process listens, what its key is, whom it may scale.
TAKEN = {"host", "port", "metrics_port", "advertise_address", "http_port", "api_key", "http_secret", "model_keys"}
TAKEN |= {"model", "api_url", "pool", "harnesses", "score", "most"}
TAKEN |= {"scaler", "scale_prefix", "scale_keda", "shared_state", "min_replicas", "max_replicas"}
# Files that the chart carries, and where they come from: a chart cannot read outside its folder.
DEPLOY = CHART.parents[1] / "deploy"
CARRIED = {
    CHART / "files" / "dashboard.json": DEPLOY / "grafana" / "spo.json",
    CHART / "files" / "alerts.yml": DEPLOY / "prometheus" / "alerts.yml",
}


def settings_of(service: str) -> Any:
    """The settings class of a service."""
    return import_module(f"services.{service.replace('-', '_')}.settings").Settings


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with exactly the fields of the settings classes."""
    schema = json.loads(json.dumps(schema))
    for service, section in SECTIONS.items():
        fields = set(settings_of(service).model_fields) - set(PlatformSettings.model_fields) - TAKEN
        known = {name: {"$ref": "#/$defs/scalar"} for name in sorted(fields)}
        schema["properties"][section]["properties"]["settings"]["properties"] = known
    return schema


def with_table(readme: str, values: str) -> str:
    """The README with its table made anew."""
    head, rest = readme.split(BEGIN, 1)
    marker, tail = rest.split("-->", 1)
    root = yaml.compose(values, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    lines = ["| Value | Default | |", "|---|---|---|", *_rows(root, "", _comments(values))]
    return f"{head}{BEGIN}{marker}-->\n" + "\n".join(lines) + f"\n{END}" + tail.split(END, 1)[1]


def _rows(section: yaml.MappingNode, prefix: str, comments: dict[int, str]) -> Iterator[str]:
    for key, value in section.value:
        name, comment = f"{prefix}{key.value}", comments.get(key.start_mark.line, "")
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style and key.value != "behavior":
            if comment:
                yield f"| `{name}` | | {comment} |"
            yield from _rows(value, f"{name}.", comments)
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            shown = f"`{default}`" if len(default) <= LONGEST_DEFAULT else "see values.yaml"
            yield f"| `{name}` | {shown} | {comment} |"


def _comments(values: str) -> dict[int, str]:
    """The comment above each line that has one; only those that start with "--"."""
    found: dict[int, str] = {}
    words: list[str] = []
    for number, line in enumerate(values.splitlines()):
        text = line.strip()
        if text.startswith("# --"):
            words.append(text.removeprefix("# --").strip())
        elif not text.startswith("#"):
            found[number] = " ".join(words)
            words = []
    return found


if __name__ == "__main__":
    readme, schema = CHART / "README.md", CHART / "values.schema.json"
    readme.write_text(with_table(readme.read_text(), (CHART / "values.yaml").read_text()))
    for copy, source in CARRIED.items():
        copy.write_text(source.read_text())
    schema.write_text(json.dumps(with_settings(json.loads(schema.read_text())), indent=2) + "\n")
