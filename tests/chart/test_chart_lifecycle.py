"""The chart's life on a cluster: installed, upgraded, tested and uninstalled by Helm itself."""

from __future__ import annotations

import ast
import asyncio
import base64
from typing import Any

import extension_schemas
import helm_sdkpy
import kubernetes_validate
import pytest
from api_server import serve
from cluster import EXTENSIONS, Cluster
from conftest import CHART, RELEASE, SETS, Helm, rendered
from test_chart_policy import of_kind

VERSIONS = ("1.28", "1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")


def test_helm_finds_nothing_to_complain_about() -> None:
    result = asyncio.run(helm_sdkpy.Lint(helm_sdkpy.Configuration()).run(str(CHART)))
    assert "[ERROR]" not in str(result)
    assert "[WARNING]" not in str(result)


@pytest.mark.parametrize("values", SETS)
def test_a_release_is_installed_upgraded_tested_and_leaves_only_what_must_be_kept(helm: Helm, values: str) -> None:
    helm.install(SETS[values])
    helm.upgrade(SETS[values])
    helm.test()
    assert helm.cluster.of_kind("Pod")["spo-test"]["status"]["phase"] == "Succeeded"
    helm.uninstall()
    left = {(held["kind"], held["metadata"]["name"]) for held in helm.cluster.objects.values()}
    kept = {("Namespace", "default"), ("Pod", "spo-test")}
    if values not in ("single-node", "external", "bucket"):
        kept.add(("PersistentVolumeClaim", "spo-state"))
    if values == "everything":
        kept.add(("PersistentVolumeClaim", "spo-models"))
    assert left == kept


def test_the_test_asks_for_no_replica_of_a_pool_that_may_be_empty(helm: Helm) -> None:
    def asked_for(values: dict[str, Any]) -> set[str]:
        helm.upgrade(values)
        helm.test()
        (container,) = helm.cluster.of_kind("Pod")["spo-test"]["spec"]["containers"]
        (line,) = [line for line in container["args"][0].splitlines() if line.startswith("wanted = ")]
        return set(ast.literal_eval(line.removeprefix("wanted = set(").removesuffix(")")))

    helm.install({})
    everyone = {"inference", "sandbox-judge", "verifier", "replay-buffer", "value-estimation", "trainer"}
    assert asked_for({}) == everyone
    empty = {"autoscaling": {"enabled": True, "engine": "keda", "minReplicas": 0}}
    assert asked_for({"inference": empty, "verifier": empty}) == everyone - {"inference", "verifier"}
    # A HorizontalPodAutoscaler keeps one.
    assert asked_for({"verifier": {"autoscaling": {"enabled": True, "minReplicas": 0}}}) == everyone


def test_no_version_of_the_chart_is_in_the_pod_of_redis() -> None:
    (redis,) = [
        each for each in of_kind(rendered("everything"), "StatefulSet") if each["metadata"]["name"] == "spo-redis"
    ]
    labels = redis["spec"]["template"]["metadata"]["labels"]
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_every_supported_kubernetes(version: str, objects: list[dict[str, Any]]) -> None:
    for each in objects:
        judged = {name: value for name, value in each.items() if name != "status"}
        if each["apiVersion"] in EXTENSIONS:
            extension_schemas.validate(judged, version)
        else:
            kubernetes_validate.validate(judged, version, strict=True)


def test_the_oldest_supported_kubernetes_takes_the_chart_and_an_older_one_does_not() -> None:
    with serve(cluster := Cluster("1.28")) as kubeconfig:
        assert len(Helm(cluster, kubeconfig).install()) > 15
    with serve(cluster := Cluster("1.27")) as kubeconfig, pytest.raises(helm_sdkpy.InstallError, match=r"1\.28"):
        Helm(cluster, kubeconfig).install()


def test_generated_secrets_are_random_and_survive_an_upgrade(helm: Helm) -> None:
    def secrets() -> dict[str, str]:
        return dict(helm.cluster.of_kind("Secret")[RELEASE]["data"])

    helm.install()
    first = secrets()
    assert {len(base64.b64decode(text)) for text in first.values()} == {40}
    assert first["api-key"] != first["redis-password"]
    helm.upgrade({"logLevel": "debug"})
    assert secrets() == first


def test_moving_between_fixed_and_automatic_scaling_changes_no_selector(helm: Helm) -> None:
    helm.install(SETS["default"])
    helm.upgrade(SETS["everything"])
    assert "replicas" not in helm.cluster.of_kind("Deployment")["spo-inference"]["spec"]
    helm.upgrade(SETS["default"])
    assert helm.cluster.of_kind("Deployment")["spo-inference"]["spec"]["replicas"] == 1
    assert not helm.cluster.of_kind("ScaledObject")


def test_keda_is_refused_by_a_cluster_without_it() -> None:
    cluster = Cluster("1.33", extensions=False)
    with serve(cluster) as kubeconfig, pytest.raises(helm_sdkpy.InstallError, match=r"keda\.sh"):
        Helm(cluster, kubeconfig).install(SETS["gpu"])
