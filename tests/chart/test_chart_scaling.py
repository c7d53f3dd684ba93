"""Pools that PUT /v1/scale, KEDA or the HorizontalPodAutoscaler may resize, and trainers of several pods."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import ELASTIC, JOB_SET, Helm, rendered
from test_chart_policy import component, of_kind, pod_of, pods

Object = dict[str, Any]
POOLS = ["spo-inference", "spo-sandbox-judge", "spo-verifier"]


def variables(objects: list[Object], service: str) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pods(objects)[service]["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("values", "group", "resource"),
    [("elastic", "apps", "deployments/scale"), ("job-set", "keda.sh", "scaledobjects")],
)
def test_the_role_is_good_for_two_sizes_and_nothing_else(values: str, group: str, resource: str) -> None:
    objects = rendered(values)
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [
        {"apiGroups": [group], "resources": [resource], "resourceNames": POOLS, "verbs": ["get", "patch"]}
    ]
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "default")
    owners = {name for name, pod in pods(objects).items() if pod["serviceAccountName"] == subject["name"]}
    assert owners == {"orchestrator"}


def test_the_orchestrator_patches_what_the_role_names() -> None:
    for values, keda in (("elastic", "false"), ("job-set", "true")):
        told = variables(rendered(values), "orchestrator")
        assert told["SPO_ORCHESTRATOR_SCALER"] == "kubernetes"
        assert told["SPO_ORCHESTRATOR_SCALE_KEDA"] == keda
        assert [
            told["SPO_ORCHESTRATOR_SCALE_PREFIX"] + pool for pool in ("inference", "sandbox-judge", "verifier")
        ] == POOLS
        kind = "ScaledObject" if keda == "true" else "Deployment"
        assert set(POOLS) <= {each["metadata"]["name"] for each in of_kind(rendered(values), kind)}
    assert "SPO_ORCHESTRATOR_SCALER" not in variables(rendered("default"), "orchestrator")


def test_only_an_orchestrator_that_scales_reaches_the_kubernetes_api() -> None:
    def doors(values: str) -> dict[str, list[Object]]:
        return {
            policy["metadata"]["name"]: rule.get("to")
            for policy in of_kind(rendered(values), "NetworkPolicy")
            for rule in policy["spec"].get("egress", [])
            if {port["port"] for port in rule["ports"]} & {443, 6443}
        }

    assert doors("default") == {}
    assert doors("elastic") == {"spo-orchestrator": None}
    assert doors("job-set") == {"spo-orchestrator": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}


def test_an_upgrade_keeps_the_sizes_that_were_asked_for(helm: Helm) -> None:
    helm.install(ELASTIC)
    assert helm.cluster.of_kind("Deployment")["spo-inference"]["spec"]["replicas"] == 2
    helm.cluster.of_kind("Deployment")["spo-inference"]["spec"]["replicas"] = 5
    helm.upgrade({**ELASTIC, "logLevel": "debug"})
    assert helm.cluster.of_kind("Deployment")["spo-inference"]["spec"]["replicas"] == 5
    helm.upgrade({**ELASTIC, "scaling": {"enabled": False}})
    assert helm.cluster.of_kind("Deployment")["spo-inference"]["spec"]["replicas"] == 2


def test_an_upgrade_keeps_the_bounds_that_were_asked_for(helm: Helm) -> None:
    helm.install(JOB_SET)
    helm.cluster.of_kind("ScaledObject")["spo-inference"]["spec"]["minReplicaCount"] = 4
    helm.upgrade({**JOB_SET, "logLevel": "debug"})
    bounds = {name: each["spec"]["minReplicaCount"] for name, each in helm.cluster.of_kind("ScaledObject").items()}
    assert bounds == {"spo-inference": 4, "spo-sandbox-judge": 1, "spo-verifier": 1}


def test_automatic_scaling_has_bounds_and_takes_its_time_to_shrink() -> None:
    for values in ("everything", "gpu"):
        for each in of_kind(rendered(values), "ScaledObject", "HorizontalPodAutoscaler"):
            spec = each["spec"]
            least = spec.get("minReplicas", spec.get("minReplicaCount"))
            assert 1 <= least < spec.get("maxReplicas", spec.get("maxReplicaCount"))
            behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            # benchmarks.autoscaling has measured these: no flapping, and back within five minutes.
            assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 120
            assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0


def test_keda_takes_pools_to_zero_and_back_by_the_orchestrators_own_number(helm: Helm) -> None:
    scaling = {"enabled": True, "engine": "keda", "minReplicas": 0, "maxReplicas": 9}
    cron = {"type": "cron", "metadata": {"timezone": "UTC", "start": "0 6 * * *", "end": "0 7 * * *",
                                         "desiredReplicas": "2"}}  # fmt: skip
    helm.install({"inference": {"autoscaling": scaling | {"extraTriggers": [cron]}}})
    spec = helm.cluster.of_kind("ScaledObject")["spo-inference"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 9)
    ours, theirs = spec["triggers"]
    assert ours["metadata"]["valueLocation"] == 'spo_wanted_replicas{pool="inference"}'
    assert (ours["metadata"]["targetValue"], ours["metadata"]["activationTargetValue"]) == ("1", "0")
    assert theirs == cron
    # Away for a minute, the orchestrator takes no pool away.
    assert spec["fallback"] == {"failureThreshold": 4, "replicas": 1, "behavior": "currentReplicasIfHigher"}


def test_the_pods_of_a_trainer_meet_in_its_first_one() -> None:
    objects = rendered("elastic")
    groups = {each["metadata"]["name"]: each for each in of_kind(objects, "StatefulSet") if "trainer" in str(each)}
    assert set(groups) >= {"spo-trainer-0", "spo-trainer-1"}
    for name in ("spo-trainer-0", "spo-trainer-1"):
        spec = groups[name]["spec"]
        assert (spec["replicas"], spec["podManagementPolicy"]) == (4, "Parallel")
        told = pod_of(groups[name])["spec"]["containers"][0]["args"]
        assert told[: told.index("-m")] == [
            *("torch.distributed.run", "--nproc-per-node", "8", "--shutdown-timeout", "615"),
            *("--nnodes", "4", "--max-restarts", "100"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{name}-0.{spec['serviceName']}:29500"),
            *("--rdzv-id", name, "--local-addr", "$(POD_IP)"),
        ]
        assert told[told.index("-m") :] == ["-m", "services.trainer"]
    (service,) = [each for each in of_kind(objects, "Service") if component(each["metadata"]["labels"]) == "trainer"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_a_job_set_restarts_a_trainer_whole_and_is_replaced_when_its_pods_change(helm: Helm) -> None:
    def trainers() -> dict[str, Object]:
        return helm.cluster.of_kind("JobSet")

    helm.install(JOB_SET)
    ((name, held),) = trainers().items()
    (replicated,) = held["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"], job["backoffLimit"]) == ("Indexed", 2, 2, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert f"{name}-t-0-0.{name}:29500" in job["template"]["spec"]["containers"][0]["args"]
    helm.upgrade(JOB_SET)
    assert set(trainers()) == {name}
    helm.upgrade({**JOB_SET, "logLevel": "debug"})
    assert len(trainers()) == 1
    assert set(trainers()) != {name}


def test_the_name_of_a_trainers_pod_is_short_enough_for_every_release(helm: Helm) -> None:
    # The emulated JobSet counts as its webhook does.
    trainer = {"kind": "JobSet", "nodes": 1000, "replicas": 11}
    helm.install({**JOB_SET, "fullnameOverride": "s" * 40, "trainer": trainer})
    assert len(helm.cluster.of_kind("JobSet")) == 11
