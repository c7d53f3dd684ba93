{{/*
The pod of a service. Argument:
  root, values      the chart's context, the service's section of the values
  component         its name (sandbox-judge); module and variables follow from it
  image             light, judge or engine
  redis, state      whether it talks to Redis; how it mounts the state folder: "", "read" or "write"
  owns, spares      folders of the state folder: those that alone it may write, or all but which
  models, tasks     whether it reads models, task files
  experience        how it mounts the experience store: absent, "read" or "write"
  arguments         what the image runs; default: the service's module
  restartPolicy, selectorLabels   where they differ from the usual
  group             whether it is one of several pods that work together (a trainer's)
What podDefaults says holds for every service; its own section goes before: maps are merged, lists appended.
*/}}
{{- define "spo.podTemplate" -}}
{{- $underscored := .component | replace "-" "_" -}}
{{- $defaults := .root.Values.podDefaults -}}
{{- $own := .values -}}
{{- $bucketOnly := include "spo.bucketOnly" .root -}}
{{- if and $bucketOnly (eq .state "read") -}}
{{- /* There is nothing to read: weights come from the bucket. */ -}}
{{- $_ := set . "state" "" -}}
{{- end -}}
{{- $experienceOnClaim := and .experience (not (include "spo.storeUrl" (dict "root" .root "store" "experience"))) -}}
{{- $fetchesModels := and .models (include "spo.fetchesModels" .root) -}}
{{- $initContainers := concat $defaults.initContainers ($own.initContainers | default list) -}}
metadata:
  labels:
    {{- include "spo.labels" . | nindent 4 }}
    {{- with merge (dict) $own.podLabels $defaults.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .component }}
    {{- with merge (dict) $own.podAnnotations $defaults.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if and (eq .component "orchestrator") .root.Values.scaling.enabled }}
  serviceAccountName: {{ include "spo.fullname" .root }}-orchestrator
  automountServiceAccountToken: true
  {{- else if eq .component "agent-runner" }}
  serviceAccountName: {{ include "spo.fullname" .root }}-agent-runner
  automountServiceAccountToken: false
  {{- else }}
  serviceAccountName: {{ include "spo.serviceAccount" .root }}
  automountServiceAccountToken: false
  {{- end }}
  # A Service "spo-inference" would otherwise set SPO_INFERENCE_PORT=tcp://... in every pod.
  enableServiceLinks: false
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "spo.graceSeconds" . }}
  {{- include "spo.podBasics" . | nindent 2 }}
  {{- include "spo.placement" . | nindent 2 }}
  {{- if or $initContainers $fetchesModels }}
  initContainers:
    {{- if $fetchesModels }}
    {{- include "spo.fetchModels" . | nindent 4 }}
    {{- end }}
    {{- with $initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ dig "image" "" .values | default (include "spo.image" .) }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      # A process that cannot start says why in its last line of log: so does the pod's status.
      terminationMessagePolicy: FallbackToLogsOnError
      args: {{ .arguments | default (list (printf "services.%s" $underscored)) | toJson }}
      securityContext:
        {{- include "spo.containerSecurity" . | nindent 8 }}
      {{- with $own.lifecycle | default $defaults.lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: 7070}
        {{- if eq .component "orchestrator" }}
        - {name: http, containerPort: 8080}
        {{- else }}
        - {name: metrics, containerPort: 9090}
        {{- end }}
      {{- with concat $defaults.envFrom ($own.envFrom | default list) }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "spo.environment" . | nindent 8 }}
      {{- include "spo.probes" . | nindent 6 }}
      resources:
        {{- $resources := deepCopy .values.resources }}
        {{- if dig "rdma" "enabled" false .values }}
        {{- $resources = merge $resources (dict "requests" .values.rdma.resources "limits" .values.rdma.resources) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if and .state $bucketOnly }}
        - {name: state, mountPath: /var/lib/spo}
        {{- else if .state }}
        - {name: state, mountPath: /var/lib/spo, readOnly: {{ or (ne .state "write") (not (empty .owns)) }}}
        # The kubelet makes these folders where they are not there yet.
        {{- range .owns }}
        - {name: state, mountPath: /var/lib/spo/{{ . }}, subPath: {{ . }}}
        {{- end }}
        {{- range .spares }}
        - {name: state, mountPath: /var/lib/spo/{{ . }}, subPath: {{ . }}, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if $experienceOnClaim }}
        - {name: experience, mountPath: /experience, subPath: experience, readOnly: {{ ne .experience "write" }}}
        {{- end }}
        {{- if or $fetchesModels (and .models (include "spo.modelsClaim" .root)) }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and .tasks .root.Values.tasks.existingClaim }}
        - {name: tasks, mountPath: /tasks, readOnly: true}
        {{- end }}
        {{- if hasKey .values "sharedMemory" }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if and .redis .root.Values.externalRedis.caSecret }}
        - {name: redis-ca, mountPath: /etc/spo/redis-ca, readOnly: true}
        {{- end }}
        {{- with concat $defaults.extraVolumeMounts .values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with concat $defaults.sidecars ($own.sidecars | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - {name: tmp, emptyDir: {{ ternary (dict "sizeLimit" ($own.tmpSize | default $defaults.tmpSize)) dict (not (empty ($own.tmpSize | default $defaults.tmpSize))) | toJson }}}
    {{- if and .state $bucketOnly (not (and (eq .component "orchestrator") .root.Values.state.existingClaim)) }}
    # Of this pod alone, and gone with it.
    - {name: state, emptyDir: {}}
    {{- else if .state }}
    - {name: state, persistentVolumeClaim: {claimName: {{ include "spo.stateClaim" .root }}}}
    {{- end }}
    {{- if $experienceOnClaim }}
    - {name: experience, persistentVolumeClaim: {claimName: {{ include "spo.stateClaim" .root }}}}
    {{- end }}
    {{- if $fetchesModels }}
    - {name: models, emptyDir: {}}
    {{- else if and .models (include "spo.modelsClaim" .root) }}
    - {name: models, persistentVolumeClaim: {claimName: {{ include "spo.modelsClaim" .root }}, readOnly: {{ not (empty .root.Values.models.existingClaim) }}}}
    {{- end }}
    {{- if and .tasks .root.Values.tasks.existingClaim }}
    - {name: tasks, persistentVolumeClaim: {claimName: {{ .root.Values.tasks.existingClaim }}, readOnly: true}}
    {{- end }}
    {{- if hasKey .values "sharedMemory" }}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ .values.sharedMemory }}}}
    {{- end }}
    {{- if and .redis .root.Values.externalRedis.caSecret }}
    - {name: redis-ca, secret: {secretName: {{ .root.Values.externalRedis.caSecret }}, items: [{key: ca.crt, path: ca.crt}]}}
    {{- end }}
    {{- with concat $defaults.extraVolumes .values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Containers that fetch the models from the bucket before a pod without a shared claim starts; argument as above */}}
{{- define "spo.fetchModels" -}}
{{- $root := .root }}
{{- $service := merge (dict "image" "engine") . }}
{{- range $root.Values.models.downloads }}
- name: model-{{ .name }}
  image: {{ include "spo.image" $service }}
  imagePullPolicy: {{ $root.Values.images.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  args: {{ list "spo.weights.download" .from (printf "/models/%s" .name) | toJson }}
  securityContext:
    {{- include "spo.containerSecurity" $service | nindent 4 }}
  env:
    - {name: SPO_STATE_PATH, value: /tmp/spo}
    {{- include "spo.bucketVariables" $root | nindent 4 }}
    {{- with concat $root.Values.podDefaults.extraEnv $root.Values.models.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml $root.Values.models.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end }}
{{- end -}}
