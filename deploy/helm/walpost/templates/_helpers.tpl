{{/*
A template for each database, or for the one: .Name is the relay's, and .Values has what its entry says, key by key, over the
release's. Called with (list . "template").
*/}}
{{- define "walpost.each" -}}
{{- $root := index . 0 }}
{{- $common := omit $root.Values "databases" }}
{{- $names := list }}
{{- range $root.Values.databases | default (list dict) }}
{{- if has .name $names }}{{ fail (printf "databases: the name %s is there twice" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- $name := empty .name | ternary $root.Release.Name (printf "%s-%s" $root.Release.Name .name) }}
{{- $values := mergeOverwrite (deepCopy $common) (omit . "name") }}
---
{{ include (index $ 1) (dict "Name" $name "Values" $values "Release" $root.Release "Chart" $root.Chart) }}
{{- end }}
{{- end }}

{{- define "walpost.selector" -}}
app.kubernetes.io/name: walpost
app.kubernetes.io/instance: {{ .Name }}
{{- end }}

{{- define "walpost.labels" -}}
{{ include "walpost.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What every pod has. */}}
{{- define "walpost.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false # variables named WALPOST_ that are none of walpost's
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What every container has, with its volumeMounts last; secret has the URL of its role. */}}
{{- define "walpost.container" -}}
name: walpost
image: {{ empty .Values.image.digest | ternary (printf "%s:%s" .Values.image.repository .Values.image.tag) (printf "%s@%s" .Values.image.repository .Values.image.digest) | quote }}
env:
  - {name: WALPOST_POSTGRES_URL_FILE, value: {{ printf "/etc/walpost-postgres/%s" .secret.key | quote }}} # read again at every connection
resources: {{ toJson .Values.resources }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: config, mountPath: /etc/walpost, readOnly: true}
  - {name: postgres, mountPath: /etc/walpost-postgres, readOnly: true}
{{- end }}

{{/* What they mount; config is a ConfigMap. */}}
{{- define "walpost.volumes" -}}
- name: config
  configMap: {name: {{ .config }}}
- name: postgres
  secret: {secretName: {{ .secret.name | quote }}, items: [{key: {{ .secret.key | quote }}, path: {{ .secret.key | quote }}}]}
{{- end }}

{{/* A pod that runs one command as the owner; config is its ConfigMap. */}}
{{- define "walpost.oneshot" -}}
metadata:
  labels:
    app.kubernetes.io/name: walpost-{{ .command | first }}
    app.kubernetes.io/instance: {{ .root.Name }}
spec:
  restartPolicy: OnFailure
  {{- include "walpost.pod" .root | nindent 2 }}
  containers:
    - args: {{ append .command "--config=/etc/walpost/walpost.yaml" | toJson }}
      {{- include "walpost.container" (dict "Values" .root.Values "secret" .root.Values.ownerSecret) | nindent 6 }}
  volumes:
    {{- include "walpost.volumes" (dict "config" .config "secret" .root.Values.ownerSecret) | nindent 4 }}
{{- end }}
