package main

func brokers() board {
	return board{
		uid: "penstock-broker", title: "Penstock / Brokers", about: "What brokers serve, how fast, and what they wait for.",
		instances: "penstock_broker_topics",
		rows: []row{
			{"Service", []panel{
				{title: "Bundles", about: "Ranges of topics owned.", unit: "short", lines: each(sum, "penstock_broker_bundles")},
				{title: "Open topics", about: "Topics and partitions that are open.", unit: "short", lines: each(sum, "penstock_broker_topics")},
				{title: "Lease", about: "1 while the broker has a lease that it can renew; without one it owns nothing.", unit: "short", lines: each(sum, "penstock_broker_lease_alive")},
				{title: "Producers", about: "Connected.", unit: "short", lines: each(sum, "penstock_broker_producers")},
				{title: "Consumers", about: "Connected, readers included.", unit: "short", lines: each(sum, "penstock_broker_consumers")},
				{title: "Lookups", about: "Answers to clients that look for a topic's broker. Unserved: nobody has it yet, the client asks again.", unit: "ops", lines: []line{{rate("penstock_broker_lookups_total", "outcome"), "{{outcome}}"}}},
			}},
			{"Publishing", []panel{
				{title: "Published", about: "Messages stored a second.", unit: "ops", lines: each(rate, "penstock_broker_published_messages_total")},
				{title: "Bytes published", about: "Bytes of batches stored.", unit: "Bps", lines: each(rate, "penstock_broker_published_bytes_total")},
				{title: "Time to publish", about: "From a batch's arrival to its receipt.", unit: "s", lines: quantiles("penstock_broker_publish_seconds")},
				{title: "Receipts", about: "Batches answered a second, by outcome.", unit: "ops", lines: []line{{rate("penstock_broker_receipts_total", "outcome"), "{{outcome}}"}}},
				{title: "On the way to bookies", about: "Bytes of batches that bookies have not stored; at the limit producers wait, because bookies are the brake.", unit: "bytes", lines: memory("publish")},
				{title: "Duplicates", about: "Batches recognised as sent before.", unit: "ops", lines: each(rate, "penstock_topic_duplicates_total")},
			}},
			{"Delivery", []panel{
				{title: "Delivered", about: "Messages handed to consumers and readers a second.", unit: "ops", lines: each(rate, "penstock_broker_delivered_messages_total")},
				{title: "Bytes delivered", about: "Bytes of their batches.", unit: "Bps", lines: each(rate, "penstock_broker_delivered_bytes_total")},
				{title: "Redelivered", about: "Batches handed out that had been before.", unit: "ops", lines: each(rate, "penstock_dispatch_redelivered_entries_total")},
				{title: "What subscriptions wait for", about: "Subscriptions by reason; docs/cli.md says what each needs.", unit: "short", stacked: true, lines: []line{{sum("penstock_dispatch_waiting", "reason"), "{{reason}}"}}},
				{title: "Acknowledgements", about: "Received a second.", unit: "ops", lines: each(rate, "penstock_cursor_acks_total")},
				{title: "Time to acknowledge", about: "Until an acknowledgement whose consumer waits for it is durable.", unit: "s", lines: quantiles("penstock_cursor_ack_seconds")},
				{title: "Reads for delivery", about: "Reads a second, those that failed, and entries that had to come from bookies.", unit: "ops", lines: []line{
					{rate("penstock_dispatch_reads_total", ""), "reads"}, {rate("penstock_dispatch_read_errors_total", ""), "failed"}, {rate("penstock_topic_read_through_entries_total", ""), "entries from bookies"},
				}},
				{title: "Newest entries kept", about: "Memory of entries that readers find without asking bookies.", unit: "bytes", lines: memory("cache")},
				{title: "Read and not sent", about: "At the limit delivery waits for consumers.", unit: "bytes", lines: memory("read")},
			}},
			{"Ledgers and bookies", []panel{
				{title: "Ensemble changes", about: "A bookie was replaced in an open ledger.", unit: "ops", lines: each(rate, "penstock_ledger_ensemble_changes_total")},
				{title: "Bookies suspected", about: "Times a second that a bookie of an ensemble did not answer as it should.", unit: "ops", lines: each(rate, "penstock_ledger_suspects_total")},
				{title: "Stalls", about: "Times a second that too few bookies were left to store anything. docs/runbooks/PenstockPublishingStandsStill.md", unit: "ops", lines: each(rate, "penstock_ledger_stalls_total")},
				{title: "Ledgers opened and closed", about: "By size, age, and takeover.", unit: "ops", lines: []line{
					{rate("penstock_chain_ledgers_opened_total", ""), "opened"}, {rate("penstock_chain_rolls_total", ""), "rolled"}, {rate("penstock_chain_ledgers_trimmed_total", ""), "deleted"},
				}},
				{title: "Connections to bookies", about: "Two per bookie in use.", unit: "short", lines: each(sum, "penstock_bookieclient_connections")},
				{title: "Failed openings", about: "Attempts to open a topic or a state log that failed. docs/runbooks/PenstockTopicsDoNotOpen.md", unit: "ops", lines: each(rate, "penstock_broker_open_failures_total")},
			}},
			{"State logs", []panel{
				{title: "Bytes", about: "Stored, and live in them: when the first grows and the second does not, old ledgers are kept.", unit: "bytes", lines: []line{
					{sum("penstock_statelog_stored_bytes", ""), "stored"}, {sum("penstock_statelog_live_bytes", ""), "live"},
				}},
				{title: "Records", about: "Stored a second, and those written again so that old ledgers can go.", unit: "ops", lines: []line{
					{rate("penstock_statelog_records_total", ""), "stored"}, {rate("penstock_statelog_rewritten_records_total", ""), "rewritten"},
				}},
			}},
			machine(),
		},
	}
}

// memory is one of a broker's budgets, and its limit.
func memory(of string) []line {
	m := "penstock_broker_" + of + "_memory"
	return []line{{sum(m+"_bytes", process), who}, {largest(m+"_limit_bytes", ""), "limit"}}
}
