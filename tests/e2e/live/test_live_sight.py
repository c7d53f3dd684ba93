"""Sight into a platform that runs: traces of groups over all services, and every metric that is drawn or watched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from spo import observability
from spo.client import Client
from spo.testing.peers import ReceivedSpan

ROOT = Path(__file__).parents[3]
# Of one group: who has it in hand, in order.
WAY = [
    ("orchestrator", "dispatch"),
    ("inference", "sample"),
    ("sandbox-judge", "judge"),
    ("replay-buffer", "ingest"),
    ("replay-buffer", "reference log-probs"),
    ("replay-buffer", "ReferenceLogprobsParts"),
    ("value-estimation", "ReferenceLogprobsParts"),
]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1200)]


def whole_trace(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """A trace that has been to every service, from its root down; empty when there is none yet."""
    for last in (span for span in spans if (span.service, span.name, span.kind) == (*WAY[-1], "SERVER")):
        by_id = {span.span_id: span for span in spans if span.trace_id == last.trace_id}
        way = [last]
        while way[0].parent_id in by_id:
            way.insert(0, by_id[way[0].parent_id])
        if [(span.service, span.name) for span in way] == WAY:
            return way
    return []


def test_a_group_is_one_connected_trace_that_steps_link_to(live: Any, trained_job: str) -> None:
    way = live.collector.wait_for(whole_trace, "a trace over all services")
    linking = live.collector.wait_for(
        lambda spans: {span.name for span in spans if (way[0].trace_id, way[0].span_id) in span.links},
        "a step that links to the group",
    )
    group = way[0].attributes
    ids = observability.group_ids(group["spo.run"], group["spo.group"])

    assert group["spo.run"] == trained_job
    assert way[0].trace_id == f"{ids[0]:032x}"
    assert linking == {"draw batch", "train step"}
    # Read once: other jobs go on making spans.
    spans = list(live.collector.spans)
    draws = {span.span_id for span in spans if span.name == "draw batch"}
    assert all(span.parent_id in draws for span in spans if span.name == "train step")


def test_no_trace_holds_text_of_a_prompt_or_response(live: Any, trained_job: str) -> None:
    live.collector.wait_for(whole_trace, "a trace over all services")
    with Client(live.url) as client:
        listed = client.trajectories(trained_job, limit=20)
        texts = [client.trajectory(trained_job, found.trajectory_id).response_text for found in listed]
    received = b"".join(live.collector.bodies)

    assert len(texts) == 20
    assert not [text for text in texts if len(text) > 10 and text.encode() in received]
    names = {name for span in live.collector.spans for name in span.attributes}
    counts = ("delivery", "groups", "programs", "samples", "step", "tokens", "trajectories")
    assert names <= {f"spo.{name}" for name in ("run", "group", "prompt", "service", *counts)}


def test_every_metric_that_is_drawn_or_watched_is_exported_by_a_live_service(live: Any, trained_job: str) -> None:
    panels = json.loads((ROOT / "deploy" / "grafana" / "spo.json").read_text())["panels"]
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    texts += [rule["expr"] for group in groups for rule in group["rules"]]
    named = {re.sub(r"_(bucket|sum|count)$", "", each) for text in texts for each in re.findall(r"\bspo_\w+", text)}
    exported = {name for url in live.metrics_urls.values() for name in scraped(url)}

    assert len(named) > 20
    assert not named - exported, "dashboards and alerts name what no live service exports"


def test_each_kind_of_work_of_a_job_shows_in_the_metrics(live: Any, trained_job: str) -> None:
    moved = {
        "inference": "spo_inference_tokens_total",
        "sandbox-judge": "spo_judge_verdicts_total",
        "replay-buffer": "spo_replay_inserts_total",
        "value-estimation": "spo_value_samples_total",
        "trainer": "spo_trainer_step_seconds_count",
        "orchestrator": "spo_jobs",
    }
    for service, name in moved.items():
        text = httpx.get(f"{live.metrics_urls[service]}/metrics", trust_env=False, timeout=30).text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        assert sum(map(float, values)) > 0, f"{service}: {name}"


def scraped(url: str) -> set[str]:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    return set(re.findall(r"^# TYPE (spo_\w+)", text, re.MULTILINE))
