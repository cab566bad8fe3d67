package command

import (
	"bytes"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/workload"
)

// The verdict is what the demo is for: one message that is wrong, of any kind, fails it.
func TestDemoFailsOnWhatIsFalse(t *testing.T) {
	t.Parallel()
	good := workload.Report{Sent: 10, Acknowledged: 10, Received: 10, Redelivered: 3}
	with := func(change func(*workload.Report)) workload.Report {
		r := good
		change(&r)
		return r
	}
	for name, c := range map[string]struct {
		report workload.Report
		fails  bool
	}{
		"good":             {good, false},
		"not all sent":     {with(func(r *workload.Report) { r.Sent, r.Acknowledged, r.Received = 9, 9, 9 }), true},
		"not acknowledged": {with(func(r *workload.Report) { r.Acknowledged = 9 }), true},
		"not received":     {with(func(r *workload.Report) { r.Received = 9 }), true},
		"reordered":        {with(func(r *workload.Report) { r.Violations = []workload.Violation{{Kind: workload.Reordered, Count: 1}} }), true},
		"stored twice":     {with(func(r *workload.Report) { r.Violations = []workload.Violation{{Kind: workload.StoredTwice, Count: 1}} }), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			d := &demo{app: &app{out: &out}, flags: demoFlags{messages: 10}, run: &workload.Run{}}
			if err := d.verdict(c.report, demoGaps{}); (err != nil) != c.fails || strings.Contains(out.String(), "NOT AS PROMISED") != c.fails {
				t.Errorf("verdict: %v\n%s", err, &out)
			}
		})
	}
}
