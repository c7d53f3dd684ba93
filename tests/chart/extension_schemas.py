"""What the makers of the chart's custom resources document, strictly: no field they do not know, no type they refuse.

KEDA 2.21 (ScaledObject, TriggerAuthentication, the metrics-api trigger), Gateway API v1, JobSet v1alpha2, Prometheus
operator v1. Only the fields that a chart like this one could use; a new one is added here from its documentation first.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

Object = dict[str, Any]


def _object(required: str = "", /, **properties: Any) -> Object:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def _list(entries: Any, least: int = 0) -> Object:
    return {"type": "array", "items": entries, "minItems": least}


def _whole(least: int, most: int = 2**31 - 1) -> Object:
    return {"type": "integer", "minimum": least, "maximum": most}


TEXT = {"type": "string", "minLength": 1}
NUMBER_AS_TEXT = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
SWITCH = {"type": "boolean"}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}

# KEDA hands the behaviour to an autoscaling/v2 HorizontalPodAutoscaler.
_policy = _object(
    "type value periodSeconds",
    type={"enum": ["Pods", "Percent"]},
    value=_whole(1),
    periodSeconds=_whole(1, 1800),
)
_rules = _object(
    stabilizationWindowSeconds=_whole(0, 3600),
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=_list(_policy, 1),
)
# keda.sh/docs, scalers, "Metrics API": every value is a string.
_metrics_api = _object(
    "url valueLocation targetValue",
    url={"type": "string", "pattern": r"^https?://[a-z0-9.-]+(:[0-9]+)?/.*$"},
    format={"enum": ["json", "xml", "yaml", "prometheus"]},
    valueLocation=TEXT,
    targetValue=NUMBER_AS_TEXT,
    activationTargetValue=NUMBER_AS_TEXT,
    unsafeSsl={"enum": ["true", "false"]},
    timeout=TEXT,
    authMode={"type": "string", "pattern": "^(apiKey|basic|tls|bearer)(,(apiKey|basic|tls|bearer))*$"},
)
_trigger = _object(
    "type metadata",
    type={"const": "metrics-api"},
    name=TEXT,
    metadata=_metrics_api,
    metricType={"enum": ["AverageValue", "Value"]},
    useCachedMetrics=SWITCH,
    authenticationRef=_object(
        "name", name=TEXT, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}
    ),
)
_cron = _object("timezone start end desiredReplicas", timezone=TEXT, start=TEXT, end=TEXT, desiredReplicas=TEXT)
_cron_trigger = _object("type metadata", type={"const": "cron"}, name=TEXT, metadata=_cron)
_scaled_object = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", name=TEXT, kind=TEXT, apiVersion=TEXT, envSourceContainerName=TEXT),
    pollingInterval=_whole(1),
    cooldownPeriod=_whole(0),
    initialCooldownPeriod=_whole(0),
    idleReplicaCount=_whole(0),
    minReplicaCount=_whole(0),
    maxReplicaCount=_whole(1),
    fallback=_object(
        "failureThreshold replicas",
        failureThreshold=_whole(0),
        replicas=_whole(0),
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    advanced=_object(
        restoreToOriginalReplicaCount=SWITCH,
        horizontalPodAutoscalerConfig=_object(name=TEXT, behavior=_object(scaleUp=_rules, scaleDown=_rules)),
    ),
    triggers=_list({"anyOf": [_trigger, _cron_trigger]}, 1),
)
_trigger_authentication = _object(
    "secretTargetRef",
    secretTargetRef=_list(_object("parameter name key", parameter=TEXT, name=TEXT, key=TEXT), 1),
)
_http_route = _object(
    "parentRefs rules",
    parentRefs=_list(_object("name", name=TEXT, namespace=TEXT, sectionName=TEXT, port=_whole(1, 65535)), 1),
    hostnames=_list({"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}),
    rules=_list(
        _object(
            "backendRefs",
            backendRefs=_list(_object("name port", name=TEXT, port=_whole(1, 65535))),
            timeouts=_object(request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        ),
        1,
    ),
)
_job_set = _object(
    "replicatedJobs",
    failurePolicy=_object(maxRestarts=_whole(0), restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}),
    network=_object(enableDNSHostnames=SWITCH, publishNotReadyAddresses=SWITCH, subdomain=TEXT),
    replicatedJobs=_list(_object("name template", name=TEXT, replicas=_whole(1), template={"type": "object"}), 1),
)
_service_monitor = _object(
    "selector endpoints",
    selector=_object(matchLabels=STRINGS),
    endpoints=_list(
        _object(
            "port",
            port=TEXT,
            path=TEXT,
            interval=TEXT,
            authorization=_object("credentials", type=TEXT, credentials=_object("name key", name=TEXT, key=TEXT)),
        ),
        1,
    ),
)
_rule = _object("alert expr", alert=TEXT, expr=TEXT, labels=STRINGS, annotations=STRINGS, **{"for": TEXT})
_prometheus_rule = _object("groups", groups=_list(_object("name rules", name=TEXT, rules=_list(_rule)), 1))
SPECS = {
    "ScaledObject": _scaled_object,
    "TriggerAuthentication": _trigger_authentication,
    "HTTPRoute": _http_route,
    "JobSet": _job_set,
    "ServiceMonitor": _service_monitor,
    "PrometheusRule": _prometheus_rule,
}


def validate(custom: Object, version: str) -> None:
    """Raise jsonschema's or kubernetes_validate's ValidationError unless the makers' controllers would take it."""
    jsonschema.validate(custom["spec"], SPECS[custom["kind"]])
    if custom["kind"] == "ScaledObject":
        least, most = custom["spec"].get("minReplicaCount", 0), custom["spec"].get("maxReplicaCount", 100)
        if least > most:
            raise jsonschema.ValidationError("minReplicaCount must be less than or equal to maxReplicaCount")
    if custom["kind"] == "JobSet":
        for replicated in custom["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, **replicated["template"]}
            kubernetes_validate.validate(job, version, strict=True)
            # The longest name a pod of it gets, as JobSet's webhook counts it: with five letters at the end.
            pods = replicated["template"]["spec"]["completions"]
            longest = f"{custom['metadata']['name']}-{replicated['name']}-{replicated['replicas'] - 1}-{pods - 1}-abcde"
            if len(longest) > 63:
                raise jsonschema.ValidationError(f"{longest} is too long for the name of a pod")
