package main

func bookies() board {
	return board{
		uid: "penstock-bookie", title: "Penstock / Bookies", about: "Disks, and what is stored on them.",
		instances: "penstock_ledgerstore_state",
		rows: []row{
			{"Disk", []panel{
				{title: "State", about: "0: takes everything; 1: no new ledgers; 2: recovery only.", unit: "short", lines: each(largest, "penstock_ledgerstore_state")},
				{title: "In use", about: "From the low watermark on no new ledgers are taken, from the high one on recovery only.", unit: "percentunit", lines: diskUse()},
				{title: "Free", about: "Bytes, spare segments included.", unit: "bytes", lines: each(sum, "penstock_ledgerstore_disk_free_bytes")},
				{title: "Time to sync", about: "Of fdatasync on the active segment.", unit: "s", lines: quantiles("penstock_ledgerstore_sync_seconds")},
				{title: "Slowest syncs", about: "The 99th percentile by bookie. docs/runbooks/PenstockSlowDisk.md", unit: "s", lines: []line{{quantile(0.99, "penstock_ledgerstore_sync_seconds", process), who}}},
				{title: "Last sync", about: "Time since something was synced; an idle disk is tried every 5 seconds.", unit: "s", lines: []line{{"time() - " + largest("penstock_bookie_last_sync_timestamp_seconds", process), who}}},
				{title: "Syncs", about: "A second.", unit: "ops", lines: each(rate, "penstock_ledgerstore_sync_seconds_count")},
				{title: "Synced together", about: "Mean number of records that share one sync.", unit: "short", lines: each(mean, "penstock_ledgerstore_group_records")},
				{title: "Reads that failed", about: "Disk errors and wrong checksums. docs/runbooks/PenstockBookieReadErrors.md", unit: "ops", lines: each(rate, "penstock_ledgerstore_read_errors_total")},
				{title: "Damage found", about: "Entries a second that scrubs found unreadable; repair makes new copies of them.", unit: "ops", lines: each(rate, "penstock_ledgerstore_damaged_entries_total")},
			}},
			{"Requests", []panel{
				{title: "Adds", about: "Answered a second, by code.", unit: "ops", stacked: true, lines: []line{{rate("penstock_bookie_adds_total", "code"), "{{code}}"}}},
				{title: "Bytes stored", about: "Bodies of entries.", unit: "Bps", lines: each(rate, "penstock_bookie_add_bytes_total")},
				{title: "Time to add", about: "From arrival to answer.", unit: "s", lines: quantiles("penstock_bookie_add_seconds")},
				{title: "Other requests", about: "Reads, fences and LACs, by code.", unit: "ops", stacked: true, lines: []line{{rate("penstock_bookie_requests_total", "op, code"), "{{op}} {{code}}"}}},
				{title: "Bytes read", about: "Bodies of entries.", unit: "Bps", lines: each(rate, "penstock_bookie_read_bytes_total")},
				{title: "Time to read", about: "From arrival to answer.", unit: "s", lines: quantiles("penstock_bookie_read_seconds")},
				{title: "Adds in flight", about: "Bytes that are not answered; at the limit connections are read no further.", unit: "bytes", lines: []line{
					{sum("penstock_bookie_add_in_flight_bytes", process), who}, {largest("penstock_bookie_add_in_flight_limit_bytes", ""), "limit"},
				}},
				{title: "Served from memory", about: "Share of entries read.", unit: "percentunit", lines: []line{
					{rate("penstock_ledgerstore_cache_hits_total", process) + " / (" + rate("penstock_ledgerstore_cache_hits_total", process) + " + " + rate("penstock_ledgerstore_cache_misses_total", process) + ")", who},
				}},
				{title: "Connections", about: "Open data connections.", unit: "short", lines: each(sum, "penstock_bookie_connections")},
				{title: "Connections ended", about: "Refused in the handshake, closed for bytes that break the protocol, or because the peer did not read its answers.", unit: "ops", lines: []line{
					{rate("penstock_bookie_refused_connections_total", ""), "refused"},
					{rate("penstock_bookie_malformed_connections_total", ""), "malformed"},
					{rate("penstock_bookie_slow_peers_total", ""), "slow peer"},
					{rate("penstock_bookie_accept_errors_total", ""), "not accepted"},
				}},
			}},
			{"Space", []panel{
				{title: "Live", about: "Bytes of entries of ledgers that exist.", unit: "bytes", lines: each(sum, "penstock_ledgerstore_live_bytes")},
				{title: "Dead", about: "Bytes that compaction or unlinking will free.", unit: "bytes", lines: each(sum, "penstock_ledgerstore_dead_bytes")},
				{title: "Given back", about: "Bytes of disk freed a second.", unit: "Bps", lines: each(rate, "penstock_ledgerstore_freed_bytes_total")},
				{title: "Ledgers", about: "Stored.", unit: "short", lines: each(sum, "penstock_ledgerstore_ledgers")},
				{title: "Segments", about: "Files, spares excluded.", unit: "short", lines: each(sum, "penstock_ledgerstore_segments")},
				{title: "Compaction", about: "Bytes rewritten a second, and compactions given up.", unit: "Bps", lines: []line{
					{rate("penstock_ledgerstore_compacted_bytes_total", ""), "bytes"}, {rate("penstock_ledgerstore_compaction_errors_total", ""), "given up"},
				}},
				{title: "Ledgers deleted", about: "By garbage collection, and those about which it could not decide.", unit: "ops", lines: []line{
					{rate("penstock_bookie_gc_deleted_ledgers_total", ""), "deleted"}, {rate("penstock_bookie_gc_skipped_ledgers_total", ""), "skipped"},
				}},
				{title: "Doubt", about: "Garbage collection stands still (1), ledgers without a record, and ledgers of which entries may have been lost here.", unit: "short", lines: []line{
					{largest("penstock_bookie_gc_stopped", ""), "collection stopped"}, {sum("penstock_bookie_gc_quarantined_ledgers", ""), "without a record"}, {sum("penstock_ledgerstore_limbo_ledgers", ""), "in limbo"},
				}},
			}},
			machine(),
		},
	}
}
