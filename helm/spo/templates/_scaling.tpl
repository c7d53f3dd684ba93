{{/* PodDisruptionBudget of a service; argument as for spo.podTemplate */}}
{{- define "spo.disruptionBudget" -}}
{{- if .values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "spo.fullname" .root }}-{{ .component }}
  labels:
    {{- include "spo.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  # A pod that is not ready anyway never keeps a node from being drained.
  unhealthyPodEvictionPolicy: {{ .values.podDisruptionBudget.unhealthyPodEvictionPolicy | default "AlwaysAllow" }}
  selector:
    matchLabels:
      {{- include "spo.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* Whether PUT /v1/scale moves the lower bound of ScaledObjects rather than the size of Deployments: true or false */}}
{{- define "spo.scalesByKeda" -}}
{{- .Values.inference.autoscaling.enabled -}}
{{- end -}}

{{/*
What PUT /v1/scale asked for last, where it may: an upgrade must not take it back. Argument: root, name, apiVersion,
kind, field, default
*/}}
{{- define "spo.requestedReplicas" -}}
{{- $held := dict -}}
{{- if .root.Values.scaling.enabled -}}
{{- $held = lookup .apiVersion .kind .root.Release.Namespace .name | default dict -}}
{{- end -}}
{{- int (dig "spec" .field .default $held) -}}
{{- end -}}

{{/* Headless Service, so that a client sees every pod */}}
{{- define "spo.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "spo.fullname" .root }}-{{ .component }}
  labels:
    {{- include "spo.labels" . | nindent 4 }}
spec:
  clusterIP: None
  {{- if .early }}
  # Pods must find each other before they are ready.
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- include "spo.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: 7070, targetPort: grpc}
    - {name: metrics, port: 9090, targetPort: metrics}
{{- end -}}

{{/*
Autoscaling by CPU, or by what the jobs need (spo_wanted_replicas); argument as for spo.podTemplate, and for a pool that
PUT /v1/scale does not move: valueLocation, targetValue
*/}}
{{- define "spo.autoscaling" -}}
{{- $scaling := .values.autoscaling -}}
{{- $name := printf "%s-%s" (include "spo.fullname" .root) .component -}}
{{- if and $scaling.enabled (eq $scaling.engine "hpa") }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  labels:
    {{- include "spo.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name }}}
  minReplicas: {{ max 1 (int $scaling.minReplicas) }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $scaling.targetCPUUtilization }}}
  behavior:
    {{- toYaml $scaling.behavior | nindent 4 }}
{{- else if $scaling.enabled }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels:
    {{- include "spo.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ $name }}}
  {{- if .valueLocation }}
  minReplicaCount: {{ $scaling.minReplicas }}
  {{- else }}
  minReplicaCount: {{ include "spo.requestedReplicas" (dict "root" .root "name" $name "apiVersion" "keda.sh/v1alpha1" "kind" "ScaledObject" "field" "minReplicaCount" "default" $scaling.minReplicas) }}
  {{- end }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  pollingInterval: 15
  # When the orchestrator does not answer, the pool stays as it is: what it is busy with goes on.
  fallback: {failureThreshold: 4, replicas: {{ max 1 (int $scaling.minReplicas) }}, behavior: currentReplicasIfHigher}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml $scaling.behavior | nindent 8 }}
  triggers:
    # What the orchestrator finds that the jobs need, in replicas: AverageValue with a target of 1 asks for just so many.
    # Of runners the episodes that are open, of which each plays as many as the target.
    - type: metrics-api
      metadata:
        url: http://{{ include "spo.fullname" $.root }}-orchestrator.{{ $.root.Release.Namespace }}.svc:8080/metrics
        format: prometheus
        valueLocation: {{ $.valueLocation | default (printf "spo_wanted_replicas{pool=%q}" $.component) }}
        targetValue: {{ $.targetValue | default "1" | quote }}
        activationTargetValue: "0"
        authMode: bearer
      authenticationRef: {name: {{ include "spo.fullname" $.root }}-orchestrator}
    {{- with $scaling.extraTriggers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}
