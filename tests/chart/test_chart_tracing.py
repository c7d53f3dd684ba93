"""Traces: every service is told of the collector and may reach it; without one nobody is and may."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Helm, rendered
from test_chart_policy import SERVICES, component, of_kind, pods

VARIABLES = ("SPO_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG")


def told(objects: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What each service is told of traces."""
    found = {}
    for name in SERVICES:
        variables = {each["name"]: each.get("value") for each in pods(objects)[name]["containers"][0]["env"]}
        found[name] = [variables[each] for each in VARIABLES if each in variables]
    return found


def reach(objects: list[dict[str, Any]], port: int) -> dict[str, list[Any]]:
    """Who may open connections to a port, and of whom."""
    return {
        component(policy["spec"]["podSelector"]["matchLabels"]): rule.get("to", [])
        for policy in of_kind(objects, "NetworkPolicy")
        for rule in policy["spec"].get("egress", [])
        if [each["port"] for each in rule["ports"]] == [port]
    }


def test_every_service_sends_its_share_of_traces_to_the_collector_and_may_reach_it() -> None:
    objects = rendered("everything")

    settings = ["http://collector.monitoring:4318", "parentbased_traceidratio", "0.25"]
    assert told(objects) == dict.fromkeys(SERVICES, settings)
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert reach(objects, 4318) == dict.fromkeys(SERVICES, peers)


def test_without_a_collector_nobody_is_told_of_one_or_may_reach_it() -> None:
    assert told(rendered("default")) == {name: [] for name in SERVICES}
    assert reach(rendered("default"), 4318) == {}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("https://traces.example.org", 443),
        ("http://collector", 80),
        ("http://[fd00::1]:4318/otlp", 4318),
        ("https://collector.monitoring:8443", 8443),
    ],
)
def test_the_port_that_is_opened_is_the_endpoints(helm: Helm, endpoint: str, port: int) -> None:
    objects = helm.install({"tracing": {"endpoint": endpoint}})

    assert set(reach(objects, port)) == set(SERVICES)
