"""Where models come from: the toy contest's is made by a Job, others are fetched, and both lie where jobs name them."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Helm, rendered
from test_chart_policy import of_kind, pods

Object = dict[str, Any]


def jobs(objects: list[Object]) -> dict[str, Object]:
    """The container of each model's Job, by what it runs."""
    found = {}
    for each in of_kind(objects, "Job"):
        (container,) = each["spec"]["template"]["spec"]["containers"]
        found[" ".join(container["args"])] = container
    return found


def test_jobs_make_the_toy_model_and_fetch_others_into_a_claim_of_the_chart() -> None:
    objects = rendered("everything")
    assert set(jobs(objects)) == {
        "spo.cli toy-model /models/toy",
        "spo.weights.download hf://Qwen/Qwen2.5-0.5B@main /models/qwen",
        "spo.weights.download s3://models/own /models/own",
    }
    for container in jobs(objects).values():
        told = {each["name"]: each for each in container["env"]}
        assert told["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "HF_TOKEN"}
        assert told["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "bucket"
        # The image says 1: nothing but these Jobs may fetch.
        assert told["HF_HUB_OFFLINE"]["value"] == "0"
    (claim,) = [each for each in of_kind(objects, "PersistentVolumeClaim") if each["metadata"]["name"] == "spo-models"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    readers = {
        name
        for name, pod in pods(objects).items()
        for volume in pod.get("volumes", [])
        if volume.get("persistentVolumeClaim", {}).get("claimName") == "spo-models" and name != "models"
    }
    assert readers == {"orchestrator", "inference", "value-estimation", "trainer"}
    for name in readers:
        (mount,) = [each for each in pods(objects)[name]["containers"][0]["volumeMounts"] if each["name"] == "models"]
        assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}


def test_only_downloads_reach_the_outside(helm: Helm) -> None:
    def egress(objects: list[Object]) -> list[Object]:
        policies = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == "spo-models"]
        return [rule for policy in policies for rule in policy["spec"].get("egress", [])]

    assert egress(rendered("default")) == []
    # The hub's port, the object store's, names.
    assert [rule["ports"][0]["port"] for rule in egress(rendered("everything"))] == [443, 443, 53]
    store = {"objectStore": {"endpoint": "http://minio.storage:9000", "port": 9000}}
    own = {"models": {"downloads": [{"name": "own", "from": "s3://models/own"}]}}
    assert [rule["ports"][0]["port"] for rule in egress(helm.install(store | own))] == [443, 9000, 53]
    helm.uninstall()
    assert egress(helm.install({"models": {"toy": True}})) == []


def test_an_upgrade_that_changes_a_model_makes_another_job_and_one_that_does_not_makes_none(helm: Helm) -> None:
    helm.install({"models": {"toy": True}})
    first = set(helm.cluster.of_kind("Job"))
    helm.upgrade({"models": {"toy": True}, "logLevel": "debug"})
    assert set(helm.cluster.of_kind("Job")) == first
    helm.upgrade({"models": {"toy": True, "resources": {"limits": {"memory": "8Gi"}}}})
    assert len(helm.cluster.of_kind("Job")) == 1
    assert set(helm.cluster.of_kind("Job")) != first


@pytest.mark.parametrize(
    "changed",
    [
        {"commonLabels": {"team": "models"}},
        {"podDefaults": {"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]}},
        {"podDefaults": {"hostUsers": False}},
        {"serviceAccount": {"name": "mine"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changes_the_pod_of_a_job_makes_another_job(helm: Helm, changed: Object) -> None:
    # The API server refuses another pod template in a Job that is there, and with it the whole upgrade.
    helm.install({"models": {"toy": True}})
    (before,) = helm.cluster.of_kind("Job").values()
    helm.upgrade({"models": {"toy": True}} | changed)
    (after,) = helm.cluster.of_kind("Job").values()
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["metadata"]["name"] != after["metadata"]["name"]
