"""`spo doctor --kubernetes`: what keeps a release of the chart from running, by name, from what `kubectl get` says.

It reads pods, what makes them, claims, events, classes and autoscalers, and no Secret: that one is missing is said by
the kubelet. What objects complain of is held against `TABLE`; a complaint that no row knows is told as it is.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from spo.console import Output
from spo.doctor import DoctorCheck, report
from spo.errors import catalogue

KUBECTL_SECONDS = 60
SHOWN_LETTERS = 300
LABEL = "app.kubernetes.io/name=spo"
COMPONENT = "app.kubernetes.io/component"
# Asked for together, since every cluster knows them.
KINDS = "pods,replicasets.apps,statefulsets.apps,jobs.batch,persistentvolumeclaims,horizontalpodautoscalers,ingresses"
# Each of these may be unknown here, or not ours to see; the second are objects of a kind with a controller of its own.
CLASSES = ("storageclasses", "ingressclasses")
CONTROLLED = {"scaledobjects.keda.sh": "KEDA", "jobsets.jobset.x-k8s.io": "JobSet"}
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore")


class Metadata(_Part):
    """Of an object; labels are the chart's."""

    name: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str = ""


class Reason(_Part):
    """Why a container waits or has ended."""

    reason: str = ""
    message: str = ""


class ContainerStates(_Part):
    """Of its states at most one is set."""

    waiting: Reason | None = None
    terminated: Reason | None = None


class ContainerStatus(_Part):
    """What the kubelet says of a container, now and of its run before."""

    name: str
    state: ContainerStates = ContainerStates()
    last_state: ContainerStates = ContainerStates()


class Condition(_Part):
    """status: True, False or Unknown."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""


class Status(_Part):
    """Of a pod, a workload, a claim or an autoscaler."""

    phase: str = ""
    replicas: int = 0
    # Of a JobSet that its controller has taken up.
    replicated_jobs_status: list[object] = Field(default_factory=list)
    conditions: list[Condition] = Field(default_factory=list)
    init_container_statuses: list[ContainerStatus] = Field(default_factory=list)
    container_statuses: list[ContainerStatus] = Field(default_factory=list)

    def condition(self, kind: str) -> Condition:
        """The condition of a type, Unknown where there is none."""
        return next((each for each in self.conditions if each.type == kind), Condition(type=kind))


class Spec(_Part):
    """What of a spec is looked at."""

    replicas: int | None = None
    storage_class_name: str | None = None
    ingress_class_name: str | None = None


class InvolvedObject(_Part):
    """Whom an event is about."""

    kind: str = ""
    name: str = ""


class KubernetesObject(_Part):
    """One object of `kubectl get -o json`; an event has the last five fields."""

    kind: str
    metadata: Metadata = Metadata()
    spec: Spec = Spec()
    status: Status = Status()
    involved_object: InvolvedObject = InvolvedObject()
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None

    @property
    def where(self) -> str:
        return f"{self.kind.lower()} {self.metadata.name}"


class ObjectList(_Part):
    """The answer of `kubectl get`."""

    items: list[KubernetesObject] = Field(default_factory=list)


@dataclass(frozen=True)
class Complaint:
    """What an object says is wrong with it; needed: the release does not run with it."""

    where: str
    reason: str
    message: str
    needed: bool = True


@dataclass(frozen=True)
class Misconfiguration:
    """A row of the table: what `told` finds in "REASON: MESSAGE" of a complaint is this."""

    name: str
    told: re.Pattern[str]
    why: str
    step: str


def _row(name: str, told: str, why: str, step: str) -> Misconfiguration:
    return Misconfiguration(name, re.compile(told, re.IGNORECASE), why, step)


# The first row that knows a complaint names it.
TABLE = (
    _row(
        "secret_missing",
        r"secrets? \"[^\"]+\" not found|couldn't find key \S+ in secret|references non-existent secret key",
        "passwords, keys and tokens come from Secrets",
        "make the Secret with this key, or correct the value that names it: existingSecret, externalRedis, "
        "objectStore, models.hubSecret, imagePullSecrets",
    ),
    _row(
        "claim_missing",
        r"persistentvolumeclaim \"[^\"]+\" not found",
        "models, task files or the state are on a claim of yours",
        "make the claim in this namespace, or correct models.existingClaim, tasks.existingClaim or state.existingClaim",
    ),
    _row(
        "storage_class_missing",
        r"storageclass\S* \"[^\"]+\" not found|no storage class",
        "a claim gets a volume from its class",
        "`kubectl get storageclass`; name one in state.storageClass, models.storageClass and redis.storageClass, or "
        "storage.kind=s3",
    ),
    _row(
        "claim_not_shared",
        r"only supports? ReadWriteOnce|access ?modes?.{0,60}(not supported|unsupported|invalid)|MULTI_NODE_MULTI_WRITER"
        r"|multi-attach error",
        "pods on several nodes share the state, which takes ReadWriteMany",
        "a class that offers ReadWriteMany, values-single-node.yaml on one node, or storage.kind=s3",
    ),
    _row(
        "image_missing",
        r"^(ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|ImageInspectError)\b",
        "the node has no such image and the registry does not give it",
        "images.registry, images.tag, images.digests and imagePullSecrets; without a registry load the images into "
        "each node (docs/kubernetes.md, 1)",
    ),
    _row(
        "gpu_missing",
        r"insufficient \S+/\S*(gpu|xpu|gaudi)|insufficient \S+/mig-",
        "the pod asks for a GPU that no node offers",
        "the device plugin on nodes with free GPUs; fewer replicas or tensor parallel ranks; without GPUs leave out "
        "values-gpu.yaml",
    ),
    _row(
        "nodes_too_small",
        r"insufficient (cpu|memory|ephemeral-storage|hugepages)|too many pods",
        "no node has room for what the pod requests",
        "larger or more nodes, smaller resources.requests, or values-single-node.yaml",
    ),
    _row(
        "placement_unmatched",
        r"untolerated taint|didn't match pod('s)? (node affinity|node selector|affinity|anti-affinity|topology)",
        "nodes with room are not allowed",
        "nodeSelector, tolerations, affinity and trainer.togetherIn against `kubectl get nodes --show-labels`",
    ),
    _row(
        "class_missing",
        r"no priorityclass with name|runtimeclass\S* \"[^\"]+\" not found|ingressclass \S+ is not there",
        "the pod or Ingress names a class that the cluster does not have",
        "make the class, or correct priorityClassName, runtimeClassName or orchestrator.ingress.className",
    ),
    _row(
        "pods_refused",
        r"violates PodSecurity|security context constraint|exceeded quota|must specify (limits|requests)",
        "the namespace's rules refuse the pod",
        "what the message names: the namespace's pod security level (trainer.rdma needs more than restricted), its "
        "ResourceQuota, values-openshift.yaml on OpenShift",
    ),
    _row(
        "controller_missing",
        r"^(NoController|FailedGet\w*Metric\w*|FailedComputeMetricsReplicas)\b",
        "objects of this kind do nothing without their controller",
        "install the controller that is named, or switch off what asks for it: autoscaling.enabled, "
        "trainer.kind=StatefulSet",
    ),
    _row(
        "memory_too_small",
        r"OOMKilled",
        "the kernel ends a container that goes over its limit",
        "a larger resources.limits.memory, or less in it: `spo plan` counts a job's need",
    ),
    _row(
        "model_missing",
        r"^ModelFailed\b",
        "jobs name the folder that this was to fill",
        "correct models.downloads (address, models.hubSecret, a way out of the cluster), then `helm upgrade`",
    ),
    _row(
        "claim_unbound",
        r"unbound immediate persistentvolumeclaims|^ProvisioningFailed\b|^FailedBinding\b",
        "the pod waits for a volume",
        "`kubectl describe pvc`: the provisioner of its class says why",
    ),
)  # fmt: skip


@dataclass
class ClusterView:
    """What was read. Classes that may not be read are None: nothing is said of them then."""

    objects: list[KubernetesObject]
    events: list[KubernetesObject] = field(default_factory=list)
    classes: dict[str, list[KubernetesObject] | None] = field(default_factory=dict)
    controlled: dict[str, list[KubernetesObject]] = field(default_factory=dict)

    def of_kind(self, *kinds: str) -> list[KubernetesObject]:
        """The release's objects that stay. The pod of `helm test` is none: it says itself what it found."""
        chosen = [each for each in self.objects if each.kind in kinds and not each.metadata.deletion_timestamp]
        return [each for each in chosen if each.metadata.labels.get(COMPONENT) != "test"]


class KubectlError(Exception):
    """kubectl is not there, does not reach the cluster, or answers with something else; the message is its own."""


def _got(namespace: str, *arguments: str) -> list[KubernetesObject]:
    """What `kubectl get` finds. Raises KubectlError."""
    chosen = ["--namespace", namespace] if namespace else []
    command = ["kubectl", *chosen, "get", *arguments, "-o", "json"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_SECONDS, check=True)
        return ObjectList.model_validate(json.loads(asked.stdout)).items
    except subprocess.CalledProcessError as error:
        raise KubectlError(str(error.stderr).strip()[-SHOWN_LETTERS:]) from None
    except (OSError, subprocess.TimeoutExpired, ValueError, ValidationError) as error:
        raise KubectlError(str(error)[:SHOWN_LETTERS]) from None


def _optional(namespace: str, *arguments: str) -> list[KubernetesObject] | None:
    try:
        return _got(namespace, *arguments)
    except KubectlError:
        return None


def seen(namespace: str) -> ClusterView:
    """Ask the cluster of kubectl's context; namespace "" is the context's. Raises KubectlError."""
    return ClusterView(
        _got(namespace, KINDS, "-l", LABEL),
        _optional(namespace, "events") or [],
        {kind: _optional(namespace, kind) for kind in CLASSES},
        {kind: _optional(namespace, kind, "-l", LABEL) or [] for kind in CONTROLLED},
    )


def complaints(view: ClusterView) -> list[Complaint]:
    """What the release's objects say is wrong with them now; what an event tells of an object that is well is past."""
    found: list[Complaint] = []
    unwell: set[tuple[str, str]] = set()
    placed: set[str] = set()
    for pod in view.of_kind("Pod"):
        told = list(_of_pod(pod))
        found += told
        if pod.status.condition("PodScheduled").status == "True":
            placed.add(pod.where)
        if pod.status.phase != "Succeeded" and pod.status.condition("Ready").status != "True":
            unwell.add(("Pod", pod.metadata.name))
    for maker in view.of_kind("ReplicaSet", "StatefulSet", "Job"):
        wanted = 1 if maker.kind == "Job" else maker.spec.replicas or 0
        if maker.status.replicas < wanted:
            unwell.add((maker.kind, maker.metadata.name))
        failed = maker.status.condition("Failed")
        if maker.kind == "Job" and failed.status == "True":
            found.append(Complaint(maker.where, "ModelFailed", f"{failed.reason}: {failed.message}"))
    for claim in view.of_kind("PersistentVolumeClaim"):
        if claim.status.phase != "Bound":
            unwell.add((claim.kind, claim.metadata.name))
            found += _of_class(claim, view.classes.get("storageclasses"))
    found += _of_controllers(view)
    # A scheduler that has tried twice leaves the first try's warning behind.
    events = [
        each
        for each in view.events
        if each.reason != "FailedScheduling"
        or f"{each.involved_object.kind.lower()} {each.involved_object.name}" not in placed
    ]
    return found + list(_of_events(events, unwell, found))


def _of_pod(pod: KubernetesObject) -> Iterator[Complaint]:
    """By its place, its containers, and the run before of a container that has come back."""
    status = pod.status
    ready = status.phase == "Succeeded" or status.condition("Ready").status == "True"
    scheduled = status.condition("PodScheduled")
    if scheduled.status == "False":
        yield Complaint(pod.where, scheduled.reason, scheduled.message)
    model = pod.metadata.labels.get(COMPONENT) == "models"
    for container in [*status.init_container_statuses, *status.container_statuses]:
        waits, ended, before = container.state.waiting, container.state.terminated, container.last_state.terminated
        where = f"{pod.where}, container {container.name}"
        if (before or ended or Reason()).reason == "OOMKilled":
            yield Complaint(where, "OOMKilled", "it went over its memory limit", needed=not ready)
        elif ready:
            continue
        elif waits and waits.reason not in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
            yield Complaint(where, waits.reason, waits.message)
        elif (died := ended or before) and died.reason not in ("", "Completed"):
            fetches = model or container.name.startswith("model-")
            yield Complaint(where, "ModelFailed" if fetches else died.reason, died.message)


def _of_class(claim: KubernetesObject, classes: list[KubernetesObject] | None) -> Iterator[Complaint]:
    name = claim.spec.storage_class_name
    if classes is None:
        return
    if name and all(each.metadata.name != name for each in classes):
        yield Complaint(claim.where, "ProvisioningFailed", f'storageclass "{name}" not found')
    elif not name and all(each.metadata.annotations.get(DEFAULT_CLASS) != "true" for each in classes):
        yield Complaint(claim.where, "FailedBinding", "it names no storage class, and none is the default")


def _of_controllers(view: ClusterView) -> Iterator[Complaint]:
    """A controller that is there writes a condition into each of its objects."""
    for kind, controller in CONTROLLED.items():
        for each in view.controlled.get(kind, []):
            ready = each.status.condition("Ready")
            if not (each.status.conditions or each.status.replicated_jobs_status):
                yield Complaint(each.where, "NoController", f"{controller} has not taken it up")
            elif ready.status == "False":
                yield Complaint(each.where, ready.reason, ready.message)
    for scaler in view.of_kind("HorizontalPodAutoscaler"):
        active = scaler.status.condition("ScalingActive")
        if not scaler.status.conditions:
            yield Complaint(scaler.where, "NoController", "no controller has taken it up")
        elif active.status == "False" and active.reason != "ScalingDisabled":
            message = f"{active.message} (CPU comes from metrics-server)"
            yield Complaint(scaler.where, active.reason, message, needed=False)
    classes = view.classes.get("ingressclasses")
    for ingress in view.of_kind("Ingress"):
        name = ingress.spec.ingress_class_name
        if classes is not None and name and all(each.metadata.name != name for each in classes):
            yield Complaint(ingress.where, "NoClass", f"ingressclass {name} is not there")


def _of_events(
    events: Iterable[KubernetesObject], unwell: set[tuple[str, str]], known: list[Complaint]
) -> Iterator[Complaint]:
    """The last warning of each reason of an object that is unwell and has not said why itself."""
    said = {each.where.partition(",")[0] for each in known}
    last: dict[tuple[str, str], Complaint] = {}
    for event in sorted(events, key=lambda each: each.last_timestamp or ""):
        about = event.involved_object
        where = f"{about.kind.lower()} {about.name}"
        if event.type == "Warning" and (about.kind, about.name) in unwell and where not in said:
            # A probe that fails is a pod that is not ready yet: that may be as it should.
            needed = event.reason not in ("Unhealthy", "BackOff")
            last[where, event.reason] = Complaint(where, event.reason, event.message, needed)
    return iter(last.values())


class Diagnosis(NamedTuple):
    """The name of what is wrong, why that matters, what to do, and the words of the complaint."""

    name: str
    why: str
    step: str
    words: str


def diagnosis(complaint: Complaint) -> Diagnosis:
    """By a service's own error code, by the table, or "unnamed" with the complaint as it is."""
    for line in reversed(complaint.message.splitlines()):
        # The last lines of a process' log are the message of its container.
        try:
            entry = json.loads(line)
            code, said = str(entry["code"]), str(entry.get("reason", ""))
        except (ValueError, TypeError, KeyError):
            continue
        if code in catalogue():
            return Diagnosis(code, catalogue()[code].meaning, catalogue()[code].remedy, said[:SHOWN_LETTERS])
    told = f"{complaint.reason}: {' '.join(complaint.message.split())}"
    shown = told[:SHOWN_LETTERS]
    row = next((each for each in TABLE if each.told.search(told)), None)
    if row is None:
        step = f"`kubectl describe {complaint.where.partition(',')[0]}`"
        return Diagnosis("unnamed", "the cluster says so", step, shown)
    return Diagnosis(row.name, row.why, row.step, shown)


def findings(view: ClusterView) -> list[DoctorCheck]:
    """How many pods are ready, and a finding for each misconfiguration with the objects that have it."""
    pods = [each for each in view.of_kind("Pod") if each.status.phase != "Succeeded"]
    ready = sum(each.status.condition("Ready").status == "True" for each in pods)
    step = "what follows says why; else they are starting" if pods else "`helm list --all-namespaces`, then --namespace"
    why = "a release of the chart is pods with its labels"
    checks = [DoctorCheck(f"{ready} of {len(pods)} pods are ready", 0 < len(pods) == ready, why, step, needed=not pods)]
    grouped: dict[tuple[str, str], list[Complaint]] = {}
    for complaint in complaints(view):
        found = diagnosis(complaint)
        grouped.setdefault((found.name, found.words), []).append(complaint)
    for alike in grouped.values():
        found = diagnosis(alike[0])
        others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        what = f"{found.name}: {alike[0].where}{others}: {found.words}"
        checks.append(
            DoctorCheck(what, well=False, why=found.why, step=found.step, needed=any(each.needed for each in alike))
        )
    return checks


def examine_cluster(namespace: str, output: Output) -> bool:
    """Print every finding; True when nothing keeps the release from running."""
    why = "the cluster is asked by kubectl, with its context and rights"
    if shutil.which("kubectl") is None:
        return report([DoctorCheck("kubectl", well=False, why=why, step="install kubectl")], output)
    try:
        view = seen(namespace)
    except KubectlError as error:
        step = f"KUBECONFIG and its context: {error}"
        return report([DoctorCheck("the cluster answers", well=False, why=why, step=step)], output)
    return report(findings(view), output)
