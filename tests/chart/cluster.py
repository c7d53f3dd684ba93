"""An in-memory Kubernetes cluster: objects are validated strictly, stored, and ready at once.

What the API server of `api_server.py` answers from. Enough for Helm to install, upgrade, test and uninstall a chart;
not a scheduler: nothing runs.
"""

from __future__ import annotations

import base64
import copy
import queue
import threading
import uuid
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import extension_schemas
import jsonschema
import kubernetes_validate.utils

Object = dict[str, Any]

# group/version -> plural: kind; "!" marks kinds without a namespace.
BUILT_IN = {
    "v1": "pods:Pod services:Service secrets:Secret configmaps:ConfigMap serviceaccounts:ServiceAccount "
    "persistentvolumeclaims:PersistentVolumeClaim events:Event namespaces:Namespace!",
    "apps/v1": "deployments:Deployment replicasets:ReplicaSet statefulsets:StatefulSet",
    "batch/v1": "jobs:Job",
    "autoscaling/v2": "horizontalpodautoscalers:HorizontalPodAutoscaler",
    "policy/v1": "poddisruptionbudgets:PodDisruptionBudget",
    "networking.k8s.io/v1": "networkpolicies:NetworkPolicy ingresses:Ingress",
    "rbac.authorization.k8s.io/v1": "roles:Role rolebindings:RoleBinding",
}
EXTENSIONS = {
    "keda.sh/v1alpha1": "scaledobjects:ScaledObject triggerauthentications:TriggerAuthentication",
    "monitoring.coreos.com/v1": "servicemonitors:ServiceMonitor prometheusrules:PrometheusRule",
    "gateway.networking.k8s.io/v1": "httproutes:HTTPRoute",
    "jobset.x-k8s.io/v1alpha2": "jobsets:JobSet",
}
# Once for all objects: the library reads two megabytes of schemas, and the names of all versions, for each of them.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
kubernetes_validate.utils.all_versions = cache(kubernetes_validate.utils.all_versions)
IMMUTABLE = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates"),
    "Job": ("selector", "template"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
}
MERGE_KEYS = ("name", "mountPath", "containerPort", "port", "topologyKey")


class Refused(Exception):
    """The cluster's answer to a bad request: HTTP status, reason, message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Kind:
    """One resource type as discovery lists it."""

    group_version: str
    plural: str
    kind: str
    namespaced: bool


@dataclass(frozen=True)
class Place:
    """Where an object is."""

    kind: Kind
    namespace: str | None
    name: str | None = None


@dataclass
class Cluster:
    """Objects by kind, namespace and name; `version` picks the schemas, `extensions` whether KEDA and co. are there."""

    version: str
    extensions: bool = True
    objects: dict[tuple[str, str, str | None, str], Object] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    revision: int = 100
    watchers: list[tuple[queue.Queue[Object], Place]] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = {**BUILT_IN, **(EXTENSIONS if self.extensions else {})}
        pairs = [(group, entry.split(":")) for group, names in groups.items() for entry in names.split()]
        self.kinds = [Kind(group, plural, kind.rstrip("!"), kind[-1] != "!") for group, (plural, kind) in pairs]
        self.group_versions = list(groups)
        namespace = {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "default"}}
        self.save(Place(self.kind("v1", "namespaces"), None, "default"), namespace)

    def kind(self, group_version: str, plural: str) -> Kind:
        for kind in self.kinds:
            if (kind.group_version, kind.plural) == (group_version, plural):
                return kind
        raise Refused(404, "NotFound", f"no resource {plural} in {group_version}")

    def get(self, place: Place) -> Object:
        found = self.objects.get(_key(place))
        if found is None:
            raise Refused(404, "NotFound", f'{place.kind.plural} "{place.name}" not found')
        return found

    def list(self, place: Place, labels: str = "", fields: str = "") -> list[Object]:
        with self.lock:
            return [
                held
                for (group, plural, namespace, _), held in self.objects.items()
                if (group, plural) == (place.kind.group_version, place.kind.plural)
                and place.namespace in (None, namespace)
                and selected(held, labels, fields)
            ]

    def of_kind(self, kind: str) -> dict[str, Object]:
        """Objects of a kind by name, of all namespaces."""
        return {held["metadata"]["name"]: held for held in self.objects.values() if held["kind"] == kind}

    def create(self, place: Place, new: Object, dry_run: bool = False) -> Object:
        if _key(place) in self.objects:
            raise Refused(409, "AlreadyExists", f'{place.kind.plural} "{place.name}" already exists')
        return self.save(place, new, dry_run)

    def replace(self, place: Place, new: Object, dry_run: bool = False) -> Object:
        old = self.get(place)
        for name in IMMUTABLE.get(place.kind.kind, ()):
            if new["spec"].get(name) != old["spec"].get(name):
                raise Refused(422, "Invalid", f"{place.kind.kind} {place.name}: spec.{name} is immutable")
        return self.save(place, new, dry_run)

    def apply(self, place: Place, new: Object, dry_run: bool = False) -> Object:
        if _key(place) not in self.objects:
            return self.save(place, new, dry_run)
        kept = self.get(place)["metadata"]
        return self.replace(place, {**new, "metadata": {**kept, **new["metadata"]}}, dry_run)

    def delete(self, place: Place) -> None:
        with self.lock:
            old = self.get(place)
            del self.objects[_key(place)]
            self.revision += 1
            self._tell("DELETED", place, old)

    def save(self, place: Place, new: Object, dry_run: bool = False) -> Object:
        new = {"apiVersion": place.kind.group_version, "kind": place.kind.kind, **copy.deepcopy(new)}
        self._validate(place, new)
        with self.lock:
            old = self.objects.get(_key(place))
            self.revision += 1
            described = new["metadata"]
            described.update(resourceVersion=str(self.revision), creationTimestamp="2026-01-01T00:00:00Z")
            described["uid"] = old["metadata"]["uid"] if old else str(uuid.uuid4())
            if place.namespace:
                described["namespace"] = place.namespace
            changed = old is not None and old.get("spec") != new.get("spec")
            described["generation"] = (old["metadata"]["generation"] if old else 1) + changed
            for name, text in (new.pop("stringData", None) or {}).items():
                new.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
            new |= ready_status(new)
            if not dry_run:
                self.objects[_key(place)] = new
                self._tell("MODIFIED" if old else "ADDED", place, new)
        return new

    def watch(self, place: Place) -> queue.Queue[Object]:
        news: queue.Queue[Object] = queue.Queue()
        self.watchers.append((news, place))
        return news

    def unwatch(self, news: queue.Queue[Object]) -> None:
        self.watchers = [watcher for watcher in self.watchers if watcher[0] is not news]

    def _tell(self, event: str, place: Place, changed: Object) -> None:
        for news, watched in self.watchers:
            if watched.kind == place.kind and watched.namespace in (None, place.namespace):
                news.put({"type": event, "object": changed})

    def _validate(self, place: Place, new: Object) -> None:
        if new["kind"] != place.kind.kind:
            raise Refused(422, "Invalid", f"kind {new['kind']} is not {place.kind.kind}")
        judged = {name: value for name, value in new.items() if name != "status"}
        try:
            if place.kind.group_version in EXTENSIONS:
                extension_schemas.validate(judged, self.version)
            else:
                kubernetes_validate.validate(judged, self.version, strict=True)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            path = ".".join(map(str, error.path))
            raise Refused(422, "Invalid", f"{new['kind']} {place.name}: {path}: {error.message}") from error


def _key(place: Place) -> tuple[str, str, str | None, str]:
    return place.kind.group_version, place.kind.plural, place.namespace, place.name or ""


def selected(held: Object, labels: str, fields: str) -> bool:
    """Whether an object matches label and field selectors of the forms a=b, a==b and a!=b."""
    own = held["metadata"].get("labels") or {}
    for term in filter(None, labels.split(",")):
        name, _, wanted = term.replace("==", "=").partition("=")
        if (own.get(name.rstrip("!")) == wanted) == name.endswith("!"):
            return False
    names = [term.replace("==", "=").partition("=")[2] for term in fields.split(",") if "metadata.name" in term]
    return all(held["metadata"]["name"] == name for name in names)


def ready_status(new: Object) -> Object:
    """The status of an object whose pods are all well."""
    replicas = (new.get("spec") or {}).get("replicas", 1)
    counts = {"observedGeneration": new["metadata"]["generation"], "replicas": replicas, "updatedReplicas": replicas}
    counts |= {"readyReplicas": replicas, "availableReplicas": replicas}

    def condition(name: str, reason: str = "Emulated") -> Object:
        return {"type": name, "status": "True", "reason": reason, "lastTransitionTime": "2026-01-01T00:00:00Z"}

    match new["kind"]:
        case "Deployment":
            progressing = condition("Progressing", "NewReplicaSetAvailable")
            return {"status": {**counts, "conditions": [condition("Available"), progressing]}}
        case "StatefulSet":
            return {"status": {**counts, "currentReplicas": replicas, "currentRevision": "r", "updateRevision": "r"}}
        case "Pod":
            return {"status": {"phase": "Succeeded", "conditions": [condition("Ready"), condition("PodScheduled")]}}
        case "Job":
            return {"status": {"succeeded": 1, "conditions": [condition("Complete")]}}
        case "PodDisruptionBudget":
            healthy = {"currentHealthy": 1, "desiredHealthy": 1, "disruptionsAllowed": 0, "expectedPods": 1}
            return {"status": {"observedGeneration": counts["observedGeneration"], **healthy}}
        case "PersistentVolumeClaim":
            return {"status": {"phase": "Bound"}}
        case "Namespace":
            return {"status": {"phase": "Active"}}
    return {}


def merged(old: Any, new: Any) -> Any:
    """A patch applied: maps merge, null deletes, lists of named things merge by name (strategic merge, roughly)."""
    if isinstance(old, list) and isinstance(new, list) and new and all(isinstance(each, dict) for each in old + new):
        for key in MERGE_KEYS:
            if all(key in each for each in old + new):
                by_name = {each[key]: each for each in old}
                for each in new:
                    if each.get("$patch") == "delete":
                        by_name.pop(each[key], None)
                    else:
                        by_name[each[key]] = merged(by_name.get(each[key], {}), each)
                return list(by_name.values())
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    result = dict(old)
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        elif not key.startswith(("$setElementOrder", "$retainKeys")):
            result[key] = merged(old.get(key), value) if key in old else value
    return result
