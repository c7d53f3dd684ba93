"""Values that cannot work are refused at install, by the schema or in words; the README lists them all."""

from __future__ import annotations

import helm_sdkpy
import pytest
from conftest import CHART, Helm
from derived import with_table

REFUSED = {
    "replicas as a word": ({"inference": {"replicas": "three"}}, "replicas"),
    "no trainer": ({"trainer": {"replicas": 0}}, "replicas"),
    "no rank": ({"trainer": {"ranks": 0}}, "ranks"),
    "a misspelt section": ({"inferrence": {"replicas": 2}}, "inferrence"),
    "a misspelt setting": ({"inference": {"settings": {"max_sequence": 8}}}, "max_sequence"),
    "a setting the chart sets": ({"inference": {"settings": {"port": 1234}}}, "port"),
    "a setting without a value": ({"inference": {"settings": {"max_sequences": None}}}, "max_sequences"),
    "several orchestrators": ({"orchestrator": {"replicas": 2}}, "replicas"),
    "a size that is none": ({"state": {"size": "large"}}, "size"),
    "an unknown log level": ({"logLevel": "loud"}, "logLevel"),
    "an unknown scaler": ({"inference": {"autoscaling": {"enabled": True, "engine": "magic"}}}, "engine"),
    "an ingress without a host": ({"orchestrator": {"ingress": {"enabled": True}}}, "hosts"),
    "minimum above maximum": (
        {"inference": {"autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 3}}},
        "minReplicas is above maxReplicas",
    ),
    "hpa without a request": (
        {"sandboxJudge": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
        "resources.requests.cpu",
    ),
    "no Redis": ({"redis": {"enabled": False}}, "externalRedis"),
    "two Redis": ({"externalRedis": {"url": "redis://there:6379/0"}}, "both set"),
    "a password in the values": (
        {"redis": {"enabled": False}, "externalRedis": {"url": "rediss://:secret@there:6379/0"}},
        "holds a password",
    ),
    "a password of the Sentinels in the values": (
        {"redis": {"enabled": False}, "externalRedis": {"url": "redis+sentinel://there/main?sentinel_password=secret"}},
        "holds a password",
    ),
    "Sentinels that no pod may reach": (
        {"redis": {"enabled": False}, "externalRedis": {"url": "redis+sentinel://one:26379,two:26379/main"}},
        "sentinelPort",
    ),
    "two owners of a size": (
        {"scaling": {"enabled": True}, "inference": {"autoscaling": {"enabled": True}}},
        "both would set the same replicas",
    ),
    "one pool by KEDA and one by hand": (
        {
            "scaling": {"enabled": True, "maxReplicas": 4},
            "inference": {"autoscaling": {"enabled": True, "engine": "keda"}},
        },
        "for all of inference, sandboxJudge and verifier, or for none",
    ),
    "wishes that KEDA refuses": (
        {
            "scaling": {"enabled": True, "maxReplicas": 9},
            "inference": {"autoscaling": {"enabled": True, "engine": "keda"}},
        },
        "scaling.maxReplicas is above inference",
    ),
    "wishes without a range": ({"scaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is above maxReplicas"),
    "the scaler as a setting": ({"orchestrator": {"settings": {"scaler": "kubernetes"}}}, "scaler"),
    "weights in a folder without a volume": ({"weights": {"url": "/somewhere"}}, "url"),
    "experience in a folder without a volume": ({"experience": {"url": "/somewhere"}}, "url"),
    "credentials in a URL": ({"weights": {"url": "s3://key:secret@bucket/weights"}}, "url"),
    "a bucket that nothing uses": (
        {"objectStore": {"existingSecret": "bucket"}},
        "neither storage.url nor weights.url",
    ),
    "a collector without http": ({"tracing": {"endpoint": "collector:4317"}}, "endpoint"),
    "credentials of the collector": ({"tracing": {"endpoint": "https://me:secret@collector"}}, "endpoint"),
    "more traces than groups": ({"tracing": {"sampleRatio": 2}}, "sampleRatio"),
    "KEDA with an address of its own": (
        {"inference": {"autoscaling": {"enabled": True, "engine": "keda", "address": "http://prometheus"}}},
        "address",
    ),
    "no node": ({"trainer": {"nodes": 0}}, "nodes"),
    "nodes that cannot share the state": (
        {"trainer": {"nodes": 2}, "state": {"accessModes": ["ReadWriteOnce"]}},
        "ReadWriteMany",
    ),
    "state for one pod only": ({"state": {"accessModes": ["ReadWriteOncePod"]}}, "accessModes"),
    "an unknown kind of trainer": ({"trainer": {"kind": "DaemonSet"}}, "kind"),
    "a route without a gateway": ({"orchestrator": {"gateway": {"enabled": True}}}, "parentRefs"),
    "behaviour that no autoscaler has": (
        {"inference": {"autoscaling": {"behavior": {"scaleDown": {"policies": [{"type": "Nodes"}]}}}}},
        "policies",
    ),
    "a misspelt behaviour": ({"inference": {"autoscaling": {"behavior": {"scaledown": {}}}}}, "scaledown"),
    "a URL of something else": ({"redis": {"enabled": False}, "externalRedis": {"url": "http://there"}}, "url"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_and_named(helm: Helm, case: str) -> None:
    values, named = REFUSED[case]
    with pytest.raises(helm_sdkpy.InstallError, match=named):
        helm.install(values)
    assert not helm.cluster.of_kind("Deployment")


def test_the_readme_lists_the_values_as_they_are() -> None:
    readme = (CHART / "README.md").read_text()
    assert with_table(readme, (CHART / "values.yaml").read_text()) == readme, "run: make chart-files"
