package bench

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var rewrite = flag.Bool("rewrite", false, "write golden files anew")

// specimen has every field.
func specimen() *Result {
	written, more := int64(3<<30), int64(1<<20)
	latency := func(ms float64) *Latency {
		h := newHistogram()
		for i := range int64(2000) {
			recordInto(h, int64(ms*millisecond)+i*i*1000)
		}
		return Summarize(h)
	}
	r := &Result{
		Driver: "penstock",
		Scenario: Scenario{
			Name: "catching up", Topics: 2, Partitions: 3, Consumers: 2, Rate: 20_000, Batching: Batching{Messages: 100, Bytes: 1 << 16, Delay: time.Millisecond},
			Ack: AckAll, Keys: KeysZipf, Backlog: 1_000_000, Live: true,
		}.WithDefaults(),
		Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Machine: Machine{CPUs: 2, OS: "linux", Arch: "amd64", Go: "go1.26", Load: 0.25},
		Setup:   Setup{TopicsSeconds: 0.5, ConsumersSeconds: 0.25, ProducersSeconds: 0.125},
		Phases: []Phase{
			{
				Name: PhaseBuild, Seconds: 10, Published: Flow{1_000_000, 100_000, 102_400_000}, Failed: 1, Publish: latency(2), DiskProbe: latency(0.2),
				Processes: []Cost{
					{Name: "bench", PID: 11, CPUSeconds: 2, CPUPerMessageMicros: 2, RSSBytes: 50 << 20, WrittenBytes: &more, WrittenPerByte: 0.001},
					{Name: "bookie", PID: 12, CPUSeconds: 3, CPUPerMessageMicros: 3, RSSBytes: 100 << 20, WrittenBytes: &written, WrittenPerByte: 3.15},
				},
				Syncs: &Syncs{Count: 30_000, PerMessage: 0.03},
			},
			{
				Name: PhaseCatchUp, Seconds: 4, Published: Flow{80_000, 20_000, 20_480_000}, Received: Flow{1_080_000, 270_000, 276_480_000},
				Publish: latency(3), EndToEnd: latency(900),
				Processes: []Cost{{Name: "bench", PID: 11, CPUSeconds: 2, CPUPerMessageMicros: 1.85, RSSBytes: 60 << 20}, {Name: "bookie", PID: 12, Gone: true}},
			},
		},
		Lateness: &Latency{Count: 9, MeanMs: 0.05, P50Ms: 0.05, P90Ms: 0.06, P99Ms: 0.09, P999Ms: 0.1, MaxMs: 0.1},
		Verified: Verified{
			Sent: 1_080_010, Acknowledged: 1_080_001, Failed: 8, Unsettled: 1, Unsent: 3, Expected: 1_080_001, Received: 1_079_999, Missing: 2, Duplicates: 4, Foreign: 5,
		},
		Failures:    []Failure{{Error: "the disk is full", Count: 8}},
		Unobserved:  []string{"disk probe: no space left on device"},
		Interrupted: "context canceled",
	}
	for i := range 14 {
		p := Point{
			Seconds: float64(i + 1), Phase: PhaseBuild, PublishedPerSecond: 100_000 + float64(i%3)*1000, PublishP50Ms: 2, PublishP99Ms: 5, PublishMaxMs: 9,
			Cores: []float64{0.2, 0.3}, RSSBytes: []int64{50 << 20, 100 << 20},
		}
		if i >= 10 {
			p.Phase, p.ReceivedPerSecond, p.EndToEndP50Ms, p.EndToEndP99Ms, p.EndToEndMaxMs, p.Failed = PhaseCatchUp, 270_000, 900, 2000, 2500, 2
		}
		r.Series = append(r.Series, p)
	}
	return r
}

// JSON is an interface: fields are only added. So is, to eyes that know it, the table.
func TestResultIsGolden(t *testing.T) {
	t.Parallel()
	r := specimen()
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	var table, page bytes.Buffer
	if err := errors.Join(r.WriteTable(&table), WriteHTML(&page, "A <report>", []*Result{r})); err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string][]byte{"result.json": text, "result.txt": table.Bytes(), "report.html": page.Bytes()} {
		path := filepath.Join("testdata", name)
		if *rewrite {
			if err := errors.Join(os.MkdirAll("testdata", 0o750), os.WriteFile(path, got, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s differs (%v): run go test -rewrite and look at the difference\n%s", path, err, got)
		}
	}
}

// The page needs nothing from elsewhere, runs nothing, and its plots are whole.
func TestReportStandsAlone(t *testing.T) {
	t.Parallel()
	r := specimen()
	r.Driver = `<script>alert("x")</script>`
	var page bytes.Buffer
	if err := WriteHTML(&page, "report", []*Result{r, {Scenario: Scenario{}.WithDefaults()}}); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	for _, unwanted := range []string{"<script", "http:", "https:", "@import", "url(", "NaN", "Inf", "ZgotmplZ"} {
		if strings.Contains(text, unwanted) {
			t.Errorf("the page has %q", unwanted)
		}
	}
	plots := 0
	for rest := text; ; plots++ {
		_, after, found := strings.Cut(rest, "<svg")
		if !found {
			break
		}
		plot, next, _ := strings.Cut(after, "</svg>")
		rest = next
		for dec := xml.NewDecoder(strings.NewReader("<svg" + plot + "</svg>")); ; {
			if _, err := dec.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("a plot is no XML: %v\n%s", err, plot)
			}
		}
		if !strings.Contains(plot, "<polyline") {
			t.Errorf("a plot shows nothing: %s", plot)
		}
	}
	if plots != 5 {
		t.Errorf("%d plots, want messages, latency, CPU, memory and the distribution", plots)
	}
}

func TestAxes(t *testing.T) {
	t.Parallel()
	for _, a := range []axis{{high: 1}, {high: 0.3}, {high: 123_456}, {high: 7e9}, {low: 0.001, high: 1000, logarithmic: true}, {low: 1, high: 10, logarithmic: true}} {
		a.from, a.to = chartLeft, chartRight
		ticks := a.ticks()
		if len(ticks) < 2 || len(ticks) > 12 {
			t.Errorf("%+v has the ticks %v", a, ticks)
		}
		for i, k := range ticks {
			if k.At < chartLeft || k.At > chartRight || i > 0 && k.At <= ticks[i-1].At {
				t.Errorf("%+v has the ticks %v", a, ticks)
			}
		}
	}
	long := make([]xy, 5*maxPoints+3)
	long[3210].y = 7
	thinned := thin(long)
	top := 0.0
	for _, v := range thinned {
		top = max(top, v.y)
	}
	if len(thinned) > maxPoints || top != 7 {
		t.Errorf("%d points with a peak of %v", len(thinned), top)
	}
}

func TestSummary(t *testing.T) {
	t.Parallel()
	if Summarize(nil) != nil || Summarize(newHistogram()) != nil {
		t.Error("nothing has a summary")
	}
	h := newHistogram()
	for i := range int64(1000) {
		recordInto(h, (i+1)*int64(time.Millisecond))
	}
	l := Summarize(h)
	for _, c := range []struct{ got, want float64 }{{l.P50Ms, 500}, {l.P90Ms, 900}, {l.P99Ms, 990}, {l.P999Ms, 999}, {l.MaxMs, 1000}, {l.MeanMs, 500.5}} {
		if c.got < c.want*0.998 || c.got > c.want*1.002 {
			t.Errorf("got %v, want %v", c.got, c.want)
		}
	}
	recordInto(h, 1<<62) // longer than can be told apart
	if l := Summarize(h); l.Count != 1001 || l.MaxMs < 3_600_000 {
		t.Errorf("summary %+v", l)
	}
}

func TestNumbersForPeople(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0", 0.01234: "0.0123", 0.5: "0.500", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 1234567: "1,234,567"} {
		if got := decimals(v); got != want {
			t.Errorf("%v is written %s, want %s", v, got, want)
		}
	}
}
