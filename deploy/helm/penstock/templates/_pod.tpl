{{/*
The pods of a component: (dict "root" . "component" "bookie" "values" .Values.bookie "hosts" 3). What is the component's own comes
from the template "penstock.bookie.container"; all else, and what the values add, is said here once.
*/}}
{{- define "penstock.pod" -}}
{{- $pod := .values.pod | default dict -}}
{{- $container := include (printf "penstock.%s.container" .component) .root | fromYaml -}}
metadata:
  labels:
    {{- include "penstock.selector" (list .root .component) | nindent 4 }}
    {{- with $pod.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .component }}
    {{- if hasKey .values "settings" }}
    # Pods read their settings when they start: others make other pods.
    penstock.io/settings: {{ include "penstock.settings" (list .root .values.settings) | sha256sum | trunc 16 }}
    {{- end }}
    {{- with $pod.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  # Otherwise services near by would end up in the environment as PENSTOCK_…, which is where settings are read from.
  enableServiceLinks: false
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  # SIGTERM is all that a program needs to hand over in good order: it has 30 s (shutdown-timeout), and some to end.
  terminationGracePeriodSeconds: 45
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- include "penstock.spread" . | nindent 2 }}
  {{- with omit $pod "labels" "annotations" "env" "volumes" "volumeMounts" }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ $container.image | default (include "penstock.image" .root) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command:
        {{- toYaml $container.command | nindent 8 }}
      args:
        {{- toYaml $container.args | nindent 8 }}
      env:
        {{- range $name, $path := $container.fields }}
        - name: {{ $name }}
          valueFrom: {fieldRef: {apiVersion: v1, fieldPath: {{ $path | quote }}}}
        {{- end }}
        {{- with $container.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := $container.ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}, protocol: TCP}
        {{- end }}
      {{- with $container.startupSeconds }}
      startupProbe:
        httpGet: {path: /livez, port: {{ $container.probes }}, scheme: HTTP}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div . 5 }}
      {{- end }}
      # A minute without an answer: restarting is the last thing to try.
      livenessProbe:
        httpGet: {path: /livez, port: {{ $container.probes }}, scheme: HTTP}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: {{ $container.probes }}, scheme: HTTP}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      {{- include "penstock.containerSecurity" . | nindent 6 }}
      volumeMounts:
        {{- with $container.data }}
        - {name: data, mountPath: {{ . }}}
        {{- end }}
        {{- if hasKey .values "settings" }}
        - {name: settings, mountPath: /etc/penstock, readOnly: true}
        {{- end }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  {{- if or $pod.volumes (hasKey .values "settings") }}
  volumes:
    {{- if hasKey .values "settings" }}
    - name: settings
      configMap: {name: {{ include "penstock.fullname" .root }}-{{ .component }}}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end -}}

{{- define "penstock.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}
