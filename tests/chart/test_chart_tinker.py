"""The service of the Tinker API: absent by default, and whole where it is switched on."""

from __future__ import annotations

from conftest import BUCKET, Helm, rendered
from test_chart_policy import EDGES, edges_of, of_kind, pods, workload


def test_it_is_there_only_where_it_is_switched_on(helm: Helm) -> None:
    assert "tinker" not in pods(rendered("default"))
    objects = helm.install({"tinker": {"enabled": True, "model": "/models/mine", "settings": {"max_models": 3}}})
    # Models in training live in the memory of one process: never two of them.
    deployment = workload(objects, "tinker")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    (container,) = pods(objects)["tinker"]["containers"]
    assert container["args"] == ["services.tinker"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert container["resources"]["limits"]["memory"]
    told = {each["name"]: each for each in container["env"]}
    assert told["SPO_TINKER_MODEL"]["value"] == "/models/mine"
    assert told["SPO_TINKER_MAX_MODELS"]["value"] == "3"
    assert told["SPO_RPC_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "rpc-token"
    (orchestrator,) = pods(objects)["orchestrator"]["containers"]
    asked = {each["name"]: each for each in orchestrator["env"]}["SPO_TINKER_ADDRESS"]["value"]
    assert asked == "spo-tinker:7070"
    assert "spo-tinker" in {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    # Of the state folder it writes its own part alone.
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert mounts["/var/lib/spo"]["readOnly"]
    assert mounts["/var/lib/spo/tinker"]["subPath"] == "tinker"


def test_it_fetches_its_model_from_the_bucket_where_nothing_else_is_shared(helm: Helm) -> None:
    objects = helm.install(BUCKET | {"tinker": {"enabled": True, "model": "/models/qwen"}})
    (fetcher,) = pods(objects)["tinker"]["initContainers"]
    assert fetcher["args"] == ["spo.weights.download", "s3://spo/models/qwen", "/models/qwen"]
    (policy,) = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == "spo-tinker"]
    assert 9000 in {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}


def test_it_talks_to_the_orchestrator_alone(helm: Helm) -> None:
    wanted = EDGES | {("orchestrator", "tinker", 7070), ("tinker", "orchestrator", 7070)}
    objects = helm.install({"tinker": {"enabled": True}})
    assert edges_of(objects, "egress") == wanted
    assert edges_of(objects, "ingress") | {edge for edge in wanted if edge[2] == 8080} == wanted
