{{- define "mooncake.engineLabels" -}}
app.kubernetes.io/name: mooncake-engine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "mooncake.proxyLabels" -}}
app.kubernetes.io/name: mooncake-proxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "mooncake.storeLabels" -}}
app.kubernetes.io/name: mooncake-kv
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "mooncake.chartLabels" -}}
app.kubernetes.io/part-of: mooncake-hal
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "mooncake.image" -}}
{{ .repository }}:{{ .tag }}
{{- end }}
{{- define "mooncake.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
