package main

import "strings"

// runbooks is where the pages of docs/runbooks can be read.
const runbooks = "https://github.com/penstock-mq/penstock/blob/main/docs/runbooks/"

type ruleFile struct {
	Groups []ruleGroup `yaml:"groups"`
}

type ruleGroup struct {
	Name  string `yaml:"name"`
	Rules []rule `yaml:"rules"`
}

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// everywhere turns an expression with `$of` into one about all series.
var everywhere = strings.NewReplacer("{$of,", "{", "{$of}", "")

// rules are the alerts as a file for any Prometheus, and as the list of rules of the chart's, where placeholders are left.
func rules() (file, chart []byte, err error) {
	var all, charts []rule
	for _, a := range alerts() {
		r := rule{
			Alert: a.name, Expr: a.expr, For: a.wait,
			Labels:      map[string]string{"severity": a.severity},
			Annotations: map[string]string{"summary": a.summary, "description": a.detail, "runbook_url": runbooks + a.name + ".md"},
		}
		charts = append(charts, r)
		if !a.chart {
			r.Expr = everywhere.Replace(r.Expr)
			all = append(all, r)
		}
	}
	if file, err = encode(ruleFile{[]ruleGroup{{"penstock", all}}}); err != nil {
		return nil, nil, err
	}
	if chart, err = encode(charts); err != nil {
		return nil, nil, err
	}
	return file, chart, nil
}
