{{/* Variables of a service; every SPO_ name is a field of its settings class, which tests/chart holds. */}}
{{- define "spo.environment" -}}
{{- $full := include "spo.fullname" .root -}}
{{- $prefix := printf "SPO_%s" (.component | replace "-" "_" | upper) -}}
- {name: SPO_LOG_LEVEL, value: {{ .root.Values.logLevel }}}
- {name: SPO_LOG_FORMAT, value: json}
{{- with .root.Values.tracing }}
{{- if .endpoint }}
- {name: SPO_TRACES_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .sampleRatio | quote }}}
{{- end }}
{{- end }}
{{- if eq .component "agent-runner" }}
- {name: {{ $prefix }}_API_URL, value: "http://{{ $full }}-orchestrator:8080"}
- name: {{ $prefix }}_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .values.existingSecret }}, key: api-key}}
- {name: {{ $prefix }}_POOL, value: {{ .values.pool | quote }}}
- {name: {{ $prefix }}_HARNESSES, value: {{ .values.harnesses | toJson | quote }}}
- {name: {{ $prefix }}_SCORE, value: {{ .values.score | quote }}}
- {name: {{ $prefix }}_MOST, value: {{ .values.most | quote }}}
{{- else }}
- {name: SPO_STATE_PATH, value: {{ ternary "/var/lib/spo" "/tmp/spo" (ne .state "") }}}
{{- if .experience }}
- {name: SPO_EXPERIENCE_URL, value: {{ include "spo.storeUrl" (dict "root" .root "store" "experience") | default "/experience" | quote }}}
{{- end }}
{{- if include "spo.readsWeights" . }}
{{- if and (include "spo.bucketOnly" .root) (not .root.Values.state.existingClaim) }}
- {name: SPO_STATE_STORE_URL, value: {{ printf "%s/state" (trimSuffix "/" .root.Values.storage.url) | quote }}}
{{- end }}
{{- with include "spo.storeUrl" (dict "root" .root "store" "weights") }}
- {name: SPO_WEIGHT_STORE_URL, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if has .component (list "orchestrator" "trainer") }}
{{- with include "spo.storeUrl" (dict "root" .root "store" "checkpoints") }}
- {name: SPO_CHECKPOINT_STORE_URL, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if include "spo.usesBucket" . }}
{{ include "spo.bucketVariables" .root }}
{{- end }}
- {name: SPO_ORCHESTRATOR_ADDRESS, value: "{{ $full }}-orchestrator-grpc:7070"}
# Headless services: dns:/// spreads calls over all ready pods.
{{- range list "inference" "sandbox-judge" "verifier" "replay-buffer" "value-estimation" }}
- {name: SPO_{{ . | replace "-" "_" | upper }}_ADDRESS, value: "dns:///{{ $full }}-{{ . }}:7070"}
{{- end }}
{{- end }}
{{- if .redis }}
{{ include "spo.redisVariables" .root }}
- {name: SPO_REDIS_WAIT_SECONDS, value: "120"}
{{- end }}
{{- if and .root.Values.rpcToken.enabled (ne .component "agent-runner") }}
- name: SPO_RPC_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "spo.secret" .root }}, key: rpc-token}}
{{- end }}
- {name: {{ $prefix }}_HOST, value: "0.0.0.0"}
- {name: {{ $prefix }}_PORT, value: "7070"}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: {{ $prefix }}_ADVERTISE_ADDRESS, value: "$(POD_IP):7070"}
{{- if and .root.Values.verifier.hosts (has .component (list "orchestrator" "verifier")) }}
- {name: SPO_VERIFIER_HTTP_HOSTS, value: {{ .root.Values.verifier.hosts | toJson | quote }}}
{{- end }}
{{- if eq .component "verifier" }}
{{- with .values.existingSecret }}
- name: {{ $prefix }}_HTTP_SECRET
  valueFrom: {secretKeyRef: {name: {{ . }}, key: http-secret, optional: true}}
- name: {{ $prefix }}_MODEL_KEYS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: model-keys, optional: true}}
{{- end }}
{{- end }}
{{- if eq .component "tinker" }}
- {name: {{ $prefix }}_MODEL, value: {{ .values.model | quote }}}
{{- end }}
{{- if eq .component "orchestrator" }}
{{- if .root.Values.tinker.enabled }}
- {name: SPO_TINKER_ADDRESS, value: "{{ $full }}-tinker:7070"}
{{- end }}
{{- if include "spo.bucketOnly" .root }}
- {name: {{ $prefix }}_SHARED_STATE, value: "false"}
{{- end }}
- {name: {{ $prefix }}_HTTP_PORT, value: "8080"}
- name: {{ $prefix }}_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "spo.secret" .root }}, key: api-key}}
{{- with .root.Values.scaling }}
{{- if .enabled }}
- {name: {{ $prefix }}_SCALER, value: kubernetes}
- {name: {{ $prefix }}_SCALE_PREFIX, value: {{ $full }}-}
- {name: {{ $prefix }}_SCALE_KEDA, value: {{ include "spo.scalesByKeda" $.root | quote }}}
- {name: {{ $prefix }}_MIN_REPLICAS, value: {{ .minReplicas | quote }}}
- {name: {{ $prefix }}_MAX_REPLICAS, value: {{ .maxReplicas | quote }}}
{{- end }}
{{- end }}
{{- else }}
- {name: {{ $prefix }}_METRICS_PORT, value: "9090"}
{{- end }}
{{- range $field, $value := .values.settings }}
{{- /* Large whole numbers come as floats, which would print with an exponent; JSON has none. */}}
- {name: {{ $prefix }}_{{ upper $field }}, value: {{ ternary $value ($value | toJson) (kindIs "string" $value) | quote }}}
{{- end }}
{{- if eq .component "trainer" }}
{{- range $name, $value := .values.rdma.environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- with concat .root.Values.podDefaults.extraEnv .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The port of the collector of traces: the endpoint's own, or that of its scheme */}}
{{- define "spo.tracingPort" -}}
{{- $url := urlParse .Values.tracing.endpoint -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{/* Not empty where a service reads or writes weights, or any store in a bucket; argument: root, component */}}
{{- define "spo.readsWeights" -}}
{{- if has .component (list "orchestrator" "inference" "value-estimation" "trainer") }}true{{ end -}}
{{- end -}}

{{/* Where the bucket is, and what opens it; argument: root */}}
{{- define "spo.bucketVariables" -}}
{{- $store := .Values.objectStore -}}
- {name: AWS_REGION, value: {{ $store.region | quote }}}
{{- with $store.endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
{{- end }}
{{- with $store.existingSecret }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $store.existingSecret }}, key: {{ . }}}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "spo.usesBucket" -}}
{{- $weights := include "spo.storeUrl" (dict "root" .root "store" "weights") -}}
{{- $checkpoints := include "spo.storeUrl" (dict "root" .root "store" "checkpoints") -}}
{{- $experience := include "spo.storeUrl" (dict "root" .root "store" "experience") -}}
{{- if or (and $weights (include "spo.readsWeights" .)) (and $checkpoints (has .component (list "orchestrator" "trainer"))) (and (hasPrefix "s3://" $experience) (has .component (list "orchestrator" "replay-buffer" "value-estimation"))) }}true{{ end -}}
{{- end -}}

{{- define "spo.redisVariables" -}}
{{- if .Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "spo.secret" . }}, key: redis-password}}
- {name: SPO_REDIS_URL, value: "redis://:$(REDIS_PASSWORD)@{{ include "spo.fullname" . }}-redis:6379/0"}
{{- else if .Values.externalRedis.existingSecret -}}
- name: SPO_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.externalRedis.existingSecret }}, key: {{ .Values.externalRedis.urlKey }}}}
{{- else -}}
{{- $url := .Values.externalRedis.url }}
{{- if and .Values.externalRedis.caSecret (not (contains "ssl_ca_certs=" $url)) }}
{{- $url = printf "%s%sssl_ca_certs=/etc/spo/redis-ca/ca.crt" $url (ternary "&" "?" (contains "?" $url)) }}
{{- end }}
- {name: SPO_REDIS_URL, value: {{ $url | quote }}}
{{- end -}}
{{- end -}}
