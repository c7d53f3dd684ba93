{{- define "spo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object; (dict "root" $ "component" "inference") */}}
{{- define "spo.labels" -}}
{{ include "spo.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: spo
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What never changes, because selectors may not; same argument, with selectorLabels where a component has several workloads */}}
{{- define "spo.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .selectorLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "spo.image" -}}
{{- $images := .root.Values.images -}}
{{- $digest := get $images.digests .image | default "" -}}
{{- printf "%s%s:%s%s" $images.registry (get $images .image) ($images.tag | default .root.Chart.AppVersion) (ternary "" (printf "@%s" $digest) (empty $digest)) -}}
{{- end -}}

{{- define "spo.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "spo.fullname" .) -}}
{{- end -}}

{{- define "spo.secret" -}}
{{- .Values.existingSecret | default (include "spo.fullname" .) -}}
{{- end -}}

{{- define "spo.stateClaim" -}}
{{- .Values.state.existingClaim | default (printf "%s-state" (include "spo.fullname" .)) -}}
{{- end -}}

{{/* Not empty where pods share no folder: what they have in common is in a bucket */}}
{{- define "spo.bucketOnly" -}}
{{- if eq .Values.storage.kind "s3" }}true{{ end -}}
{{- end -}}

{{/* The URL of a store; empty where it is on the state claim. Argument: root, store (weights, checkpoints, experience) */}}
{{- define "spo.storeUrl" -}}
{{- $inBucket := ternary (printf "%s/%s" (trimSuffix "/" .root.Values.storage.url) .store) "" (eq .root.Values.storage.kind "s3") -}}
{{- (get .root.Values .store).url | default $inBucket -}}
{{- end -}}

{{/* The claim with model folders: a person's, or ours where there is something to put into it; else nothing */}}
{{- define "spo.modelsClaim" -}}
{{- $models := .Values.models -}}
{{- if $models.existingClaim -}}{{ $models.existingClaim }}{{- else if and (or $models.toy $models.downloads) (not (include "spo.bucketOnly" .)) -}}{{ include "spo.fullname" . }}-models{{- end -}}
{{- end -}}

{{/* Not empty where every pod that reads models fetches them from the bucket for itself */}}
{{- define "spo.fetchesModels" -}}
{{- if and (include "spo.bucketOnly" .) (not .Values.models.existingClaim) .Values.models.downloads }}true{{ end -}}
{{- end -}}

{{/* Combinations that cannot work are refused here, once, in words. */}}
{{- define "spo.refuse" -}}
{{- $external := .Values.externalRedis -}}
{{- if and .Values.redis.enabled (or $external.url $external.existingSecret) -}}
{{- fail "redis.enabled and externalRedis are both set: switch redis.enabled off to use your own server" -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not $external.url) (not $external.existingSecret) -}}
{{- fail "redis.enabled is off: set externalRedis.existingSecret (a whole URL) or externalRedis.url" -}}
{{- end -}}
{{- if and $external.url $external.existingSecret -}}
{{- fail "externalRedis.url and externalRedis.existingSecret are both set: one of them" -}}
{{- end -}}
{{- if or (contains "@" $external.url) (contains "password=" $external.url) -}}
{{- fail "externalRedis.url holds a password: put the whole URL into a Secret and name it in externalRedis.existingSecret" -}}
{{- end -}}
{{- if and (contains "+sentinel://" $external.url) (not $external.sentinelPort) -}}
{{- fail "externalRedis.url names Sentinels: set externalRedis.sentinelPort, 26379 as a rule, or no pod may reach them" -}}
{{- end -}}
{{- range $name := list "inference" "sandboxJudge" "verifier" -}}
{{- $scaling := (get $.Values $name).autoscaling -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling: minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- if and $scaling.enabled (eq $scaling.engine "hpa") $.Values.scaling.enabled -}}
{{- fail (printf "scaling.enabled and %s.autoscaling by hpa: both would set the same replicas; switch one off or use keda" $name) -}}
{{- end -}}
{{- if and $scaling.enabled $.Values.scaling.enabled (gt (int $.Values.scaling.maxReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "scaling.maxReplicas is above %s.autoscaling.maxReplicas: KEDA would refuse such a number" $name) -}}
{{- end -}}
{{- if and $scaling.enabled (eq $scaling.engine "hpa") (not (dig "requests" "cpu" "" (get $.Values $name).resources)) -}}
{{- fail (printf "%s.autoscaling: hpa goes by the share of resources.requests.cpu, which is not set" $name) -}}
{{- end -}}
{{- end -}}
{{- with .Values.agentRunner -}}
{{- if .enabled -}}
{{- if not .existingSecret -}}
{{- fail "agentRunner.enabled: set agentRunner.existingSecret to a Secret whose api-key has the scope agents:run (`spo key create`)" -}}
{{- end -}}
{{- if not .harnesses -}}
{{- fail "agentRunner.enabled: agentRunner.harnesses names no command" -}}
{{- end -}}
{{- if ne .autoscaling.engine "keda" -}}
{{- fail "agentRunner.autoscaling.engine: only keda knows how many episodes are open" -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- fail "agentRunner.autoscaling: minReplicas is above maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.objectStore.existingSecret .Values.objectStore.endpoint) (not (include "spo.bucketOnly" .)) (not .Values.weights.url) (not .Values.checkpoints.url) (not (hasPrefix "s3://" .Values.experience.url)) (not (contains "s3://" (toJson .Values.models.downloads))) -}}
{{- fail "objectStore is set, but neither storage.url nor weights.url nor checkpoints.url nor experience.url nor a download is an s3:// URL" -}}
{{- end -}}
{{- with .Values.scaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail "scaling: minReplicas is above maxReplicas" -}}
{{- end -}}
{{- if and .enabled (or (ne $.Values.inference.autoscaling.enabled $.Values.sandboxJudge.autoscaling.enabled) (ne $.Values.inference.autoscaling.enabled $.Values.verifier.autoscaling.enabled)) -}}
{{- fail "scaling.enabled: autoscaling by keda for all of inference, sandboxJudge and verifier, or for none" -}}
{{- end -}}
{{- end -}}
{{- if and $external.caSecret .Values.redis.enabled -}}
{{- fail "externalRedis.caSecret is set, but the release has a Redis of its own: switch redis.enabled off" -}}
{{- end -}}
{{- if and $external.caSecret $external.url (not (hasPrefix "rediss" $external.url)) -}}
{{- fail "externalRedis.caSecret is set, but externalRedis.url does not begin with rediss://" -}}
{{- end -}}
{{- $trainer := .Values.trainer -}}
{{- if and (eq $trainer.kind "JobSet") $trainer.updateStrategy -}}
{{- fail "trainer.updateStrategy is a StatefulSet's: a JobSet is replaced by an upgrade that changes its pods" -}}
{{- end -}}
{{- if and (eq .Values.storage.kind "s3") (not .Values.storage.url) -}}
{{- fail "storage.kind is s3: set storage.url to s3://bucket/folder" -}}
{{- end -}}
{{- if and (eq .Values.storage.kind "claim") .Values.storage.url -}}
{{- fail "storage.url is set, but storage.kind is claim: weights.url, checkpoints.url and experience.url move single stores" -}}
{{- end -}}
{{- if and (include "spo.bucketOnly" .) (not .Values.models.existingClaim) -}}
{{- if .Values.models.toy -}}
{{- fail "storage.kind is s3: models.toy would make another model in every pod; make it once, put it into the bucket and name it in models.downloads" -}}
{{- end -}}
{{- range .Values.models.downloads -}}
{{- if not (hasPrefix "s3://" .from) -}}
{{- fail (printf "storage.kind is s3: every pod fetches models for itself and reaches the bucket alone; put %s there" .from) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.storage.kind "claim") (gt (int $trainer.nodes) 1) (not .Values.state.existingClaim) (not (has "ReadWriteMany" .Values.state.accessModes)) -}}
{{- fail "trainer.nodes is above 1: its pods share the state claim, which needs state.accessModes: [ReadWriteMany]" -}}
{{- end -}}
{{- end -}}
