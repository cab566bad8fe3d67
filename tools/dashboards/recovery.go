package main

func recovery() board {
	return board{
		uid: "penstock-recovery", title: "Penstock / Recovery and operations",
		about: "Takeovers, recoveries, and the metadata that they go by.",
		rows: []row{
			{"Failover", []panel{
				{title: "Bundles without an owner", about: "As brokers see them; for more than a moment, nobody serves their topics.", unit: "short", lines: []line{{largest("penstock_broker_unowned_bundles", "instance"), "{{instance}}"}}},
				{title: "Takeovers", about: "Bundles a second.", unit: "ops", lines: []line{{rate("penstock_broker_takeovers_total", "instance"), "{{instance}}"}}},
				{title: "Hand-overs", about: "Bundles a second that a broker stopped serving, by reason.", unit: "ops", lines: []line{{rate("penstock_broker_handovers_total", "reason"), "{{reason}}"}}},
				{title: "Time of a takeover", about: "From taking a bundle to its state log being open.", unit: "s", lines: quantiles("penstock_broker_takeover_seconds")},
				{title: "Time to open a topic", about: "With the recovery of its ledger.", unit: "s", lines: quantiles("penstock_broker_topic_open_seconds")},
				{title: "Time to read a state log", about: "Part of a takeover.", unit: "s", lines: quantiles("penstock_statelog_replay_seconds")},
				{title: "Ledgers recovered", about: "Recoveries a second, by result. Failed ones are tried again.", unit: "ops", lines: []line{{rate("penstock_ledger_recoveries_total", "result"), "{{result}}"}}},
				{title: "Time to recover a ledger", about: "From its start to the closed ledger.", unit: "s", lines: quantiles("penstock_ledger_recovery_seconds")},
				{title: "Written back", about: "Bytes that recoveries wrote, so that what is confirmed has all its copies.", unit: "Bps", lines: []line{{rate("penstock_ledger_recovered_bytes_total", ""), "written back"}}},
				{title: "Writers that withdrew", about: "Fenced, or their ledger taken over; and chains dropped because another owner took over.", unit: "ops", lines: []line{
					{rate("penstock_ledger_withdrawals_total", ""), "writers"}, {rate("penstock_chain_lost_total", ""), "chains"},
				}},
				{title: "Brokers and bookies", about: "Registered, as brokers see them.", unit: "short", lines: []line{
					{largest("penstock_broker_brokers", ""), "brokers"}, {largest("penstock_broker_bookies", "state"), "bookies: {{state}}"}, {largest("penstock_broker_ensemble_size", ""), "needed for a ledger"},
				}},
				{title: "Copies missing", about: "Ranges a second that writers handed to repair.", unit: "ops", lines: []line{{rate("penstock_ledger_hints_total", "instance"), "{{instance}}"}}},
			}},
			{"Repair", []panel{
				{title: "Entries by what they lack", about: "Of damaged ledgers: copies below the write quorum, below the ack quorum, all of them, or on hosts and zones of their own.", unit: "short", lines: []line{{sum("penstock_repair_entries", "shortage"), "{{shortage}}"}}},
				{title: "Damaged ledgers by cause", about: "One with several causes counts for each.", unit: "short", stacked: true, lines: []line{{sum("penstock_repair_ledgers", "cause"), "{{cause}}"}}},
				{title: "Damaged ledgers by state", about: "Stuck ones say what they lack: docs/runbooks/PenstockRepairStuck.md. Queued ones follow as others are done.", unit: "short", lines: []line{
					{sum("penstock_repair_ledgers", "state"), "{{state}}"}, {sum("penstock_repair_ledgers_waiting", ""), "queued"},
				}},
				{title: "Copied", about: "Bytes of copies made.", unit: "Bps", lines: []line{{rate("penstock_repair_copied_bytes_total", "instance"), "{{instance}}"}}},
				{title: "Entries copied", about: "A second.", unit: "ops", lines: []line{{rate("penstock_repair_copied_entries_total", "instance"), "{{instance}}"}}},
				{title: "Ledgers mended", about: "And steps that failed, which are taken again.", unit: "ops", lines: []line{
					{rate("penstock_repair_ledgers_mended_total", ""), "mended"}, {rate("penstock_repair_failures_total", ""), "steps failed"},
				}},
				{title: "Oldest damage", about: "For how long it has been known.", unit: "s", lines: []line{{largest("penstock_repair_oldest_seconds", ""), "oldest"}}},
				{title: "Time at a ledger", about: "Of a worker.", unit: "s", lines: quantiles("penstock_repair_job_seconds")},
				{title: "Bookies absent", about: "Not registered, and not retired. The census is kept by one broker (1).", unit: "short", lines: []line{
					{sum("penstock_repair_bookies_absent", ""), "absent"}, {sum("penstock_repair_auditor", ""), "auditors"},
				}},
			}},
			{"Operations", []panel{
				{title: "Ledgers to leave a bookie", about: "Of bookies that are being decommissioned, of those that have a record of repair. penstock op watch shows each operation. docs/runbooks/PenstockDrainStalled.md", unit: "short", stacked: true, lines: []line{
					{`sum by (state) (penstock_repair_ledgers{$of,cause="decommission"})`, "{{state}}"},
				}},
				{title: "Bookies by state", about: "As brokers see them: draining ones get nothing new.", unit: "short", lines: []line{{largest("penstock_broker_bookies", "state"), "{{state}}"}}},
				{title: "Ledgers stored", about: "By bookie: one that is emptied goes down to none.", unit: "short", lines: []line{{sum("penstock_ledgerstore_ledgers", "instance, bookie"), "{{instance}} {{bookie}}"}}},
			}},
			{"Metadata", []panel{
				{title: "Transactions", about: "Of etcd a second, by outcome.", unit: "ops", lines: []line{{rate("penstock_meta_transactions_total", "outcome"), "{{outcome}}"}}},
				{title: "Time of a transaction", about: "Retries included.", unit: "s", lines: quantiles("penstock_meta_transaction_seconds")},
				{title: "Time of a read", about: "Retries included.", unit: "s", lines: quantiles("penstock_meta_read_seconds")},
				{title: "Attempts without an answer", about: "A second.", unit: "ops", lines: []line{{rate("penstock_meta_retries_total", "instance"), "{{instance}}"}}},
				{title: "etcd away", about: "How long it has not answered a process. docs/runbooks/PenstockEtcdAway.md", unit: "s", lines: []line{{largest("penstock_meta_away_seconds", "instance"), "{{instance}}"}}},
				{title: "The watch", about: "Changes a second that it has shown, and times that it had to start over.", unit: "ops", lines: []line{
					{rate("penstock_meta_watch_events_total", ""), "changes"}, {rate("penstock_meta_watch_restarts_total", ""), "restarts"}, {rate("penstock_meta_watch_resyncs_total", ""), "read again"},
				}},
				{title: "Transactions by what they do", about: "A second.", unit: "ops", stacked: true, lines: []line{{rate("penstock_meta_transactions_total", "op"), "{{op}}"}}},
				{title: "etcd: a leader is known", about: "By each member.", unit: "short", lines: []line{{"etcd_server_has_leader{$of}", "{{instance}}"}}},
				{title: "etcd: size", about: "Of the database; the line above is its quota, at which it takes no more writes.", unit: "bytes", lines: []line{
					{"etcd_mvcc_db_total_size_in_bytes{$of}", "{{instance}}"}, {largest("etcd_server_quota_backend_bytes", ""), "quota"},
				}},
				{title: "etcd: time to sync", about: "Of its log, the 99th percentile.", unit: "s", lines: []line{{quantile(0.99, "etcd_disk_wal_fsync_duration_seconds", "instance"), "{{instance}}"}}},
			}},
		},
	}
}
