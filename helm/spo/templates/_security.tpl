{{/*
What every pod of the release has, whoever runs in it: user, secrets of registries, user namespace. Argument: root, values.
The values hold the restricted Pod Security Standard; a cluster that chooses users itself (OpenShift) empties runAsUser,
runAsGroup and fsGroup with null.
*/}}
{{- define "spo.podBasics" -}}
{{- $defaults := .root.Values.podDefaults -}}
{{- $hostUsers := dig "hostUsers" "" (.values | default dict) -}}
{{- if kindIs "string" $hostUsers }}{{ $hostUsers = $defaults.hostUsers }}{{ end -}}
securityContext:
  {{- mergeOverwrite (deepCopy $defaults.podSecurityContext) (dig "podSecurityContext" dict (.values | default dict)) | toYaml | nindent 2 }}
{{- if kindIs "bool" $hostUsers }}
hostUsers: {{ $hostUsers }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Argument: root, values; rdma of a trainer adds the capability to pin memory */}}
{{- define "spo.containerSecurity" -}}
{{- $values := .values | default dict -}}
{{- $context := mergeOverwrite (deepCopy .root.Values.podDefaults.containerSecurityContext) (deepCopy (dig "containerSecurityContext" dict $values)) -}}
{{- if dig "rdma" "enabled" false $values -}}
{{- $_ := set $context "capabilities" (mergeOverwrite (deepCopy ($context.capabilities | default dict)) (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- toYaml $context -}}
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
{{- $together := and .group .values.togetherIn }}
{{- if or .values.affinity $together }}
affinity:
  {{- with .values.affinity }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $together }}
  # All pods of one trainer in one domain, such as a rack with one InfiniBand switch.
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: {{ .values.togetherIn }}
        labelSelector:
          matchLabels:
            {{- include "spo.selector" . | nindent 12 }}
  {{- end }}
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
{{- with .values.schedulerName | default .root.Values.podDefaults.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}
