{{/*
The pod of a service. Argument:
  root, values      the chart's context, the service's section of the values
  component         its name (sandbox-judge); module and variables follow from it
  image             light, judge or engine
  redis, state      whether it talks to Redis; how it mounts the state folder: "", "read" or "write"
  models, tasks     whether it reads models, task files
  experience        how it mounts the experience store: absent, "read" or "write"
  arguments         what the image runs; default: the service's module
  restartPolicy, selectorLabels   where they differ from the usual
*/}}
{{- define "spo.podTemplate" -}}
{{- $underscored := .component | replace "-" "_" -}}
metadata:
  labels:
    {{- include "spo.labels" . | nindent 4 }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .component }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if and (eq .component "orchestrator") .root.Values.scaling.enabled }}
  serviceAccountName: {{ include "spo.fullname" .root }}-orchestrator
  automountServiceAccountToken: true
  {{- else }}
  serviceAccountName: {{ include "spo.serviceAccount" .root }}
  automountServiceAccountToken: false
  {{- end }}
  # A Service "spo-inference" would otherwise set SPO_INFERENCE_PORT=tcp://... in every pod.
  enableServiceLinks: false
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add 15 (int (dig "drain_seconds" 20 .values.settings)) }}
  securityContext:
    {{- include "spo.podSecurity" 10001 | nindent 4 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- include "spo.placement" . | nindent 2 }}
  containers:
    - name: {{ .component }}
      image: {{ include "spo.image" . }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      # A process that cannot start says why in its last line of log: so does the pod's status.
      terminationMessagePolicy: FallbackToLogsOnError
      args: {{ .arguments | default (list (printf "services.%s" $underscored)) | toJson }}
      securityContext:
        {{- include "spo.containerSecurity" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 7070}
        {{- if eq .component "orchestrator" }}
        - {name: http, containerPort: 8080}
        {{- else }}
        - {name: metrics, containerPort: 9090}
        {{- end }}
      env:
        {{- include "spo.environment" . | nindent 8 }}
      {{- include "spo.probes" . | nindent 6 }}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .state }}
        - {name: state, mountPath: /var/lib/spo, readOnly: {{ ne .state "write" }}}
        {{- end }}
        {{- if and .experience (not .root.Values.experience.url) }}
        - {name: experience, mountPath: /experience, subPath: experience, readOnly: {{ ne .experience "write" }}}
        {{- end }}
        {{- if and .models .root.Values.models.existingClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and .tasks .root.Values.tasks.existingClaim }}
        - {name: tasks, mountPath: /tasks, readOnly: true}
        {{- end }}
        {{- if hasKey .values "sharedMemory" }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- with .values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if .state }}
    - {name: state, persistentVolumeClaim: {claimName: {{ include "spo.stateClaim" .root }}}}
    {{- end }}
    {{- if and .experience (not .root.Values.experience.url) }}
    - {name: experience, persistentVolumeClaim: {claimName: {{ include "spo.stateClaim" .root }}}}
    {{- end }}
    {{- if and .models .root.Values.models.existingClaim }}
    - {name: models, persistentVolumeClaim: {claimName: {{ .root.Values.models.existingClaim }}, readOnly: true}}
    {{- end }}
    {{- if and .tasks .root.Values.tasks.existingClaim }}
    - {name: tasks, persistentVolumeClaim: {claimName: {{ .root.Values.tasks.existingClaim }}, readOnly: true}}
    {{- end }}
    {{- if hasKey .values "sharedMemory" }}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ .values.sharedMemory }}}}
    {{- end }}
    {{- with .values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Restricted Pod Security Standard; argument: the user id */}}
{{- define "spo.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "spo.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "spo.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "spo.selector" . | nindent 8 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/*
Started: the gRPC port is open, which takes imports and the connection to Redis. Ready: the service says SERVING; inference
says so when it holds the weights of its run. Alive: the port answers; a service that loads a model is alive, not ready.
*/}}
{{- define "spo.probes" -}}
startupProbe:
  tcpSocket: {port: grpc}
  periodSeconds: 5
  failureThreshold: 60
{{- if eq .component "orchestrator" }}
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- else }}
readinessProbe:
  grpc: {port: 7070}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  tcpSocket: {port: grpc}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}
{{- end -}}
