{{- define "gradloc.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "gradloc.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "gradloc.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gradloc.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of an object; call with (dict "top" $ "part" "detector"). */}}
{{- define "gradloc.labels" -}}
{{ include "gradloc.selector" . }}
app.kubernetes.io/version: {{ .top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .top.Chart.Name .top.Chart.Version }}
{{- with .top.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gradloc.selector" -}}
app.kubernetes.io/name: {{ include "gradloc.name" .top }}
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "gradloc.image" -}}
{{- printf "%s/%s:%s" .top.Values.image.repository .name (default .top.Chart.AppVersion .top.Values.image.tag) -}}
{{- end -}}

{{/* The restricted profile of pod security; the user of all our images is 65532. */}}
{{- define "gradloc.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "gradloc.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "gradloc.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "gradloc.selector" . | nindent 6 }}
{{- end -}}

{{- define "gradloc.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{- default (printf "%s-redis" (include "gradloc.fullname" .)) .Values.redis.existingSecret -}}
{{- else -}}
{{- required "redis.external.existingSecret is needed when redis.enabled is false: a secret with the key url" .Values.redis.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* Redis' rules of a role: those of gradloc_proto.rights, which a test compares. Call with (dict "role" "trainer" "runs" "*"). */}}
{{- define "gradloc.redisRules" -}}
resetchannels -@all +ping
{{- if eq .role "detector" }} +xadd +xtrim +xread +xrevrange +xinfo|stream +xlen +get +set +mget +del +exists +type +persist +pexpire +pttl +eval +evalsha +script|load ~gradloc:*
{{- else if eq .role "reporter" }} +xadd +xread +xrevrange +xinfo|stream +xlen %R~gradloc:* %W~gradloc:{*}:control
{{- else if eq .role "localizer" }} +xadd %W~gradloc:{*}:findings
{{- else if eq .role "trainer" }} +xadd +xread +xrevrange +xinfo|stream +xlen %W~gradloc:runs %W~gradloc:{ {{- .runs -}} }:steps %R~gradloc:{ {{- .runs -}} }:limits %R~gradloc:{ {{- .runs -}} }:control
{{- end }}
{{- end -}}

{{- define "gradloc.redisRoles" -}}
{{- range list "detector" "reporter" "localizer" "trainer" }}{{ include "gradloc.redisRules" (dict "role" . "runs" "*") }};{{ end }}
{{- end -}}

{{- define "gradloc.redisPlace" -}}
{{ include "gradloc.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- if .Values.redis.tls.existingSecret }}?ssl_ca_certs=/etc/gradloc-redis/ca.crt{{ end }}
{{- end -}}

{{/* The environment that reaches Redis as a role; call with (dict "top" $ "role" "detector"). The kubelet puts the
     password in, so no manifest holds it. */}}
{{- define "gradloc.redisEnv" -}}
{{- $redis := .top.Values.redis }}
{{- if $redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "gradloc.redisSecret" .top }}, key: {{ .role }}}}
- name: GRADLOC_REDIS_URL
  value: {{ ternary "rediss" "redis" (ne $redis.tls.existingSecret "") }}://{{ .role }}:$(REDIS_PASSWORD)@{{ include "gradloc.redisPlace" .top }}
{{- else }}
- name: GRADLOC_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ include "gradloc.redisSecret" .top }}, key: {{ index $redis.external.urlKeys .role }}}}
{{- end }}
{{- end -}}

{{- define "gradloc.redisCa" -}}
{{- ternary .Values.redis.tls.existingSecret .Values.redis.external.caSecret .Values.redis.enabled -}}
{{- end -}}

{{- define "gradloc.redisMount" -}}
{{- if include "gradloc.redisCa" . }}
- {name: redis-ca, mountPath: /etc/gradloc-redis, readOnly: true}
{{- end }}
{{- end -}}

{{- define "gradloc.redisVolume" -}}
{{- with include "gradloc.redisCa" . }}
- name: redis-ca
  secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end -}}

{{- define "gradloc.raySecret" -}}
{{- if eq .Values.localizer.mode "external" -}}
{{- .Values.localizer.external.existingSecret -}}
{{- else -}}
{{- default (printf "%s-ray" (include "gradloc.fullname" .)) .Values.localizer.rayTokenSecret -}}
{{- end -}}
{{- end -}}

{{- define "gradloc.rayAddress" -}}
{{- if eq .Values.localizer.mode "rayCluster" -}}
{{- printf "http://%s-localizer-head-svc:8265" (include "gradloc.fullname" .) -}}
{{- else if eq .Values.localizer.mode "external" -}}
{{- required "localizer.external.address is needed when localizer.mode is external: http://host:8265" .Values.localizer.external.address -}}
{{- end -}}
{{- end -}}

{{- define "gradloc.whatifSecret" -}}
{{- default (printf "%s-whatif" (include "gradloc.fullname" .)) .Values.whatif.tokenSecret -}}
{{- end -}}

{{/* Where the reporter finds the what-if app; empty where there is none. */}}
{{- define "gradloc.whatifUrl" -}}
{{- if .Values.whatif.enabled -}}
{{- if .Values.whatif.url -}}
{{- fail "whatif.url is for an app elsewhere; set whatif.enabled to false, or leave whatif.url out" -}}
{{- end -}}
{{- printf "http://%s-whatif-serve-svc:8000/whatif" (include "gradloc.fullname" .) -}}
{{- else -}}
{{- .Values.whatif.url -}}
{{- end -}}
{{- end -}}

{{- define "gradloc.whatifStore" -}}
{{- if .Values.whatif.store -}}
{{- .Values.whatif.store -}}
{{- else if .Values.snapshots.existingClaim -}}
{{- printf "file://%s" .Values.snapshots.mountPath -}}
{{- else -}}
{{- fail "whatif.store is needed: where the snapshots are that the what-if app may open, such as s3://bucket/prefix" -}}
{{- end -}}
{{- end -}}

{{/* A generated value that an upgrade keeps; call with (dict "top" $ "name" SECRET "key" KEY). */}}
{{- define "gradloc.kept" -}}
{{- $known := lookup "v1" "Secret" .top.Release.Namespace .name -}}
{{- if and $known $known.data (hasKey $known.data .key) -}}
{{- index $known.data .key -}}
{{- else -}}
{{- randAlphaNum 48 | b64enc -}}
{{- end -}}
{{- end -}}
