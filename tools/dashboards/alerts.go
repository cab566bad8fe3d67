package main

// alert is a rule, and what a person is told. Its name is that of its page in docs/runbooks.
type alert struct {
	name     string
	expr     string
	wait     string // how long expr must hold
	severity string
	summary  string
	detail   string
	// chart alerts know how many processes the values ask for; elsewhere nobody knows.
	chart bool
}

const (
	critical = "critical" // messages are not served, or may be lost: somebody is woken
	warning  = "warning"  // it gets there if nobody does anything
)

// alerts are all of them. `$of` are matchers, as in boards; `$bookies` and `$brokers` are the chart's numbers.
func alerts() []alert {
	return []alert{
		{
			name: "PenstockDown", wait: "2m", severity: critical,
			expr:    "max by (job, instance) (up{$of}) == 0 and on (job) count by (job) (count_over_time(penstock_build_info{$of}[1h]))",
			summary: "{{ $labels.instance }} does not answer",
			detail:  "The process is not there, stands still, or cannot be reached.",
		},
		{
			name: "PenstockBookiesMissing", wait: "2m", severity: critical, chart: true,
			expr:    "(count(penstock_ledgerstore_state{$of}) or vector(0)) < $bookies",
			summary: "Fewer than $bookies bookies are there",
			detail:  "New messages have fewer copies, or cannot be published.",
		},
		{
			name: "PenstockBrokersMissing", wait: "5m", severity: warning, chart: true,
			expr:    "(count(penstock_broker_topics{$of}) or vector(0)) < $brokers",
			summary: "Fewer than $brokers brokers are there",
			detail:  "The others serve their topics.",
		},
		{
			name: "PenstockTooFewBookies", wait: "1m", severity: critical,
			expr:    `max by (job) (penstock_broker_bookies{$of,state="writable"}) < max by (job) (penstock_broker_ensemble_size{$of})`,
			summary: "{{ $value }} bookies take new ledgers, fewer than a ledger needs",
			detail:  "Topics cannot be opened, and open ledgers cannot replace a bookie.",
		},
		{
			name: "PenstockPublishingStandsStill", wait: "0s", severity: critical,
			expr:    "sum by (job, instance) (increase(penstock_ledger_stalls_total{$of}[5m])) > 0",
			summary: "Ledgers of {{ $labels.instance }} had no quorum of bookies",
			detail:  "Too few bookies of an ensemble answer for anything to be stored, until one is replaced or back.",
		},
		{
			name: "PenstockLedgerUnavailable", wait: "1m", severity: critical,
			expr:    `sum by (job) (penstock_repair_entries{$of,shortage="unavailable"}) > 0`,
			summary: "No bookie that answers has {{ $value }} entries",
			detail:  "Whoever reads them waits, until a bookie that has them is back.",
		},
		{
			name: "PenstockUnderReplicated", wait: "30m", severity: warning,
			expr:    `sum by (job) (penstock_repair_entries{$of,shortage=~"below_.*"}) + sum by (job) (penstock_repair_ledgers_waiting{$of}) > 0`,
			summary: "Entries have had too few copies for half an hour",
			detail:  "Repair is at it, or cannot go on. Losing another bookie may make some of them unavailable.",
		},
		{
			name: "PenstockRepairStuck", wait: "10m", severity: warning,
			expr:    `max by (job) (sum by (job, cause) (penstock_repair_ledgers{$of,state="stuck",cause!="decommission"})) > 0`,
			summary: "Repair cannot go on with {{ $value }} ledgers",
			detail:  "Each says what it lacks: mostly bookies, or zones.",
		},
		{
			name: "PenstockDrainStalled", wait: "15m", severity: warning,
			expr: `sum by (job) (penstock_repair_ledgers{$of,cause="decommission",state="stuck"}) > 0` +
				` or (sum by (job) (penstock_repair_ledgers{$of,cause="decommission"}) > 0 unless sum by (job) (increase(penstock_repair_copied_entries_total{$of}[30m])) > 0)`,
			summary: "{{ $value }} ledgers do not leave a bookie that is to be emptied",
			detail:  "They cannot be copied, or nothing has been for half an hour. The bookie serves them meanwhile.",
		},
		{
			name: "PenstockBundleUnowned", wait: "1m", severity: critical,
			expr:    "max by (job) (penstock_broker_unowned_bundles{$of}) > 0",
			summary: "Nobody serves {{ $value }} bundles",
			detail:  "Their topics can be neither published to nor read. A takeover takes a second.",
		},
		{
			name: "PenstockTopicsDoNotOpen", wait: "10m", severity: critical,
			expr:    "sum by (job, instance) (increase(penstock_broker_open_failures_total{$of}[10m])) > 0",
			summary: "{{ $labels.instance }} cannot open topics",
			detail:  "Its log names the topics and what is missing: bookies, etcd, or a state log that cannot be read.",
		},
		{
			name: "PenstockSubscriptionLag", wait: "5m", severity: warning,
			expr:    "max by (job, namespace) (penstock_cursor_oldest_unacked_age_seconds{$of}) > 900",
			summary: "A subscription in {{ $labels.namespace }} is {{ $value | humanizeDuration }} behind",
			detail:  "Its consumers are too slow, stuck or gone; what it has not acknowledged stays on the disks.",
		},
		{
			name: "PenstockDiskFillsUp", wait: "15m", severity: warning,
			expr: "1 - penstock_ledgerstore_disk_free_bytes{$of} / penstock_ledgerstore_disk_total_bytes{$of} > penstock_ledgerstore_low_watermark_ratio{$of} - 0.05" +
				" and penstock_ledgerstore_state{$of} == 0",
			summary: "The disk of {{ $labels.instance }} is in use to {{ $value | humanizePercentage }}",
			detail:  "At its low watermark the bookie takes no new ledgers.",
		},
		{
			name: "PenstockBookieReadOnly", wait: "10m", severity: warning,
			expr:    "penstock_ledgerstore_state{$of} == 1",
			summary: "{{ $labels.instance }} takes no new ledgers",
			detail:  "Its disk is above the low watermark.",
		},
		{
			name: "PenstockBookieFull", wait: "1m", severity: critical,
			expr:    "penstock_ledgerstore_state{$of} == 2",
			summary: "The disk of {{ $labels.instance }} is full",
			detail:  "It takes no messages: reads, acknowledgements, recovery and deletion go on.",
		},
		{
			name: "PenstockSlowDisk", wait: "10m", severity: warning,
			expr: "histogram_quantile(0.99, sum by (job, instance, bookie, le) (rate(penstock_ledgerstore_sync_seconds_bucket{$of}[5m]))) > 0.5" +
				" or time() - max by (job, instance, bookie) (penstock_bookie_last_sync_timestamp_seconds{$of}) > 30",
			summary: "The disk of {{ $labels.instance }} takes {{ $value | humanizeDuration }} to sync",
			detail:  "Publishing cannot be faster than the second of three disks.",
		},
		{
			name: "PenstockBookieReadErrors", wait: "0s", severity: critical,
			expr: "sum by (job, instance, bookie) (increase(penstock_ledgerstore_read_errors_total{$of}[15m]))" +
				" + sum by (job, instance, bookie) (increase(penstock_ledgerstore_damaged_entries_total{$of}[15m])) > 0",
			summary: "{{ $labels.instance }} cannot read its disk",
			detail:  "The disk fails or rots; other copies serve meanwhile, and repair makes new ones.",
		},
		{
			name: "PenstockMetadataDoubtful", wait: "10m", severity: critical,
			expr:    "penstock_bookie_gc_stopped{$of} == 1 or penstock_bookie_gc_quarantined_ledgers{$of} > 0",
			summary: "{{ $labels.instance }} does not believe etcd",
			detail:  "Nothing is deleted there meanwhile: etcd is away, another cluster's, or went back to an older state.",
		},
		{
			name: "PenstockEtcdAway", wait: "1m", severity: critical,
			expr:    "max by (job, instance) (penstock_meta_away_seconds{$of}) > 30",
			summary: "etcd has not answered {{ $labels.instance }} for {{ $value | humanizeDuration }}",
			detail:  "Open ledgers go on; opening topics, rolls and takeovers wait.",
		},
		{
			name: "PenstockEtcdWithoutLeader", wait: "1m", severity: critical,
			expr:    "etcd_server_has_leader{$of} == 0 and on (job) count by (job) (penstock_build_info{$of})",
			summary: "{{ $labels.instance }} has no leader",
			detail:  "Open ledgers go on; opening topics, rolls and takeovers wait until a majority of the members is back.",
		},
		{
			name: "PenstockEtcdAlmostFull", wait: "10m", severity: critical,
			expr:    "etcd_mvcc_db_total_size_in_bytes{$of} / etcd_server_quota_backend_bytes{$of} > 0.8 and on (job) count by (job) (penstock_build_info{$of})",
			summary: "The database of {{ $labels.instance }} is at {{ $value | humanizePercentage }} of its quota",
			detail:  "At the quota etcd takes no more writes.",
		},
	}
}
