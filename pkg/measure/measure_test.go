package measure_test

import (
	"strconv"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/penstock-mq/penstock/pkg/measure"
)

func TestHistogramsAreClassicAndNative(t *testing.T) {
	t.Parallel()
	h := prometheus.NewHistogram(measure.Histogram("h", "A histogram.", measure.Latency))
	h.Observe(.003)
	var m dto.Metric
	if err := h.Write(&m); err != nil {
		t.Fatal(err)
	}
	if n := len(m.GetHistogram().GetBucket()); n != len(measure.Latency) {
		t.Errorf("%d classic buckets, want %d", n, len(measure.Latency))
	}
	if len(m.GetHistogram().GetPositiveSpan()) == 0 {
		t.Error("no native buckets")
	}
}

func TestNamesAreBounded(t *testing.T) {
	t.Parallel()
	var n measure.Names
	for i := range measure.MaxNames {
		if name := strconv.Itoa(i); n.Label(name) != name {
			t.Fatalf("name %s of %d is not its own", name, measure.MaxNames)
		}
	}
	if got := n.Label("one more"); got != measure.Other {
		t.Errorf("one more is labelled %q, want %q", got, measure.Other)
	}
	if got := n.Label("7"); got != "7" {
		t.Errorf("a name that is known is labelled %q", got)
	}
}
