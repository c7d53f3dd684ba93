"""What may be set of every pod: users, namespaces, images by digest, probes, sidecars; and a trainer's groups."""

from __future__ import annotations

from typing import Any

import helm_sdkpy
import pytest
from api_server import serve
from cluster import Cluster
from conftest import DIGEST, JOB_SET, SETS, Helm, merged, rendered
from test_chart_policy import GROUPS, SERVICES, of_kind, pod_of, pods, workload

Object = dict[str, Any]


def variables(pod: Object) -> dict[str, Any]:
    return {each["name"]: each for each in pod["containers"][0]["env"]}


def test_openshift_chooses_the_users_itself_and_its_names_are_on_another_port() -> None:
    objects = rendered("openshift")
    for name, pod in pods(objects).items():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"]), name
    ports = {port["port"] for each in of_kind(objects, "NetworkPolicy") for port in str_ports(each)}
    assert 5353 in ports
    assert 53 not in ports


def str_ports(policy: Object) -> list[Object]:
    return [port for rule in policy["spec"].get("egress", []) for port in rule["ports"]]


def test_what_is_said_for_all_pods_holds_for_each_and_its_own_section_goes_before(helm: Helm) -> None:
    own = {
        "inference": {
            "podSecurityContext": {"runAsUser": 4711},
            "schedulerName": "gang",
            "hostUsers": True,
            "tmpSize": "20Gi",
            "envFrom": [{"secretRef": {"name": "own"}}],
            "sidecars": [{"name": "log", "image": "log:1"}],
        }
    }
    objects = helm.install(merged(SETS["everything"], own))
    for name in SERVICES:
        pod = pods(objects)[name]
        here = name == "inference"
        container = pod["containers"][0]
        assert pod["hostUsers"] is here
        assert pod["schedulerName"] == ("gang" if here else "bin-packer")
        assert pod["securityContext"]["runAsUser"] == (4711 if here else 10001)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert [each["name"] for each in pod["initContainers"]] == ["wait"]
        assert [each["name"] for each in pod["containers"]] == [name, "log"] if here else [name]
        assert len(container["envFrom"]) == 1 + here
        assert container["lifecycle"]["preStop"]
        assert variables(pod)["HTTPS_PROXY"]["value"] == "http://proxy:3128"
        assert {"name": "tmp", "emptyDir": {"sizeLimit": "20Gi" if here else "4Gi"}} in pod["volumes"]
        labels = pod_of(workload(objects, name))["metadata"]["labels"]
        assert labels["sidecar.istio.io/inject"] == "false"
    maps = helm.cluster.of_kind("ConfigMap")
    assert maps["site"]["data"] == {"of": "spo"}
    assert "spo-text" in maps


def test_images_are_taken_by_digest_where_there_is_one() -> None:
    assert pods(rendered("everything"))["inference"]["containers"][0]["image"] == (
        f"registry.example.org/spo/spo-cpu:0.1.0@{DIGEST}"
    )
    assert pods(rendered("default"))["inference"]["containers"][0]["image"] == "spo-cpu:0.1.0"


def test_services_without_an_engine_take_an_image_without_one(helm: Helm) -> None:
    torch = {"image": "registry.example.org/spo/spo-torch:0.1.0"}
    tinker = {"enabled": True} | torch
    chosen = pods(helm.install({"trainer": torch, "valueEstimation": torch, "tinker": tinker}))
    images = {name: pod["containers"][0]["image"] for name, pod in chosen.items()}
    others = {name: image for name, image in images.items() if name not in ("trainer", "value-estimation", "tinker")}
    assert {images[name] for name in images.keys() - others.keys()} == {torch["image"]}
    assert len(images) == len(others) + 3
    assert torch["image"] not in others.values()
    assert images["inference"] == "spo-cpu:0.1.0"


def test_a_probe_of_ones_own_replaces_how_is_asked_and_keeps_the_rest(helm: Helm) -> None:
    probes = {
        "livenessProbe": {"exec": {"command": ["true"]}},
        "startupProbe": {"failureThreshold": 720},
        "readinessProbe": {"disabled": True},
    }
    (container,) = pods(helm.install({"valueEstimation": probes}))["value-estimation"]["containers"]
    assert container["livenessProbe"] == {
        "exec": {"command": ["true"]},
        "periodSeconds": 20,
        "timeoutSeconds": 10,
        "failureThreshold": 6,
    }
    assert container["startupProbe"] == {"tcpSocket": {"port": "grpc"}, "periodSeconds": 5, "failureThreshold": 720}
    assert "readinessProbe" not in container


def test_grpc_is_on_a_service_of_its_own_that_is_never_published(helm: Helm) -> None:
    objects = helm.install({"orchestrator": {"service": {"type": "NodePort"}}})
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    assert [port["name"] for port in services["spo-orchestrator"]["ports"]] == ["http"]
    assert [port["name"] for port in services["spo-orchestrator-grpc"]["ports"]] == ["grpc"]
    published = [name for name, spec in services.items() if spec.get("type", "ClusterIP") != "ClusterIP"]
    assert published == ["spo-orchestrator"]


@pytest.mark.parametrize("values", SETS)
def test_services_show_each_other_the_secrets_token_unless_that_is_switched_off(values: str) -> None:
    for name in SERVICES:
        token = variables(pods(rendered(values))[name]).get("SPO_RPC_TOKEN")
        secret = None if token is None else token["valueFrom"]["secretKeyRef"]
        assert secret == (None if values == "external" else {"name": "spo", "key": "rpc-token"})


def test_an_external_redis_with_tls_is_told_whose_certificate_to_trust(helm: Helm) -> None:
    external = {"url": "rediss://cache.example.org:6380/0?x=1", "caSecret": "my-ca"}
    pod = pods(helm.install({"redis": {"enabled": False}, "externalRedis": external}))["inference"]
    told = variables(pod)["SPO_REDIS_URL"]["value"]
    assert told == "rediss://cache.example.org:6380/0?x=1&ssl_ca_certs=/etc/spo/redis-ca/ca.crt"


def test_pods_reach_sentinels_and_the_servers_that_they_name(helm: Helm) -> None:
    external = {"url": "redis+sentinel://one:26379,two:26379/main/0", "port": 6380, "sentinelPort": 26379}
    found = helm.install({"redis": {"enabled": False}, "externalRedis": external})
    assert variables(pods(found)["replay-buffer"])["SPO_REDIS_URL"]["value"] == external["url"]
    policy = {each["metadata"]["name"]: each["spec"] for each in of_kind(found, "NetworkPolicy")}["spo-replay-buffer"]
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["egress"]]
    assert [6380, 26379] in ports


def test_a_pod_that_is_not_ready_keeps_no_node_from_being_drained(objects: list[Object]) -> None:
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_alerts_are_rules_for_the_operator() -> None:
    (rule,) = of_kind(rendered("everything"), "PrometheusRule")
    names = [each["alert"] for group in rule["spec"]["groups"] for each in group["rules"]]
    assert "SpoServiceDown" in names
    assert [group["name"] for group in rule["spec"]["groups"]] == ["spo", "own"]


@pytest.mark.parametrize("values", SETS)
def test_a_trainer_has_time_for_its_last_checkpoint(values: str) -> None:
    # Its own drain ends first, then torchrun would kill the ranks, last of all the kubelet.
    pod = pods(rendered(values))["trainer"]
    drain = float(variables(pod)["SPO_TRAINER_DRAIN_SECONDS"]["value"])
    arguments = pod["containers"][0]["args"]
    assert drain >= 600
    if "torch.distributed.run" in arguments:
        torchrun = float(arguments[arguments.index("--shutdown-timeout") + 1])
        assert drain + 10 <= torchrun
        assert torchrun + 15 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("values", GROUPS)
def test_no_probe_kills_a_pod_that_waits_for_its_peers(values: str) -> None:
    (container,) = pods(rendered(values))["trainer"]["containers"]
    assert {"startupProbe", "livenessProbe"} & set(container) == set()


def test_an_upgrade_leaves_a_trainer_of_several_pods_alone_until_its_pods_are_deleted() -> None:
    strategies = {
        each["metadata"]["name"]: each["spec"]["updateStrategy"]["type"]
        for values in ("elastic", "default")
        for each in of_kind(rendered(values), "StatefulSet")
        if "trainer" in each["metadata"]["name"]
    }
    assert strategies == {"spo-trainer-0": "OnDelete", "spo-trainer-1": "OnDelete", "spo-trainer": "RollingUpdate"}


def test_several_pods_are_a_job_set_where_the_cluster_has_its_controller_and_else_a_stateful_set() -> None:
    assert of_kind(rendered("job-set"), "JobSet")
    with serve(cluster := Cluster("1.33", extensions=False)) as kubeconfig:
        objects = Helm(cluster, kubeconfig).install({"trainer": {"nodes": 2}})
    assert not of_kind(objects, "JobSet")
    assert "spo-trainer-0" in cluster.of_kind("StatefulSet")


def test_a_trainers_queue_labels_and_topology_are_kueues_and_the_schedulers(helm: Helm) -> None:
    trainer = {
        **JOB_SET["trainer"],
        "queueName": "learning",
        "workloadLabels": {"kueue.x-k8s.io/priority-class": "high"},
        "workloadAnnotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"},
    }
    (held,) = of_kind(helm.install({"trainer": trainer}), "JobSet")
    assert held["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "learning"
    assert held["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert held["metadata"]["annotations"] == trainer["workloadAnnotations"]
    (term,) = pod_of(held)["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/rack"
    # Pods of the same trainer, not of any.
    assert term["labelSelector"]["matchLabels"].items() <= pod_of(held)["metadata"]["labels"].items()
    assert "spo-trainer" in term["labelSelector"]["matchLabels"]


def test_rdma_brings_the_capability_the_devices_and_what_nccl_must_know(helm: Helm) -> None:
    rdma = {"enabled": True, "resources": {"rdma/hca": 8}, "environment": {"NCCL_IB_HCA": "mlx5"}}
    objects = helm.install({"trainer": {"nodes": 2, "rdma": rdma}})
    (container,) = pods(objects)["trainer"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {container["resources"][kind]["rdma/hca"] for kind in ("requests", "limits")} == {8}
    assert variables(pods(objects)["trainer"])["NCCL_IB_HCA"]["value"] == "mlx5"
    assert pods(objects)["inference"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_seven_billion_parameters_fit_on_eight_cards() -> None:
    objects = rendered("7b-8gpu")
    cards = 0
    for name in ("inference", "value-estimation", "trainer"):
        each = workload(objects, name)
        one = int(each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        cards += one * each["spec"]["replicas"]
    assert cards == 8


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"images": {"digests": {"light": "latest"}}}, "digests"),
        ({"podDefaults": {"hostUsers": "no"}}, "hostUsers"),
        ({"externalRedis": {"caSecret": "my-ca"}}, "redis.enabled"),
        (
            {"redis": {"enabled": False}, "externalRedis": {"caSecret": "my-ca", "url": "redis://there:6379/0"}},
            "rediss://",
        ),
        ({"trainer": {"kind": "JobSet", "updateStrategy": "OnDelete"}}, "updateStrategy"),
        ({"models": {"downloads": [{"name": "x", "from": "ftp://there/x"}]}}, "from"),
        ({"models": {"downloads": [{"name": "../x", "from": "hf://a/b"}]}}, "name"),
        ({"trainer": {"livenessProbe": "none"}}, "livenessProbe"),
    ],
)
def test_what_cannot_work_is_refused_and_named(helm: Helm, values: Object, words: str) -> None:
    with pytest.raises(helm_sdkpy.InstallError, match=words):
        helm.install(values)
