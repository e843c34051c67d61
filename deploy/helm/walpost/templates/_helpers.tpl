{{- define "walpost.selector" -}}
app.kubernetes.io/name: walpost
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{/* What every container has; secret has the URL of its role. */}}
{{- define "walpost.container" -}}
name: walpost
image: {{ empty .Values.image.digest | ternary (printf "%s:%s" .Values.image.repository .Values.image.tag) (printf "%s@%s" .Values.image.repository .Values.image.digest) | quote }}
env:
  - name: WALPOST_POSTGRES_URL
    valueFrom:
      secretKeyRef: {{ toJson (pick .secret "name" "key") }}
resources: {{ toJson .Values.resources }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A pod that runs one command as the owner; config is its ConfigMap. */}}
{{- define "walpost.oneshot" -}}
metadata:
  labels:
    app.kubernetes.io/name: walpost-{{ .command | first }}
    app.kubernetes.io/instance: {{ .root.Release.Name }}
spec:
  restartPolicy: OnFailure
  {{- include "walpost.pod" .root | nindent 2 }}
  containers:
    - args: {{ append .command "--config=/etc/walpost/walpost.yaml" | toJson }}
      {{- include "walpost.container" (dict "Values" .root.Values "secret" .root.Values.ownerSecret) | nindent 6 }}
      volumeMounts:
        - {name: config, mountPath: /etc/walpost, readOnly: true}
  volumes:
    - name: config
      configMap: {name: {{ .config }}}
{{- end }}
