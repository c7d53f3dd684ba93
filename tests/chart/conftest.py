"""Renders the chart with the real Helm engine against an emulated cluster; collected only where that engine is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

# `make chart-test` has an interpreter of its own; the other tests run without Helm.
HAS_HELM = find_spec("helm_sdkpy") is not None
collect_ignore_glob = [] if HAS_HELM else ["test_*.py"]
if HAS_HELM:
    import helm_sdkpy
    from api_server import serve
    from cluster import Cluster

CHART = Path(__file__).parents[2] / "helm" / "spo"
RELEASE = "spo"
NEWEST = "1.37"


@dataclass
class Helm:
    """Helm's actions on one cluster."""

    cluster: Cluster
    kubeconfig: str

    def _configuration(self) -> Any:
        return helm_sdkpy.Configuration(namespace="default", kubeconfig=self.kubeconfig)

    def install(self, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Install and return the rendered objects."""
        action = helm_sdkpy.Install(self._configuration())
        release = asyncio.run(action.run(RELEASE, str(CHART), values or {}, timeout=60, server_side_apply=True))
        return [document for document in yaml.load_all(release["manifest"], yaml.CSafeLoader) if document]

    def upgrade(self, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        action = helm_sdkpy.Upgrade(self._configuration())
        release = asyncio.run(action.run(RELEASE, str(CHART), values or {}, timeout=60, reset_values=True))
        return [document for document in yaml.load_all(release["manifest"], yaml.CSafeLoader) if document]

    def test(self) -> dict[str, Any]:
        return asyncio.run(helm_sdkpy.ReleaseTest(self._configuration()).run(RELEASE))

    def uninstall(self) -> None:
        asyncio.run(helm_sdkpy.Uninstall(self._configuration()).run(RELEASE, timeout=60))


def values_of(name: str) -> dict[str, Any]:
    """The values of one values file; "default" for the chart's own."""
    return {} if name == "default" else yaml.safe_load((CHART / f"values-{name}.yaml").read_text())


DIGEST = "sha256:" + "0123456789abcdef" * 4
# Everything that a value can switch on.
EVERYTHING = {
    "imagePullSecrets": ["registry"],
    "images": {
        "registry": "registry.example.org/spo/",
        "digests": {"light": DIGEST, "judge": DIGEST, "engine": DIGEST},
    },
    "podDefaults": {
        "hostUsers": False,
        "schedulerName": "bin-packer",
        "tmpSize": "4Gi",
        "podLabels": {"sidecar.istio.io/inject": "false"},
        "podAnnotations": {"example.org/owner": "learning"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "envFrom": [{"configMapRef": {"name": "site"}}],
        "initContainers": [
            {
                "name": "wait",
                "image": f"busybox:1.37@{DIGEST}",
                "imagePullPolicy": "IfNotPresent",
                "resources": {
                    "requests": {"cpu": "10m", "memory": "16Mi"},
                    "limits": {"cpu": "100m", "memory": "32Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "1"]}}},
    },
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "site"}, "data": {"of": "{{ .Release.Name }}"}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}",
    ],
    "commonLabels": {"team": "learning"},
    "models": {
        "toy": True,
        "downloads": [
            {"name": "qwen", "from": "hf://Qwen/Qwen2.5-0.5B@main"},
            {"name": "own", "from": "s3://models/own"},
        ],
        "hubSecret": "hub",
    },
    "objectStore": {"existingSecret": "bucket"},
    "tasks": {"existingClaim": "tasks"},
    "redis": {"image": f"valkey/valkey:8.1-alpine@{DIGEST}"},
    "tracing": {
        "endpoint": "http://collector.monitoring:4318",
        "sampleRatio": 0.25,
        "networkPolicyPeers": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "extraGroups": [{"name": "own", "rules": []}],
        },
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "learning"}},
    },
    "networkPolicy": {"apiFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]},
    "orchestrator": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["spo.example.org"],
            "tls": [{"secretName": "spo-tls", "hosts": ["spo.example.org"]}],
        },
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways"}],
            "hosts": ["spo.example.org"],
        },
        "settings": {"max_running_jobs": 2, "max_body_bytes": 268435456},
    },
    "inference": {
        "autoscaling": {"enabled": True, "engine": "keda", "minReplicas": 1, "maxReplicas": 9},
        "settings": {"in_flight": "keep", "enforce_eager": True, "drain_seconds": 45},
        "priorityClassName": "low",
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
    "sandboxJudge": {"autoscaling": {"enabled": True, "engine": "hpa"}, "runtimeClassName": "gvisor"},
    "verifier": {
        "autoscaling": {"enabled": True, "engine": "hpa"},
        "hosts": ["rewards.example.org"],
        "existingSecret": "reward-keys",
    },
    "trainer": {
        "ranks": 4,
        "nodeSelector": {"pool": "train"},
        "queueName": "learning",
        "workloadLabels": {"kueue.x-k8s.io/priority-class": "high"},
        "workloadAnnotations": {"example.org/topology": "rack"},
        "livenessProbe": {"failureThreshold": 30},
        "terminationGracePeriodSeconds": 3600,
    },
}
# PUT /v1/scale, and trainers of several pods.
ELASTIC = {
    "images": {"digests": {"light": DIGEST, "judge": DIGEST, "engine": DIGEST}},
    "redis": {"image": f"valkey/valkey:8.1-alpine@{DIGEST}"},
    "scaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 6},
    "inference": {"replicas": 2},
    "models": {"existingClaim": "models"},
    "trainer": {"replicas": 2, "nodes": 4, "ranks": 8, "kind": "StatefulSet"},
    "weights": {"url": "s3://models/weights"},
    "experience": {"url": "s3://models/experience"},
    "objectStore": {"existingSecret": "bucket", "endpoint": "http://minio.storage:9000", "port": 9000},
}
# Nothing is shared but a bucket and Redis.
BUCKET = {
    "storage": {"kind": "s3", "url": "s3://spo/platform"},
    "objectStore": {"existingSecret": "bucket", "endpoint": "http://minio.storage:9000", "port": 9000},
    "models": {"downloads": [{"name": "qwen", "from": "s3://spo/models/qwen"}]},
}
KEDA = {"enabled": True, "engine": "keda", "maxReplicas": 6}
JOB_SET = {
    "scaling": {"enabled": True, "maxReplicas": 6},
    "networkPolicy": {"kubernetesApiTo": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
    "inference": {"autoscaling": KEDA},
    "sandboxJudge": {"autoscaling": KEDA},
    "verifier": {"autoscaling": KEDA},
    # The default kind: the cluster has the controller.
    "trainer": {"nodes": 2, "togetherIn": "topology.kubernetes.io/rack"},
}
EXTERNAL = {
    "redis": {"enabled": False},
    "externalRedis": {"existingSecret": "my-redis", "port": 6380, "caSecret": "my-ca"},
    "rpcToken": {"enabled": False},
    "existingSecret": "my-secret",
    "state": {"existingClaim": "my-state"},
}


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Two values files as Helm takes them, the second one over the first."""
    both = dict(under)
    for name, value in over.items():
        held = both.get(name)
        both[name] = merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return both


SETS = {
    "default": values_of("default"),
    "gpu": values_of("gpu"),
    "7b-8gpu": merged(values_of("gpu"), values_of("7b-8gpu")),
    "openshift": values_of("openshift"),
    "single-node": values_of("single-node"),
    "everything": EVERYTHING,
    "external": EXTERNAL,
    "elastic": ELASTIC,
    "job-set": JOB_SET,
    "bucket": BUCKET,
}


@pytest.fixture
def helm() -> Iterator[Helm]:
    """Helm on an empty cluster of the newest version."""
    cluster = Cluster(NEWEST)
    with serve(cluster) as kubeconfig:
        yield Helm(cluster, kubeconfig)


@pytest.fixture(scope="session", params=SETS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each set of values renders to, the test's pod included."""
    return rendered(request.param)


_RENDERED: dict[str, list[dict[str, Any]]] = {}


def rendered(name: str) -> list[dict[str, Any]]:
    """The objects of a set of values, rendered once."""
    if name not in _RENDERED:
        cluster = Cluster(NEWEST)
        with serve(cluster) as kubeconfig:
            helm = Helm(cluster, kubeconfig)
            documents = helm.install(SETS[name])
            helm.test()
            _RENDERED[name] = documents + list(cluster.of_kind("Pod").values())
    return _RENDERED[name]
