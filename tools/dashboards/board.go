package main

import (
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// board is one dashboard.
type board struct {
	uid, title, about string
	// instances, when set, is a metric of the processes that the board is about: one may choose among them.
	instances string
	// topics lets one choose among topics.
	topics bool
	rows   []row
}

type row struct {
	title  string
	panels []panel
}

type kind int

const (
	graph kind = iota
	number
	list
)

// panel shows queries. unit is Grafana's name of it.
type panel struct {
	kind               kind
	title, about, unit string
	lines              []line
	// red, when set, is the value from which on a number is red.
	red float64
	// stacked graphs add up their lines.
	stacked bool
}

// line is a query, and the legend of each series that it returns.
type line struct{ expr, legend string }

const (
	rowWidth     = 24
	graphsPerRow = 3
	graphHeight  = 8
	numberHeight = 4
	sourceName   = "datasource" // the variable that holds the data source
)

var source = common.DataSourceRef{Type: cog.ToPtr("prometheus"), Uid: cog.ToPtr("${" + sourceName + "}")}

// of are the matchers that the board's variables make.
func (b *board) of() string {
	of := `job="$job"`
	if b.instances != "" {
		of += `,instance=~"$instance"`
	}
	if b.topics {
		of += `,topic=~"$topic"`
	}
	return of
}

// build makes it in the schema that every Grafana in use imports; the SDK prefers its successor, which older ones do not know.
func (b *board) build() (dashboard.Dashboard, error) { //nolint:staticcheck // see above
	d := dashboard.NewDashboardBuilder(b.title). //nolint:staticcheck // see above
							Uid(b.uid).
							Description(b.about).
							Tags([]string{"penstock"}).
							Refresh("30s").
							Time("now-1h", "now").
							Timezone("browser").
							Tooltip(dashboard.DashboardCursorSyncCrosshair).
							Link(dashboard.NewDashboardLinkBuilder("Penstock").Type(dashboard.DashboardLinkTypeDashboards).
								Tags([]string{"penstock"}).AsDropdown(true).KeepTime(true).IncludeVars(true)).
							WithVariable(dashboard.NewDatasourceVariableBuilder(sourceName).Label("Prometheus").Type("prometheus")).
							WithVariable(variable("job", "Cluster", "label_values(penstock_build_info, job)"))
	if b.instances != "" {
		d.WithVariable(many(variable("instance", "Process", `label_values(`+b.instances+`{job="$job"}, instance)`)))
	}
	if b.topics {
		d.WithVariable(many(variable("topic", "Topic", `label_values(penstock_topic_stored_bytes{job="$job"}, topic)`)))
	}
	id := uint32(0) // links to single panels go by it
	for _, r := range b.rows {
		id++
		d.WithRow(dashboard.NewRowBuilder(r.title).Id(id))
		numbers := 0
		for _, p := range r.panels {
			if p.kind == number {
				numbers++
			}
		}
		for _, p := range r.panels {
			id++
			d.WithPanel(b.panel(&p, id, numbers))
		}
	}
	return d.Build()
}

func variable(name, label, query string) *dashboard.QueryVariableBuilder {
	return dashboard.NewQueryVariableBuilder(name).Label(label).
		Query(dashboard.StringOrMap{String: &query}).Definition(query).
		Datasource(source).
		Refresh(dashboard.VariableRefreshOnTimeRangeChanged).
		Sort(dashboard.VariableSortNaturalAsc)
}

// many lets one choose several values of a variable, or all.
func many(v *dashboard.QueryVariableBuilder) *dashboard.QueryVariableBuilder {
	return v.Multi(true).IncludeAll(true).AllValue(".*").
		Current(dashboard.VariableOption{Selected: cog.ToPtr(true), Text: dashboard.StringOrArrayOfString{String: cog.ToPtr("All")}, Value: dashboard.StringOrArrayOfString{String: cog.ToPtr("$__all")}})
}

// panel lays numbers out in one line, and graphs three a line.
func (b *board) panel(p *panel, id uint32, numbers int) cog.Builder[dashboard.Panel] {
	var targets []cog.Builder[prometheusQuery]
	for i, l := range p.lines {
		q := prometheus.NewDataqueryBuilder().
			RefId(string(rune('A' + i))).
			Datasource(source).
			EditorMode(prometheus.QueryEditorModeCode).
			Expr(strings.ReplaceAll(l.expr, "$of", b.of())).
			LegendFormat(l.legend)
		if p.kind == list {
			q.Format(prometheus.PromQueryFormatTable).Instant()
		} else {
			q.Range()
		}
		targets = append(targets, q)
	}
	switch p.kind {
	case number:
		out := stat.NewPanelBuilder().Id(id).Title(p.title).Description(p.about).Unit(p.unit).Datasource(source).Targets(targets).
			Height(numberHeight).Span(uint32(rowWidth / numbers)).GraphMode(common.BigValueGraphModeArea).
			ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"}))
		steps := []dashboard.Threshold{{Color: "text"}}
		if p.red != 0 {
			steps = []dashboard.Threshold{{Color: "green"}, {Value: cog.ToPtr(p.red), Color: "red"}}
		}
		return out.ColorScheme(dashboard.NewFieldColorBuilder().Mode(dashboard.FieldColorModeIdThresholds)).
			Thresholds(dashboard.NewThresholdsConfigBuilder().Mode(dashboard.ThresholdsModeAbsolute).Steps(steps))
	case list:
		return table.NewPanelBuilder().Id(id).Title(p.title).Description(p.about).Unit(p.unit).Datasource(source).Targets(targets).
			Height(graphHeight).Span(rowWidth / graphsPerRow)
	case graph:
	}
	out := timeseries.NewPanelBuilder().Id(id).Title(p.title).Description(p.about).Unit(p.unit).Datasource(source).Targets(targets).
		Height(graphHeight).Span(rowWidth / graphsPerRow).Min(0).FillOpacity(10).ShowPoints(common.VisibilityModeNever).
		Legend(common.NewVizLegendOptionsBuilder().DisplayMode(common.LegendDisplayModeList).Placement(common.LegendPlacementBottom).ShowLegend(true)).
		Tooltip(common.NewVizTooltipOptionsBuilder().Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending))
	if p.stacked {
		out.Stacking(common.NewStackingConfigBuilder().Mode(common.StackingModeNormal).Group("A"))
	}
	return out
}
