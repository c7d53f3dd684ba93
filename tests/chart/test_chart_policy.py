"""What every rendered object must keep to: restricted pods, matching selectors, probes, the edges of the network."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

import pytest
from conftest import SETS, Helm, merged, rendered

Object = dict[str, Any]

WORKLOADS = ("Deployment", "StatefulSet", "JobSet", "Pod", "Job")
# Pods of one trainer that meet before they open a port.
GROUPS = ("elastic", "job-set")
SERVICES = ("orchestrator", "inference", "sandbox-judge", "verifier", "replay-buffer", "value-estimation", "trainer")
# Who opens a connection to whom, and where: the drawing in docs/life_of_a_trajectory.md.
EDGES = {
    ("inference", "orchestrator", 7070),
    ("inference", "redis", 6379),
    ("inference", "verifier", 7070),
    ("orchestrator", "inference", 7070),
    ("orchestrator", "redis", 6379),
    ("orchestrator", "replay-buffer", 7070),
    ("orchestrator", "sandbox-judge", 7070),
    ("orchestrator", "value-estimation", 7070),
    ("orchestrator", "verifier", 7070),
    ("replay-buffer", "orchestrator", 7070),
    ("replay-buffer", "redis", 6379),
    ("replay-buffer", "value-estimation", 7070),
    ("sandbox-judge", "orchestrator", 7070),
    ("sandbox-judge", "redis", 6379),
    ("test", "orchestrator", 8080),
    ("trainer", "orchestrator", 7070),
    ("trainer", "replay-buffer", 7070),
    ("value-estimation", "inference", 7070),
    ("value-estimation", "orchestrator", 7070),
    ("value-estimation", "redis", 6379),
    ("value-estimation", "replay-buffer", 7070),
    ("value-estimation", "sandbox-judge", 7070),
    ("value-estimation", "verifier", 7070),
    # A model as judge that the platform itself serves.
    ("verifier", "inference", 7070),
    ("verifier", "orchestrator", 7070),
    ("verifier", "redis", 6379),
    ("verifier", "sandbox-judge", 7070),
}


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def component(labels: dict[str, str]) -> str:
    return labels["app.kubernetes.io/component"]


def pods(objects: list[Object]) -> dict[str, Object]:
    """Pod specifications by component."""
    templates = [pod_of(each) for each in of_kind(objects, *WORKLOADS)]
    return {component(template["metadata"]["labels"]): template["spec"] for template in templates}


def pod_of(each: Object) -> Object:
    """The pod, or the template of the pods, of a workload."""
    if each["kind"] == "JobSet":
        return each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return each if each["kind"] == "Pod" else each["spec"]["template"]


def workload(objects: list[Object], name: str) -> Object:
    return next(each for each in of_kind(objects, *WORKLOADS) if component(each["metadata"]["labels"]) == name)


def test_every_service_is_there(objects: list[Object]) -> None:
    assert set(SERVICES) <= set(pods(objects))


def test_every_pod_passes_the_restricted_pod_security_standard(objects: list[Object]) -> None:
    for name, pod in pods(objects).items():
        context = pod["securityContext"]
        # OpenShift names the user itself.
        assert (name, context["runAsNonRoot"], context.get("runAsUser", 1) > 0) == (name, True, True)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        kinds = {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret"}
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_no_pod_has_a_token_but_an_orchestrator_that_scales(objects: list[Object]) -> None:
    scales = bool(of_kind(objects, "Role"))
    for name, pod in pods(objects).items():
        assert pod["automountServiceAccountToken"] is (scales and name == "orchestrator")
    assert all(each["automountServiceAccountToken"] is False for each in of_kind(objects, "ServiceAccount"))
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")


def test_no_pod_has_variables_that_services_leave_behind(objects: list[Object]) -> None:
    # A Service called spo-inference would set SPO_INFERENCE_PORT=tcp://..., which is one of our settings.
    assert all(pod["enableServiceLinks"] is False for pod in pods(objects).values())


def test_every_service_is_probed_and_says_what_it_needs(objects: list[Object]) -> None:
    for name, pod in pods(objects).items():
        for container in pod["containers"]:
            assert "memory" in container["resources"]["limits"], name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            probes = {"startupProbe", "readinessProbe", "livenessProbe"} & set(container)
            if name in ("test", "models"):
                assert probes == set(), name
            elif name == "trainer" and "--nnodes" in container["args"]:
                # Its port opens when the last of its pods is there, however long that takes: nothing may kill it.
                assert probes == {"readinessProbe"}, name
            else:
                assert len(probes) == 3, name
                # Five minutes at least for the imports of a model-bearing service on a slow disk.
                start = container["startupProbe"]
                assert start["periodSeconds"] * start["failureThreshold"] >= 300, name


def test_readiness_is_what_the_service_says_of_itself(objects: list[Object]) -> None:
    for name in SERVICES:
        probe = pods(objects)[name]["containers"][0]["readinessProbe"]
        assert ("httpGet" if name == "orchestrator" else "grpc") in probe


def test_what_a_process_died_of_stands_in_the_status_of_its_pod(objects: list[Object]) -> None:
    for name in SERVICES:
        assert pods(objects)[name]["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_pods_outlive_their_own_drain(objects: list[Object]) -> None:
    for name in SERVICES:
        pod = pods(objects)[name]
        variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        drain = float(variables.get(f"SPO_{name.replace('-', '_').upper()}_DRAIN_SECONDS") or 20)
        assert pod["terminationGracePeriodSeconds"] >= drain + 10


def test_every_selector_finds_exactly_its_own_pods(objects: list[Object]) -> None:
    workloads = of_kind(objects, "Deployment", "StatefulSet", "JobSet")
    labels = {each["metadata"]["name"]: pod_of(each)["metadata"]["labels"] for each in workloads}
    for each in of_kind(objects, "Deployment", "StatefulSet", "Service", "PodDisruptionBudget"):
        selector = each["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        found = {name for name, own in labels.items() if selector.items() <= own.items()}
        if each["kind"] in ("Deployment", "StatefulSet"):
            assert found == {each["metadata"]["name"]}
        else:
            own = component(each["metadata"]["labels"])
            assert found == {name for name, theirs in labels.items() if component(theirs) == own}


def test_every_port_that_is_named_is_opened(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        pod = pods(objects)[component(service["spec"]["selector"])]
        opened = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert opened[port["targetPort"]] == port["port"]


def test_every_address_a_pod_is_told_is_a_service_with_that_port(objects: list[Object]) -> None:
    ports = {
        each["metadata"]["name"]: {p["port"] for p in each["spec"]["ports"]} for each in of_kind(objects, "Service")
    }
    for pod in pods(objects).values():
        for variable in pod["containers"][0].get("env", []):
            if variable["name"].endswith("_ADDRESS") and "$(" not in variable["value"]:
                host, port = variable["value"].removeprefix("dns:///").split(":")
                assert int(port) in ports[host]


def test_everything_mounted_is_a_volume_and_every_volume_is_mounted(objects: list[Object]) -> None:
    for name, pod in pods(objects).items():
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        if name == "redis":
            templates = workload(objects, "redis")["spec"].get("volumeClaimTemplates", [])
            volumes |= {template["metadata"]["name"] for template in templates}
        mounts = [mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])]
        assert set(mounts) == volumes, name
        paths = [mount["mountPath"] for each in pod["containers"] for mount in each.get("volumeMounts", [])]
        assert len(set(paths)) == len(paths), name


def test_trainer_and_orchestrator_alone_may_write_the_state_folder_and_the_judge_has_no_files(
    objects: list[Object],
) -> None:
    writers = set()
    for name, pod in pods(objects).items():
        mounts = [mount for each in pod["containers"] for mount in each.get("volumeMounts", [])]
        writers |= {name for mount in mounts if mount["name"] == "state" and not mount.get("readOnly")}
        if name in ("sandbox-judge", "verifier"):
            assert {mount["name"] for mount in mounts} <= {"tmp", "redis-ca"}
    # The orchestrator keeps events and uploads there, makes forks, and removes what deleted jobs left.
    assert writers == {"trainer", "orchestrator"}


def test_experience_is_written_by_the_replay_buffer_and_by_imports_and_read_where_pi0_is(objects: list[Object]) -> None:
    mounts = {
        (name, mount.get("readOnly", False), mount["subPath"])
        for name, pod in pods(objects).items()
        for each in pod["containers"]
        for mount in each.get("volumeMounts", [])
        if mount["name"] == "experience"
    }
    urls = {
        each["value"]
        for pod in pods(objects).values()
        for each in pod["containers"][0].get("env", [])
        if each["name"] == "SPO_EXPERIENCE_URL"
    }
    on_the_claim = {
        ("replay-buffer", False, "experience"),
        ("orchestrator", False, "experience"),
        ("value-estimation", True, "experience"),
    }
    if urls == {"/experience"}:
        assert mounts == on_the_claim
    else:
        assert urls in ({"s3://models/experience"}, {"s3://spo/platform/experience"})
        assert mounts == set()


def test_only_who_reads_or_writes_a_store_gets_its_credentials_and_reaches_it() -> None:
    objects = rendered("elastic")
    weights = {"orchestrator", "inference", "value-estimation", "trainer"}
    told = {name: {each["name"] for each in pod["containers"][0]["env"]} for name, pod in pods(objects).items()}
    assert {name for name, names in told.items() if "SPO_WEIGHT_STORE_URL" in names} == weights
    assert {name for name, names in told.items() if "AWS_SECRET_ACCESS_KEY" in names} == weights | {"replay-buffer"}
    reach = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for policy in of_kind(objects, "NetworkPolicy")
        for rule in policy["spec"].get("egress", [])
        if {port["port"] for port in rule["ports"]} == {9000}
    }
    assert reach == weights | {"replay-buffer"}
    # And of a Redis of one's own nobody but who asks it has the authority's certificate.
    with_ca = {name for name, pod in pods(rendered("external")).items() if "redis-ca" in str(pod.get("volumes"))}
    assert with_ca == set(SERVICES) - {"trainer"}
    assert "experience" not in {each["name"] for pod in pods(objects).values() for each in pod.get("volumes", [])}


def edges_of(objects: list[Object], direction: str) -> set[tuple[str, str, int]]:
    """(client, server, port) of all peers that are pods of this release."""
    found = set()
    for policy in of_kind(objects, "NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        for rule in policy["spec"].get(direction, []):
            for peer in rule.get("from" if direction == "ingress" else "to", []):
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                if "app.kubernetes.io/instance" in labels:
                    pair = (component(labels), own) if direction == "ingress" else (own, component(labels))
                    found |= {(*pair, port["port"]) for port in rule["ports"]}
    return found


@pytest.mark.parametrize("values", SETS)
def test_the_network_allows_exactly_the_edges_of_the_architecture(values: str) -> None:
    objects = rendered(values)
    wanted = EDGES if values != "external" else {edge for edge in EDGES if edge[1] != "redis"}
    if values in ("elastic", "job-set"):
        wanted = wanted | {("trainer", "trainer", 1024)}
    assert edges_of(objects, "egress") == wanted
    # The API is open to everyone, so nobody is named there unless apiFrom is.
    named = edges_of(objects, "ingress") | {edge for edge in wanted if edge[2] == 8080}
    assert named == wanted


def test_everything_else_is_denied(objects: list[Object]) -> None:
    for policy in of_kind(objects, "NetworkPolicy"):
        assert sorted(policy["spec"]["policyTypes"]) == ["Egress", "Ingress"]
    denials = [
        policy["spec"]
        for policy in of_kind(objects, "NetworkPolicy")
        if "app.kubernetes.io/component" not in policy["spec"]["podSelector"]["matchLabels"]
    ]
    assert len(denials) == 1
    assert sorted(denials[0]["policyTypes"]) == ["Egress", "Ingress"]
    assert not {"ingress", "egress"} & set(denials[0])
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            assert rule.get("ports"), "a rule without ports allows all of them"


def test_programs_under_judgement_reach_nothing_but_redis_the_orchestrator_and_names() -> None:
    policy = next(
        each
        for each in rendered("default")
        if each["metadata"]["name"] == "spo-sandbox-judge" and each["kind"] == "NetworkPolicy"
    )
    ports = [{port["port"] for port in rule["ports"]} for rule in policy["spec"]["egress"]]
    assert sorted(map(sorted, ports)) == [[53], [6379], [7070]]
    assert all(rule["to"] for rule in policy["spec"]["egress"])


def test_verifiers_reach_the_outside_only_where_hosts_are_named_and_never_a_private_address() -> None:
    def outside(values: str) -> list[Object]:
        policies = of_kind(rendered(values), "NetworkPolicy")
        (policy,) = (each["spec"] for each in policies if each["metadata"]["name"] == "spo-verifier")
        return [rule for rule in policy["egress"] if any("ipBlock" in peer for peer in rule["to"])]

    assert outside("default") == []
    (rule,) = outside("everything")
    assert [port["port"] for port in rule["ports"]] == [443]
    open_to, _ = (ipaddress.ip_network(peer["ipBlock"]["cidr"]) for peer in rule["to"])
    closed = [ipaddress.ip_network(each) for each in rule["to"][0]["ipBlock"]["except"]]
    assert open_to == ipaddress.ip_network("0.0.0.0/0")
    for address in ("10.0.0.1", "172.31.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "127.0.0.1"):
        assert any(ipaddress.ip_address(address) in network for network in closed), address
    told = {each["name"]: each for each in pods(rendered("everything"))["verifier"]["containers"][0]["env"]}
    assert json.loads(told["SPO_VERIFIER_HTTP_HOSTS"]["value"]) == ["rewards.example.org"]
    assert told["SPO_VERIFIER_HTTP_SECRET"]["valueFrom"]["secretKeyRef"]["name"] == "reward-keys"


def test_no_secret_is_written_outside_secrets(objects: list[Object]) -> None:
    for pod in pods(objects).values():
        for variable in pod["containers"][0].get("env", []):
            if any(word in variable["name"] for word in ("PASSWORD", "KEY", "TOKEN")):
                assert set(variable) == {"name", "valueFrom"}
            elif variable["name"] == "SPO_REDIS_URL" and "value" in variable:
                assert "://:$(REDIS_PASSWORD)@" in variable["value"]


def test_the_dashboard_is_found_by_grafanas_sidecar_and_is_a_dashboard() -> None:
    (dashboard,) = [
        each for each in of_kind(rendered("everything"), "ConfigMap") if "dashboard" in str(each["metadata"])
    ]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    ((name, text),) = dashboard["data"].items()
    assert name.endswith(".json")
    assert json.loads(text)["panels"]


def test_the_ways_in_lead_to_the_api() -> None:
    objects = rendered("everything")
    ((port,),) = [
        [p["port"] for p in each["spec"]["ports"] if p["name"] == "http"]
        for each in of_kind(objects, "Service")
        if each["metadata"]["name"] == "spo-orchestrator"
    ]
    (route,) = of_kind(objects, "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "spo-orchestrator", "port": port}]
    (ingress,) = of_kind(objects, "Ingress")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "spo-orchestrator", "port": {"name": "http"}}


def test_a_pool_with_automatic_scaling_has_no_fixed_size() -> None:
    objects = rendered("everything")
    for name in ("inference", "sandbox-judge", "verifier"):
        assert "replicas" not in workload(objects, name)["spec"]
    targets = {
        each["spec"]["scaleTargetRef"]["name"] for each in of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler")
    }
    assert targets == {"spo-inference", "spo-sandbox-judge", "spo-verifier"}


def test_pools_scale_by_what_the_jobs_need_of_them() -> None:
    queries = {
        each["metadata"]["name"]: [trigger["metadata"]["valueLocation"] for trigger in each["spec"]["triggers"]]
        for each in of_kind(rendered("gpu"), "ScaledObject")
    }
    assert queries == {
        f"spo-{pool}": [f'spo_wanted_replicas{{pool="{pool}"}}'] for pool in ("inference", "sandbox-judge", "verifier")
    }


def test_several_ranks_are_started_by_torchrun() -> None:
    arguments = pods(rendered("gpu"))["trainer"]["containers"][0]["args"]
    # torchrun ends its ranks 30 s after SIGTERM unless told otherwise, whatever they write.
    assert arguments[:5] == ["torch.distributed.run", "--nproc-per-node", "2", "--shutdown-timeout", "615"]
    assert pods(rendered("default"))["trainer"]["containers"][0]["args"] == ["services.trainer"]


def test_large_numbers_reach_the_process_as_they_were_written() -> None:
    variables = {
        each["name"]: each.get("value") for each in pods(rendered("everything"))["orchestrator"]["containers"][0]["env"]
    }
    assert variables["SPO_ORCHESTRATOR_MAX_BODY_BYTES"] == "268435456"


UNITS = {"m": 1e-3, "Mi": 2.0**20, "Gi": 2.0**30, "Ki": 2.0**10, "M": 1e6, "G": 1e9, "": 1.0}


def quantity(text: Any) -> float:
    """CPUs or bytes of a Kubernetes quantity."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    assert found, text
    return float(found[1]) * UNITS[found[2]]


def requested(pod: Object, resource: str) -> float:
    """What the scheduler keeps free for a pod: its containers with sidecars, or the most of its init containers."""

    def of(container: Object) -> float:
        held = container.get("resources", {})
        return quantity(held.get("requests", {}).get(resource, held.get("limits", {}).get(resource, 0)))

    running, starting = sum(map(of, pod["containers"])), [0.0]
    for init in pod.get("initContainers", []):
        if init.get("restartPolicy") == "Always":
            running += of(init)
        else:
            starting.append(of(init))
    return max(running, *starting)


def copies(each: Object) -> int:
    """Pods that a workload has at once."""
    if each["kind"] == "Job":
        return int(each["spec"].get("parallelism", 1))
    return int(each["spec"].get("replicas", 1)) if each["kind"] != "Pod" else 1


@pytest.mark.parametrize(
    ("pod", "cpus"),
    [
        ({"containers": [{"resources": {"requests": {"cpu": "250m"}}}, {"resources": {"limits": {"cpu": 1}}}]}, 1.25),
        ({"containers": [{}], "initContainers": [{"resources": {"requests": {"cpu": "2"}}}]}, 2),
        (
            {
                "containers": [{"resources": {"requests": {"cpu": ".5"}}}],
                "initContainers": [
                    {"resources": {"requests": {"cpu": "100m"}}, "restartPolicy": "Always"},
                    {"resources": {"requests": {"cpu": "400m"}}},
                ],
            },
            0.6,
        ),
    ],
)
def test_requests_are_added_up_as_the_scheduler_does(pod: Object, cpus: float) -> None:
    assert requested(pod, "cpu") == pytest.approx(cpus)


def test_a_laptops_node_has_room_for_every_pod_and_job_at_once(helm: Helm) -> None:
    values = merged(SETS["single-node"], {"models": {"toy": True}})
    objects = helm.install(values)
    helm.test()
    workloads = of_kind([*objects, *helm.cluster.of_kind("Pod").values()], *WORKLOADS)
    assert {"models", "test", "redis", *SERVICES} == {
        component(pod_of(each)["metadata"]["labels"]) for each in workloads
    }
    needs = {
        resource: sum(copies(each) * requested(pod_of(each)["spec"], resource) for each in workloads)
        for resource in ("cpu", "memory")
    }
    assert all(requested(pod_of(each)["spec"], "cpu") > 0 for each in workloads)
    # Of 2 CPUs the nodes' own pods take up to .95 (kind).
    assert 0.5 < needs["cpu"] <= 1.0
    assert 1 << 30 < needs["memory"] <= 4 << 30
