{{/* The name that all objects begin with: the release's, if it says what it is. */}}
{{- define "penstock.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a component: (list . "bookie"). Selectors cannot be changed, so this never changes either. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of objects, not of pods or volume claims: they change with every version. */}}
{{- define "penstock.labels" -}}
{{- $root := index . 0 -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ $root.Values.image.tag | default $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Name and labels of an object: (list . "bookie"). */}}
{{- define "penstock.metadata" -}}
name: {{ include "penstock.fullname" (index . 0) }}-{{ index . 1 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end -}}

{{- define "penstock.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Where members of etcd have their names. It ends before the cluster's domain, which the chart does not know. */}}
{{- define "penstock.etcd.domain" -}}
{{ include "penstock.fullname" . }}-etcd.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Members of etcd by name, as a list in YAML. */}}
{{- define "penstock.etcd.members" -}}
{{- range $i := until (int .Values.etcd.replicas) }}
- {{ include "penstock.fullname" $ }}-etcd-{{ $i }}
{{- end }}
{{- end -}}

{{/* The endpoints of etcd, as a list in YAML. */}}
{{- define "penstock.etcd.endpoints" -}}
{{- if .Values.etcd.endpoints }}
{{- toYaml .Values.etcd.endpoints }}
{{- else }}
{{- range include "penstock.etcd.members" . | fromYamlArray }}
- {{ . }}.{{ include "penstock.etcd.domain" $ }}:2379
{{- end }}
{{- end }}
{{- end -}}

{{/* The settings file of a program: (list . .Values.bookie.settings). */}}
{{- define "penstock.settings" -}}
{{- $root := index . 0 -}}
{{- $own := dict "cluster" $root.Values.cluster "etcd" (include "penstock.etcd.endpoints" $root | fromYamlArray) "shutdown-timeout" "30s" -}}
{{ toYaml (merge $own (index . 1)) }}
{{- end -}}

{{/* How many bookies a ledger is spread over, and how many zones copies must span, where a namespace says nothing. */}}
{{- define "penstock.ensemble" -}}
{{ index .Values.broker.settings "ensemble" | default 3 }}
{{- end -}}

{{- define "penstock.minZones" -}}
{{ index .Values.broker.settings "min-zones" | default 0 }}
{{- end -}}

{{/*
Where pods of a component go: (dict "root" . "component" "bookie" "hosts" 3). With hosts, one to a host on at least so many hosts,
or they wait; without, as well as it goes. Zones are demanded if copies must span them.
*/}}
{{- define "penstock.spread" -}}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    {{- if .hosts }}
    minDomains: {{ .hosts }}
    whenUnsatisfiable: DoNotSchedule
    {{- else }}
    whenUnsatisfiable: ScheduleAnyway
    {{- end }}
    labelSelector:
      matchLabels:
        {{- include "penstock.selector" (list .root .component) | nindent 8 }}
  - topologyKey: topology.kubernetes.io/zone
    maxSkew: 1
    {{- if and .hosts (gt (int (include "penstock.minZones" .root)) 1) }}
    whenUnsatisfiable: DoNotSchedule
    {{- else }}
    whenUnsatisfiable: ScheduleAnyway
    {{- end }}
    labelSelector:
      matchLabels:
        {{- include "penstock.selector" (list .root .component) | nindent 8 }}
{{- end -}}

{{/* A disruption budget: (list . "bookie"). */}}
{{- define "penstock.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "penstock.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
{{- end -}}

{{/* A volume for each pod of a StatefulSet, which nothing ever deletes: (list "data" .Values.bookie.storage). */}}
{{- define "penstock.claims" -}}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: Retain
  whenScaled: Retain
volumeClaimTemplates:
  - metadata:
      name: data
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .className }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .size }}
{{- end -}}

{{/* Refuses what the API would refuse with less to go by: (list "bookie" the-StatefulSet-there-is .Values.bookie.storage). */}}
{{- define "penstock.sameStorage" -}}
{{- $there := (index (index . 1).spec.volumeClaimTemplates 0).spec -}}
{{- $size := $there.resources.requests.storage -}}
{{- $class := $there.storageClassName | default "" -}}
{{- with index . 2 -}}
{{- if or (ne .size $size) (ne .className $class) -}}
{{- fail (printf "%s.storage is %s of class %q, and its StatefulSet was made for %s of class %q, which cannot be changed: docs/operations.md tells how disks grow" (index $ 0) .size .className $size $class) -}}
{{- end -}}
{{- end -}}
{{- end -}}
