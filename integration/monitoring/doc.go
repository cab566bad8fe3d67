// Package monitoring tests what a cluster is watched with: the dashboards in deploy/grafana, the alert rules and the example of a
// configuration in deploy/prometheus, and the pages in docs/runbooks.
//
// A real Prometheus scrapes a cluster of real processes under load, by the example's configuration, to which only the processes and
// shorter intervals are put. Every query of every panel and every page has to return data, and so has every series that an alert asks
// about; what appears only when something happens is made to happen. Then bookies are killed: the alerts about it fire, and
// end when all is mended. For that the rules are those of the file, with shorter waits and windows.
//
// Prometheus is asked how it parses a query (its API parse_query), so that nothing here guesses at names in expressions.
// What alerts do over hours is tested by promtool, in deploy/prometheus/penstock.rules.test.yaml, for the rules of the file
// and of the chart.
package monitoring
