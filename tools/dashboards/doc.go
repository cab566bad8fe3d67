// Dashboards writes what Grafana and Prometheus are given to watch Penstock with: the dashboards in deploy/grafana, the alert
// rules in deploy/prometheus, and the copies of both that the Helm chart carries, because a chart cannot reach outside of its
// folder.
//
//	cd tools/dashboards && go run .      # after a change here; `go test .` fails until it was run
//
// Boards and alerts are tables in this package: overview.go, broker.go, bookie.go, topics.go, recovery.go, alerts.go. A panel is a title,
// what it shows, a unit, and queries. Nothing else is chosen panel by panel, so that all of them look and behave alike.
//
// In every query `$of` stands for the matchers of the series meant: in a board those of the variables at its top, in a rule of the
// chart those of its release, in a rule of deploy/prometheus none. Series of one cluster share the label `job`; `instance` names
// the process.
//
// Written by hand, JSON of dashboards cannot be reviewed; templates of text would be no shorter than these tables, and would not
// know what Grafana's schema allows.
package main
