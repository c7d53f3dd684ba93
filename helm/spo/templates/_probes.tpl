{{/*
Started: the gRPC port is open, which takes imports and the connection to Redis. Ready: the service says SERVING; inference
says so when it holds the weights of its run. Alive: the port answers; a service that loads a model is alive, not ready.

A pod of a group opens its port only when all pods of the group have met, which takes as long as the last one's node: it
is ready or not, and nothing kills it; torchrun, its first process, ends when its ranks cannot go on.
*/}}
{{- define "spo.probes" -}}
{{- $grpc := dict "port" 7070 -}}
{{- $ready := dict "grpc" $grpc "periodSeconds" 5 "timeoutSeconds" 5 -}}
{{- $alive := dict "tcpSocket" (dict "port" "grpc") "periodSeconds" 20 "timeoutSeconds" 10 "failureThreshold" 6 -}}
{{- if eq .component "orchestrator" -}}
{{- $ready = dict "httpGet" (dict "path" "/readyz" "port" "http") "periodSeconds" 5 "timeoutSeconds" 5 -}}
{{- $alive = dict "httpGet" (dict "path" "/healthz" "port" "http") "periodSeconds" 20 "timeoutSeconds" 10 "failureThreshold" 6 -}}
{{- end -}}
{{- $probes := dict "readinessProbe" $ready -}}
{{- if not .group -}}
{{- $_ := set $probes "startupProbe" (dict "tcpSocket" (dict "port" "grpc") "periodSeconds" 5 "failureThreshold" 60) -}}
{{- $_ := set $probes "livenessProbe" $alive -}}
{{- end -}}
{{- $values := .values -}}
{{- range $name := list "startupProbe" "readinessProbe" "livenessProbe" -}}
{{- $own := dig $name dict $values -}}
{{- $probe := get $probes $name | default dict -}}
{{- /* Another way to ask replaces ours: a probe has one. */ -}}
{{- if or $own.exec $own.grpc $own.httpGet $own.tcpSocket }}{{ $probe = omit $probe "exec" "grpc" "httpGet" "tcpSocket" }}{{ end -}}
{{- $probe = mergeOverwrite (deepCopy $probe) (omit $own "disabled") -}}
{{- if and $probe (not $own.disabled) }}
{{ $name }}:
  {{- toYaml $probe | nindent 2 }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Its own drain and what follows it: closing connections, and for a trainer the end of torchrun */}}
{{- define "spo.graceSeconds" -}}
{{- $drain := int (dig "drain_seconds" 20 .values.settings) -}}
{{- .values.terminationGracePeriodSeconds | default (add $drain (ternary 45 15 (eq .component "trainer"))) -}}
{{- end -}}
