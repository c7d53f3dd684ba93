"""`spo doctor --kubernetes`: each usual misconfiguration by its name, from what clusters say; kubectl is a script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spo.cli.app import app
from spo.kubernetes_doctor import TABLE, ClusterView, KubernetesObject, findings

# An object as kubectl's JSON has it.
Json = dict[str, Any]
LABELS = {"app.kubernetes.io/name": "spo"}


def pod(name: str = "spo-inference-1", *, phase: str = "Pending", component: str = "inference", **status: Any) -> Json:
    labels = {**LABELS, "app.kubernetes.io/component": component}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}, "status": {"phase": phase, **status}}


def ready() -> Json:
    return pod(phase="Running", conditions=[{"type": "Ready", "status": "True"}])


def unplaced(message: str) -> Json:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    return pod(conditions=conditions)


def waits(reason: str, message: str, **last: Any) -> Json:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(containerStatuses=[{"name": "inference", "state": state, "lastState": last}])


def died(message: str, reason: str = "Error") -> Json:
    return waits("CrashLoopBackOff", "back-off", terminated={"reason": reason, "message": message})


def claim(storage_class: str | None = None) -> Json:
    spec = {"storageClassName": storage_class} if storage_class else {}
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "spo-state"},
        "spec": spec,
        "status": {"phase": "Pending"},
    }


def event(kind: str, name: str, reason: str, message: str) -> Json:
    about = {"kind": kind, "name": name}
    return {"kind": "Event", "type": "Warning", "reason": reason, "message": message, "involvedObject": about}


def told(*objects: Json, **others: Any) -> list[tuple[str, str]]:
    """Names of what is found, each with its mark."""
    read = {
        kind: [KubernetesObject.model_validate(each) for each in others.get(kind, [])]
        for kind in ("events", "storageclasses", "ingressclasses", "scaledobjects.keda.sh", "jobsets.jobset.x-k8s.io")
    }
    view = ClusterView(
        [KubernetesObject.model_validate(each) for each in objects],
        read["events"],
        {kind: read[kind] if kind in others else None for kind in ("storageclasses", "ingressclasses")},
        {kind: read[kind] for kind in ("scaledobjects.keda.sh", "jobsets.jobset.x-k8s.io")},
    )
    first, *rest = findings(view)
    assert "pods are ready" in first.what
    return [(each.what.partition(":")[0], each.mark) for each in rest]


SPOKEN = "0/2 nodes are available: "
ROWS: dict[str, list[Json]] = {
    "secret_missing": [
        waits("CreateContainerConfigError", 'secret "spo" not found'),
        waits("CreateContainerConfigError", "couldn't find key api-key in Secret default/spo"),
    ],
    "claim_missing": [unplaced(f'{SPOKEN}persistentvolumeclaim "my-models" not found.')],
    "image_missing": [
        waits("ImagePullBackOff", 'Back-off pulling image "spo-cpu:0.1.0"'),
        waits("ErrImageNeverPull", 'Container image "spo-cpu:0.1.0" is not present with pull policy of Never'),
        waits("InvalidImageName", 'Failed to apply default image tag "SPO/cpu"'),
    ],
    "gpu_missing": [unplaced(f"{SPOKEN}1 Insufficient cpu, 2 Insufficient nvidia.com/gpu.")],
    "nodes_too_small": [
        unplaced(f"{SPOKEN}1 Insufficient memory, 1 node(s) had untolerated taint {{control-plane: }}."),
        unplaced(f"{SPOKEN}2 Too many pods."),
    ],
    "placement_unmatched": [
        unplaced(f"{SPOKEN}2 node(s) didn't match Pod's node affinity/selector."),
        unplaced(f"{SPOKEN}2 node(s) had untolerated taint {{dedicated: train}}."),
    ],
    "memory_too_small": [died("", reason="OOMKilled")],
    "model_missing": [
        pod(
            component="models",
            phase="Failed",
            containerStatuses=[
                {"name": "model", "state": {"terminated": {"reason": "Error", "message": "no such repository"}}}
            ],
        ),
        pod(
            initContainerStatuses=[
                {"name": "model-qwen", "state": {"terminated": {"reason": "Error", "message": "no such bucket"}}}
            ]
        ),
        {
            "kind": "Job",
            "metadata": {"name": "spo-model-qwen"},
            "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]},
        },
    ],
    "claim_unbound": [unplaced(f"{SPOKEN}pod has unbound immediate PersistentVolumeClaims.")],
}


@pytest.mark.parametrize(("name", "broken"), [(name, each) for name, objects in ROWS.items() for each in objects])
def test_what_a_pod_waits_for_has_a_name(name: str, broken: Json) -> None:
    assert told(ready(), broken) == [(name, "missing")]


SET = {"kind": "ReplicaSet", "metadata": {"name": "spo-trainer-5"}, "spec": {"replicas": 1}, "status": {"replicas": 0}}


@pytest.mark.parametrize(
    ("name", "broken", "warning"),
    [
        ("secret_missing", pod(), ("FailedMount", 'MountVolume.SetUp failed for "ca" : secret "my-ca" not found')),
        ("claim_not_shared", claim("local-path"),
         ("ProvisioningFailed", "NodePath only supports ReadWriteOnce and ReadWriteOncePod (1.22+) access modes")),
        ("claim_unbound", claim("local-path"), ("ProvisioningFailed", "no disk of this zone is left")),
        ("class_missing", SET, ("FailedCreate", "pods is forbidden: no PriorityClass with name low was found")),
        ("class_missing", pod(), ("FailedCreatePodSandBox", 'RuntimeClass.node.k8s.io "gvisor" not found')),
        ("pods_refused", SET, ("FailedCreate", 'is forbidden: violates PodSecurity "restricted:latest": IPC_LOCK')),
        ("pods_refused", SET, ("FailedCreate", "pods is forbidden: exceeded quota: team, requested: cpu=4")),
        ("unnamed", SET, ("FailedCreate", "a webhook of somebody's says no")),
    ],
)  # fmt: skip
def test_a_warning_of_what_is_unwell_has_a_name(name: str, broken: Json, warning: tuple[str, str]) -> None:
    events = [event(broken["kind"], broken["metadata"]["name"], *warning)]
    known = [{"kind": "StorageClass", "metadata": {"name": "local-path"}}]
    assert told(ready(), broken, events=events, storageclasses=known) == [(name, "missing")]
    # What an object that is well once said is past; nobody may see the classes.
    assert told(ready(), events=events) == []


def test_a_claim_without_a_class_of_the_cluster_is_named_and_a_default_serves_those_that_name_none() -> None:
    other = {"kind": "StorageClass", "metadata": {"name": "standard"}}
    default = {**other, "metadata": {**other["metadata"], "annotations": {
        "storageclass.kubernetes.io/is-default-class": "true"}}}  # fmt: skip
    assert told(ready(), claim("fast"), storageclasses=[other]) == [("storage_class_missing", "missing")]
    assert told(ready(), claim(), storageclasses=[other]) == [("storage_class_missing", "missing")]
    # A class that waits for the first consumer is no fault.
    assert told(ready(), claim(), storageclasses=[default]) == []
    assert told(ready(), claim("standard"), storageclasses=[other]) == []


def test_an_object_that_no_controller_has_taken_up_is_named_with_the_controller() -> None:
    scaled = {"kind": "ScaledObject", "metadata": {"name": "spo-inference"}}
    group = {"kind": "JobSet", "metadata": {"name": "spo-trainer-0"}}
    scaler = {"kind": "HorizontalPodAutoscaler", "metadata": {"name": "spo-verifier"}}
    found = told(ready(), scaler, **{"scaledobjects.keda.sh": [scaled], "jobsets.jobset.x-k8s.io": [group]})
    assert found == [("controller_missing", "missing")] * 3

    unready = [{"type": "Ready", "status": "False", "reason": "ScaledObjectCheckFailed", "message": "no such metric"}]
    metrics = [{"type": "ScalingActive", "status": "False", "reason": "FailedGetResourceMetric", "message": "no CPU"}]
    found = told(
        ready(),
        {**scaler, "status": {"conditions": metrics}},
        **{
            "scaledobjects.keda.sh": [{**scaled, "status": {"conditions": unready}}],
            "jobsets.jobset.x-k8s.io": [{**group, "status": {"replicatedJobsStatus": [{"name": "pods"}]}}],
        },
    )
    # Replicas stay as they are without metrics: the release runs.
    assert found == [("unnamed", "missing"), ("controller_missing", "absent")]


def test_an_ingress_of_an_unknown_class_is_named() -> None:
    ingress = {"kind": "Ingress", "metadata": {"name": "spo"}, "spec": {"ingressClassName": "nginx"}}
    assert told(ready(), ingress, ingressclasses=[]) == [("class_missing", "missing")]
    known = [{"kind": "IngressClass", "metadata": {"name": "nginx"}}]
    assert told(ready(), ingress, ingressclasses=known) == told(ready(), ingress) == []


def test_a_service_that_cannot_start_is_named_by_its_own_error_code() -> None:
    line = json.dumps({"event": "the process cannot start", "code": "redis_unfit", "reason": "it evicts"})
    (check,) = findings(ClusterView([KubernetesObject.model_validate(each) for each in [died(f"{{}}\n{line}\n")]]))[1:]
    assert check.what == "redis_unfit: pod spo-inference-1, container inference: it evicts"
    assert check.step
    assert told(died("Traceback\nValueError: 3")) == [("unnamed", "missing")]
    assert told(died('["code"]\n{"code": "none_of_ours"}')) == [("unnamed", "missing")]


def test_what_starts_goes_or_has_come_back_is_no_fault() -> None:
    starting = pod(containerStatuses=[{"name": "a", "state": {"waiting": {"reason": "ContainerCreating"}}}])
    going = waits("ImagePullBackOff", "")
    going["metadata"]["deletionTimestamp"] = "2026-11-27T00:00:00Z"
    back = {**ready()["status"], "containerStatuses": [{"name": "a", "lastState": {"terminated": {"reason": "Error"}}}]}
    tested = pod("spo-test", component="test", phase="Failed")
    assert told(ready(), starting, going, {**ready(), "status": back}, tested) == []
    # One that went over its memory will do so again.
    back["containerStatuses"][0]["lastState"]["terminated"]["reason"] = "OOMKilled"
    assert told({**ready(), "status": back}) == [("memory_too_small", "absent")]


@pytest.mark.parametrize("placed", ["True", "Unknown"])
def test_a_pod_that_has_its_place_is_not_blamed_for_the_schedulers_first_try(placed: str) -> None:
    starting = pod(phase="Running", conditions=[{"type": "PodScheduled", "status": placed}])
    words = 'running PreBind plugin "VolumeBinding": the object has been modified'
    events = [event("Pod", "spo-inference-1", "FailedScheduling", words)]
    assert told(starting, events=events) == ([] if placed == "True" else [("unnamed", "missing")])


def test_every_row_of_the_table_has_a_test_and_pods_alike_are_one_finding() -> None:
    others = {"storage_class_missing", "claim_not_shared", "class_missing", "pods_refused", "controller_missing"}
    assert {row.name for row in TABLE} == set(ROWS) | others
    assert told(*[waits("CreateContainerConfigError", 'secret "spo" not found')] * 7) == [("secret_missing", "missing")]


def doctor(folder: Path, script: str, patch: pytest.MonkeyPatch) -> tuple[int, list[Json]]:
    """Exit status and findings of the command, with a kubectl that is this script; "" for none."""
    if script:
        (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "kubectl").chmod(0o755)
    patch.setenv("PATH", f"{folder}:/bin" if script else str(folder))
    done = CliRunner().invoke(app, ["doctor", "--kubernetes", "-n", "learning", "-o", "json"])
    return done.exit_code, json.loads(done.stdout)


def test_the_command_asks_kubectl_and_ends_with_1_only_where_the_release_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Classes may be forbidden, and kinds unknown.
    answers = f"""echo "$@" >> {tmp_path}/asked
case "$*" in *" pods,"*) cat {tmp_path}/pods.json;; *) echo forbidden >&2; exit 1;; esac"""

    def found(*pods: Json) -> tuple[int, list[tuple[str, str]]]:
        (tmp_path / "pods.json").write_text(json.dumps({"items": pods}))
        status, rows = doctor(tmp_path, answers, monkeypatch)
        return status, [(row["what"].partition(":")[0], row["finding"]) for row in rows]

    assert found(ready()) == (0, [("1 of 1 pods are ready", "ok")])
    assert found(waits("ErrImagePull", "")) == (1, [("0 of 1 pods are ready", "absent"), ("image_missing", "missing")])
    assert found() == (1, [("0 of 0 pods are ready", "missing")])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) > 9
    assert all(line.startswith("--namespace learning get ") and line.endswith(" -o json") for line in asked)
    assert not any("secret" in line for line in asked)


@pytest.mark.parametrize(
    ("script", "what", "words"),
    [
        ("", "kubectl", "install kubectl"),
        ("echo connection refused >&2; exit 1", "the cluster answers", "connection refused"),
        ("echo not JSON", "the cluster answers", "Expecting value"),
    ],
)
def test_without_kubectl_or_a_cluster_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, what: str, words: str
) -> None:
    status, rows = doctor(tmp_path, script, monkeypatch)
    assert (status, rows[0]["what"]) == (1, what)
    assert words in rows[0]["step"]


def test_the_documented_table_is_that_of_the_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    section = page.partition("## On Kubernetes\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [row.name for row in TABLE]
