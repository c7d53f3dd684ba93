"""Runners of agents: absent by default, scaled by open episodes, and confined to the sessions' address."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import KEDA, Helm, rendered
from test_chart_policy import EDGES, edges_of, of_kind, pods, workload

RUNNER: dict[str, Any] = {
    "enabled": True,
    "existingSecret": "runner-key",
    "harnesses": {"solver": "python /opt/solver/main.py"},
    "most": 6,
}


def test_it_is_there_only_where_it_is_switched_on_and_holds_no_secret_but_its_key(helm: Helm) -> None:
    assert "agent-runner" not in pods(rendered("default"))
    assert not [each for each in rendered("default") if "agent-runner" in each["metadata"]["name"]]
    objects = helm.install({"agentRunner": RUNNER | {"image": "registry.example.org/solver:1", "score": "score.sh"}})
    pod = pods(objects)["agent-runner"]
    (container,) = pod["containers"]
    assert (container["image"], container["args"]) == ("registry.example.org/solver:1", ["services.agent_runner"])
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    told = {each["name"]: each for each in container["env"]}
    assert json.loads(told["SPO_AGENT_RUNNER_HARNESSES"]["value"]) == RUNNER["harnesses"]
    assert told["SPO_AGENT_RUNNER_API_URL"]["value"] == "http://spo-orchestrator:8080"
    assert told["SPO_AGENT_RUNNER_MOST"]["value"] == "6"
    held = {name: each["valueFrom"]["secretKeyRef"] for name, each in told.items() if "secretKeyRef" in str(each)}
    assert held == {"SPO_AGENT_RUNNER_API_KEY": {"name": "runner-key", "key": "api-key"}}
    assert {each["name"] for each in container["volumeMounts"]} == {"tmp"}
    # An account of its own, which nothing is bound to, and no token of it.
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("spo-agent-runner", False)
    (account,) = [each for each in of_kind(objects, "ServiceAccount") if "agent-runner" in each["metadata"]["name"]]
    assert account["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] >= float(told["SPO_AGENT_RUNNER_DRAIN_SECONDS"]["value"]) + 15
    assert "spo-agent-runner" in {each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget")}


def test_it_reaches_the_sessions_address_and_names_and_nobody_calls_it(helm: Helm) -> None:
    objects = helm.install({"agentRunner": RUNNER, "rpcToken": {"enabled": True}})
    assert edges_of(objects, "egress") == EDGES | {("agent-runner", "orchestrator", 8080)}
    (policy,) = [each["spec"] for each in of_kind(objects, "NetworkPolicy") if "runner" in each["metadata"]["name"]]
    assert [sorted({port["port"] for port in rule["ports"]}) for rule in policy["egress"]] == [[8080], [53]]
    assert all(rule["to"] for rule in policy["egress"])
    assert "ingress" not in policy


def test_an_api_that_only_named_peers_may_call_answers_runners_too(helm: Helm) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
    objects = helm.install({"agentRunner": RUNNER, "networkPolicy": {"apiFrom": peers}})
    assert ("agent-runner", "orchestrator", 8080) in edges_of(objects, "ingress")


def test_keda_starts_a_pod_for_as_many_open_episodes_as_one_plays_and_none_for_none(helm: Helm) -> None:
    scaled = {"autoscaling": {"enabled": True, "minReplicas": 0}, "pool": "docker"}
    values = {"scaling": {"enabled": True}, **{pool: {"autoscaling": KEDA | {"maxReplicas": 8}} for pool in POOLS}}
    objects = helm.install(values | {"agentRunner": RUNNER | scaled})
    assert "replicas" not in workload(objects, "agent-runner")["spec"]
    spec = helm.cluster.of_kind("ScaledObject")["spo-agent-runner"]["spec"]
    assert (spec["scaleTargetRef"], spec["minReplicaCount"], spec["maxReplicaCount"]) == (
        {"name": "spo-agent-runner"}, 0, 16,
    )  # fmt: skip
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["valueLocation"] == 'spo_agents_open_episodes{pool="docker"}'
    assert (trigger["metadata"]["targetValue"], trigger["authenticationRef"]["name"]) == ("6", "spo-orchestrator")
    assert helm.cluster.of_kind("TriggerAuthentication")
    # PUT /v1/scale does not know these pods, so what an upgrade says holds.
    helm.upgrade(values | {"agentRunner": RUNNER | {"autoscaling": {"enabled": True, "minReplicas": 2}}})
    assert helm.cluster.of_kind("ScaledObject")["spo-agent-runner"]["spec"]["minReplicaCount"] == 2
    assert pods(helm.upgrade({"agentRunner": RUNNER}))["agent-runner"]


POOLS = ("inference", "sandboxJudge", "verifier")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"existingSecret": ""}, "agents:run"),
        ({"harnesses": {}}, "names no command"),
        ({"autoscaling": {"enabled": True, "engine": "hpa"}}, "only keda"),
        ({"autoscaling": {"enabled": True, "minReplicas": 20}}, "minReplicas is above maxReplicas"),
        ({"most": 0}, "most"),
        ({"settings": {"no_such": 1}}, "no_such"),
    ],
)
def test_runners_that_could_not_work_are_refused_in_words(helm: Helm, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        helm.install({"agentRunner": RUNNER | changed})
