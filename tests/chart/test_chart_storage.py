"""What each service may write: its own folders of the state claim, or with a bucket no folder that others see."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import helm_sdkpy
import pytest
from conftest import SETS, Helm, rendered
from test_chart_policy import component, of_kind, pods

Object = dict[str, Any]

STATE = "/var/lib/spo"
READ_ONLY_TEST = Path(__file__).parents[1] / "integration" / "orchestrator" / "test_read_only_state.py"
ON_A_CLAIM = sorted(set(SETS) - {"bucket"})
MODELS = ("orchestrator", "inference", "value-estimation", "trainer")


def state_mounts(pod: Object) -> dict[str, bool]:
    """Whether it is read-only, by the path in the state folder; "" is the folder itself."""
    (container,) = pod["containers"]
    found = {}
    for mount in container.get("volumeMounts", []):
        if mount["name"] == "state":
            folder = mount["mountPath"].removeprefix(STATE).lstrip("/")
            # What is mounted at a folder is that folder of the claim, and no other.
            assert mount.get("subPath", "") == folder
            found[folder] = mount.get("readOnly", False)
    return found


@pytest.mark.parametrize("name", ON_A_CLAIM)
def test_each_service_may_write_of_the_state_claim_what_it_owns_and_nothing_else(name: str) -> None:
    found = {service: mounts for service, pod in pods(rendered(name)).items() if (mounts := state_mounts(pod))}

    assert found == {
        "orchestrator": {"": False, "cache": True, "trainer": True},
        "trainer": {"": True, "weights": False, "checkpoints": False, "trainer": False},
        "inference": {"": True},
        "value-estimation": {"": True},
    }


def test_the_orchestrator_is_tested_with_the_mounts_that_the_chart_gives_it() -> None:
    tested = next(
        ast.literal_eval(node.value)
        for node in ast.parse(READ_ONLY_TEST.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MOUNTED_READ_ONLY"
    )
    mounts = state_mounts(pods(rendered("default"))["orchestrator"])
    assert {folder for folder, read_only in mounts.items() if read_only} == set(tested)


def test_with_a_bucket_there_is_no_claim_and_no_folder_that_pods_share() -> None:
    objects = rendered("bucket")

    assert of_kind(objects, "PersistentVolumeClaim") == []
    assert of_kind(objects, "Job") == []
    for name, pod in pods(objects).items():
        assert not [volume for volume in pod.get("volumes", []) if "persistentVolumeClaim" in volume], name
    # Redis' own disk, which no other pod mounts, goes with `redis.enabled: false`.
    claiming = [each for each in of_kind(objects, "StatefulSet") if each["spec"].get("volumeClaimTemplates")]
    assert [component(each["metadata"]["labels"]) for each in claiming] == ["redis"]


def test_with_a_bucket_each_service_is_told_where_its_stores_are_and_who_reads_models_fetches_them() -> None:
    objects = rendered("bucket")
    told = {
        name: {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        for name, pod in pods(objects).items()
        if "env" in pod["containers"][0]
    }

    for store, readers in {
        "STATE_STORE": set(MODELS),
        "WEIGHT_STORE": set(MODELS),
        "CHECKPOINT_STORE": {"orchestrator", "trainer"},
        "EXPERIENCE": {"orchestrator", "replay-buffer", "value-estimation"},
    }.items():
        urls = {name: found.get(f"SPO_{store}_URL") for name, found in told.items()}
        place = store.removesuffix("_STORE").lower().replace("weight", "weights").replace("checkpoint", "checkpoints")
        assert {name: url for name, url in urls.items() if url} == dict.fromkeys(readers, f"s3://spo/platform/{place}")
    assert told["orchestrator"]["SPO_ORCHESTRATOR_SHARED_STATE"] == "false"
    fetching = {
        name: [each["args"] for each in pod["initContainers"]]
        for name, pod in pods(objects).items()
        if pod.get("initContainers")
    }
    fetch = ["spo.weights.download", "s3://spo/models/qwen", "/models/qwen"]
    assert fetching == {name: [fetch] for name in MODELS}
    reach = {
        component(policy["spec"]["podSelector"]["matchLabels"])
        for policy in of_kind(objects, "NetworkPolicy")
        for rule in policy["spec"].get("egress", [])
        if {port["port"] for port in rule["ports"]} == {9000}
    }
    assert reach == {*MODELS, "replay-buffer"}


def test_a_claim_for_the_orchestrator_alone_keeps_its_folder(helm: Helm) -> None:
    objects = helm.install({**SETS["bucket"], "state": {"existingClaim": "mine"}})
    holders = {
        name
        for name, pod in pods(objects).items()
        for volume in pod.get("volumes", [])
        if volume.get("persistentVolumeClaim")
    }
    assert holders == {"orchestrator"}
    named = {each["name"] for pod in pods(objects).values() for each in pod["containers"][0].get("env", [])}
    assert "SPO_WEIGHT_STORE_URL" in named
    assert "SPO_STATE_STORE_URL" not in named


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"storage": {"kind": "s3"}}, "set storage.url"),
        ({"storage": {"url": "s3://spo/platform"}}, "storage.kind is claim"),
        ({"storage": {"kind": "s3", "url": "s3://spo/a"}, "models": {"toy": True}}, "models.toy"),
        (
            {
                "storage": {"kind": "s3", "url": "s3://spo/a"},
                "models": {"downloads": [{"name": "qwen", "from": "hf://Qwen/Qwen2.5-0.5B"}]},
            },
            "put hf://Qwen/Qwen2.5-0.5B there",
        ),
    ],
)
def test_what_cannot_work_without_a_shared_folder_is_refused_in_words(helm: Helm, values: Object, says: str) -> None:
    with pytest.raises(helm_sdkpy.InstallError, match=says):
        helm.install(values)
