{{/*
Alerts, as a list in YAML. Each has something for a person to do: docs/operations.md says what the metrics mean.
*/}}
{{- define "penstock.alerts" -}}
{{- $of := printf `{namespace="%s",pod=~"%s-.*"}` .Release.Namespace (include "penstock.fullname" .) -}}
- alert: PenstockBookiesMissing
  expr: (count(penstock_ledgerstore_state{{ $of }}) or vector(0)) < {{ .Values.bookie.replicas }}
  for: 2m
  severity: critical
  summary: "Fewer than {{ .Values.bookie.replicas }} bookies are there"
  description: "New messages have fewer copies, or cannot be published. kubectl get pods -n {{ .Release.Namespace }} -l app.kubernetes.io/component=bookie"
- alert: PenstockBrokersMissing
  expr: (count(penstock_broker_topics{{ $of }}) or vector(0)) < {{ .Values.broker.replicas }}
  for: 5m
  severity: warning
  summary: "Fewer than {{ .Values.broker.replicas }} brokers are there"
  description: "The others serve their topics. kubectl get pods -n {{ .Release.Namespace }} -l app.kubernetes.io/component=broker"
- alert: PenstockDown
  expr: up{{ $of }} == 0
  for: 2m
  severity: critical
  summary: "{{`{{ $labels.pod }}`}} does not answer"
  description: "The process is not there, stands still, or cannot be reached. kubectl describe pod {{`{{ $labels.pod }}`}}; kubectl logs --previous {{`{{ $labels.pod }}`}}"
- alert: PenstockBookieFull
  expr: penstock_ledgerstore_state{{ $of }} == 2
  for: 1m
  severity: critical
  summary: "The disk of {{`{{ $labels.pod }}`}} is full"
  description: "It takes no messages. Consume or delete what is not needed, or make its volume larger."
- alert: PenstockBookieAlmostFull
  expr: penstock_ledgerstore_state{{ $of }} == 1
  for: 10m
  severity: warning
  summary: "The disk of {{`{{ $labels.pod }}`}} is above its low watermark"
  description: "It takes no new ledgers. Add bookies, or make its volume larger."
- alert: PenstockBookieReadErrors
  expr: increase(penstock_ledgerstore_read_errors_total{{ $of }}[15m]) > 0
  for: 0m
  severity: critical
  summary: "{{`{{ $labels.pod }}`}} cannot read its disk"
  description: "The disk fails or rots; other copies serve meanwhile. Replace the disk."
- alert: PenstockBookieSlowDisk
  expr: histogram_quantile(0.99, sum by (namespace, pod, le) (rate(penstock_ledgerstore_sync_seconds_bucket{{ $of }}[5m]))) > 0.5
  for: 10m
  severity: warning
  summary: "The disk of {{`{{ $labels.pod }}`}} takes long to sync"
  description: "Publishing cannot be faster than the second of three disks. Look for a neighbour on the same disk, a volume at its limit, or one that fails."
- alert: PenstockMetadataDoubtful
  expr: penstock_bookie_gc_stopped{{ $of }} == 1 or penstock_bookie_gc_quarantined_ledgers{{ $of }} > 0
  for: 10m
  severity: critical
  summary: "{{`{{ $labels.pod }}`}} does not believe etcd"
  description: "Nothing is deleted there meanwhile. Its log says whether etcd is away, another cluster's, or went back to an older state."
- alert: PenstockCopiesMissing
  expr: increase(penstock_ledger_hints_total{{ $of }}[15m]) > 0
  for: 5m
  severity: warning
  summary: "Messages have fewer copies than they should"
  description: "A bookie is away or refuses. Bring it back before another one is stopped: penstock bookie list"
- alert: PenstockPublishingStandsStill
  expr: increase(penstock_ledger_stalls_total{{ $of }}[5m]) > 0
  for: 0m
  severity: critical
  summary: "Too few bookies are left for publishing"
  description: "penstock bookie list says which are there; bring back those that are not."
- alert: PenstockTopicsDoNotOpen
  expr: increase(penstock_broker_open_failures_total{{ $of }}[10m]) > 0
  for: 10m
  severity: critical
  summary: "{{`{{ $labels.pod }}`}} cannot open topics"
  description: "Its log names the topics and what is missing: bookies, etcd, or a state log that cannot be read."
- alert: PenstockEtcdWithoutLeader
  expr: etcd_server_has_leader{{ $of }} == 0
  for: 1m
  severity: critical
  summary: "{{`{{ $labels.pod }}`}} has no leader"
  description: "Open ledgers go on; opening topics and takeovers wait. Bring a majority of the members back."
- alert: PenstockEtcdAlmostFull
  expr: etcd_mvcc_db_total_size_in_bytes{{ $of }} / etcd_server_quota_backend_bytes{{ $of }} > 0.8
  for: 10m
  severity: critical
  summary: "The database of {{`{{ $labels.pod }}`}} is near its quota"
  description: "At the quota etcd takes no more writes. Defragment the members one after the other; if that does not help, there are too many ledgers: let larger ones roll, or trim."
{{- end -}}
