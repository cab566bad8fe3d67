// What dashboards and alert rules are generated with, apart from the product's modules.
module github.com/penstock-mq/penstock/tools/dashboards

go 1.26.7

require (
	github.com/grafana/grafana-foundation-sdk/go v0.0.22
	go.yaml.in/yaml/v3 v3.0.6
)
