package main

// boards are the dashboards, in the order in which one looks at them.
func boards() []board {
	return []board{overview(), brokers(), bookies(), topics(), recovery()}
}

func overview() board {
	return board{
		uid: "penstock-overview", title: "Penstock / Overview", about: "Is the cluster well, and what does it do?",
		rows: []row{
			{"Now", []panel{
				{kind: number, title: "Processes that answer", about: "Targets that Prometheus can scrape.", unit: "short", lines: []line{{"count(max by (instance) (up{$of}) == 1)", ""}}},
				{kind: number, title: "Processes that do not", about: "docs/runbooks/PenstockDown.md", unit: "short", red: 1, lines: []line{{"count(max by (instance) (up{$of}) == 0) or vector(0)", ""}}},
				{kind: number, title: "Writable bookies", about: "Those that take new ledgers, as brokers see them.", unit: "short", lines: []line{{`max(penstock_broker_bookies{$of,state="writable"})`, ""}}},
				{kind: number, title: "Entries with too few copies", about: "Repair is at them; docs/runbooks/PenstockUnderReplicated.md", unit: "short", red: 1, lines: []line{{`sum(penstock_repair_entries{$of,shortage=~"below_.*"})`, ""}}},
				{kind: number, title: "Entries that nobody has", about: "No bookie that answers has them. docs/runbooks/PenstockLedgerUnavailable.md", unit: "short", red: 1, lines: []line{{`sum(penstock_repair_entries{$of,shortage="unavailable"})`, ""}}},
				{kind: number, title: "Bundles without an owner", about: "Their topics are served by nobody; a moment of it belongs to every failover.", unit: "short", red: 1, lines: []line{{largest("penstock_broker_unowned_bundles", ""), ""}}},
			}},
			{"Traffic", []panel{
				{title: "Published", about: "Messages stored a second.", unit: "ops", stacked: true, lines: []line{{rate("penstock_broker_published_messages_total", "namespace"), "{{namespace}}"}}},
				{title: "Delivered", about: "Messages handed to consumers and readers a second, redeliveries included.", unit: "ops", stacked: true, lines: []line{{rate("penstock_broker_delivered_messages_total", "namespace"), "{{namespace}}"}}},
				{title: "Bytes", about: "Bytes of batches in and out.", unit: "Bps", lines: []line{
					{rate("penstock_broker_published_bytes_total", ""), "published"}, {rate("penstock_broker_delivered_bytes_total", ""), "delivered"},
				}},
				{title: "Time to publish", about: "From a batch's arrival at the broker to its receipt, once it is durable.", unit: "s", lines: quantiles("penstock_broker_publish_seconds")},
				{title: "Receipts", about: "Batches answered a second. Failed: not stored; lost: the topic went to another broker, and the producer asks that one.", unit: "ops", lines: []line{{rate("penstock_broker_receipts_total", "outcome"), "{{outcome}}"}}},
				{title: "Connections", about: "Of producers, and of consumers and readers.", unit: "short", lines: []line{
					{sum("penstock_broker_producers", ""), "producers"}, {sum("penstock_broker_consumers", ""), "consumers"},
				}},
			}},
			{"Backlog", []panel{
				{title: "Oldest unacknowledged message", about: "By namespace: how long ago it was published. Which subscription it is, the board of topics shows.", unit: "s", lines: []line{{largest("penstock_cursor_oldest_unacked_age_seconds", "namespace"), "{{namespace}}"}}},
				{title: "Messages not acknowledged", about: "Each counted for each subscription.", unit: "short", stacked: true, lines: []line{{sum("penstock_cursor_backlog_messages", "namespace"), "{{namespace}}"}}},
				{title: "Bytes not acknowledged", about: "Stored from the oldest unacknowledged messages on, for each subscription.", unit: "bytes", stacked: true, lines: []line{{sum("penstock_cursor_backlog_bytes", "namespace"), "{{namespace}}"}}},
			}},
			{"Disks", []panel{
				{title: "Disks in use", about: "From the low watermark on a bookie takes no new ledgers, from the high one on recovery only.", unit: "percentunit", lines: diskUse()},
				{title: "Time to sync", about: "The 99th percentile by bookie. Publishing cannot be faster than the second of three disks.", unit: "s", lines: []line{{quantile(0.99, "penstock_ledgerstore_sync_seconds", "instance, bookie"), "{{instance}} {{bookie}}"}}},
				{kind: list, title: "Alerts that fire", about: "docs/runbooks has a page about each.", unit: "short", lines: []line{{`ALERTS{alertstate="firing",alertname=~"Penstock.*",job="$job"}`, ""}}},
			}},
		},
	}
}

func diskUse() []line {
	return []line{
		{"1 - " + sum("penstock_ledgerstore_disk_free_bytes", "instance, bookie") + " / " + sum("penstock_ledgerstore_disk_total_bytes", "instance, bookie"), "{{instance}} {{bookie}}"},
		{"min(penstock_ledgerstore_low_watermark_ratio{$of})", "low watermark"},
		{"min(penstock_ledgerstore_high_watermark_ratio{$of})", "high watermark"},
	}
}
