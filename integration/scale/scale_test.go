package scale

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/integration/steady"
)

var (
	many    = flag.Int("topics", 0, "topics that are used; 0 is a few, quickly")
	idle    = flag.Int("idle", 100_000, "topics that nobody uses")
	results = flag.String("results", "", "file to write the page to")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// All steps can be taken, no publish fails, and a topic's takeover comes to an end. How much and how fast is told.
func TestScale(t *testing.T) {
	programs, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	dir, cfg := t.ArtifactDir(), briefly()
	if *many > 0 {
		cfg = fully(*many, *idle)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	s, err := settle(ctx, programs, dir, cfg, t.Logf)
	t.Cleanup(func() {
		if t.Failed() && s.c != nil {
			for _, p := range s.c.All() {
				t.Logf("the end of the log of %s:\n%s", p.Name, p.LogTail())
			}
		}
		s.close()
		if !t.Failed() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	s.out.commit = figures.BuiltFrom(programs)
	s.run()
	if *results != "" {
		if err := written(&s.out).Write(*results); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(s.out.errs...); err != nil {
		t.Error(err)
	}
	if s.out.take.failed > 0 {
		t.Errorf("%d publishes failed while their topics were taken over: %v", s.out.take.failed, s.out.take.err)
	}
}

func TestParseUsage(t *testing.T) {
	t.Parallel()
	if n, err := parseStatus("Name:\tx\nVmHWM:\t  90 kB\nVmRSS:\t   12 kB\nRssAnon:\t 5 kB\n"); err != nil || n != 12<<10 {
		t.Errorf("%v, %v", n, err)
	}
	if _, err := parseStatus("Name:\tx\n"); err == nil {
		t.Error("no VmRSS, and no error")
	}
	stat := "77 (a (b) c) S 1 77 77 0 -1 4194560 100 0 0 0 150 25 0 0 20 0 9 0 1 2 3"
	if d, err := parseStat(stat); err != nil || d != 1750*time.Millisecond {
		t.Errorf("%v, %v", d, err)
	}
	if _, err := parseStat("77 (x) S 1"); err == nil {
		t.Error("no times, and no error")
	}
	if n := scannedIn("time=1 msg=\"store recovered\" dir=/x segments=7 scanned=3 damaged=false\n"); n != 3 {
		t.Error(n)
	}
	if n := scannedIn("msg=other scanned=3"); n != -1 {
		t.Error(n)
	}
	for key, want := range map[string]string{"view/topics/public/default/a": "topics", "ledgers/b12": "ledgers", "ledger-ids": "ledger-ids"} {
		if got := kindOf(key); got != want {
			t.Errorf("%s is of kind %s", key, got)
		}
	}
}

// Each thing is done once, and the first error ends it.
func TestEach(t *testing.T) {
	t.Parallel()
	var done [500]atomic.Int32
	if err := each(t.Context(), len(done), func(_ context.Context, i int) error { done[i].Add(1); return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range done {
		if n := done[i].Load(); n != 1 {
			t.Errorf("%d was done %d times", i, n)
		}
	}
	wrong := errors.New("wrong")
	var n atomic.Int32
	err := each(t.Context(), 1<<30, func(context.Context, int) error {
		if n.Add(1) == 100 {
			return wrong
		}
		return nil
	})
	if !errors.Is(err, wrong) {
		t.Error(err)
	}
}

func publishing(rate float64, p99 time.Duration) *steady.Result {
	r := &steady.Result{Sent: int(rate), Took: time.Second}
	for range 99 {
		r.Latencies.Add(time.Millisecond)
	}
	for range 2 {
		r.Latencies.Add(p99)
	}
	return r
}

// The page has what was measured, per topic and by the targets, and says what was not.
func TestWritten(t *testing.T) {
	t.Parallel()
	m := &measured{cfg: fully(1000, 5000), commit: "v1", making: 12 * time.Second}
	now := time.Unix(0, 0)
	of := func(live float64) usage { return usage{live: live, rss: 2 * live} }
	m.base = cost{of(10 << 20), of(20 << 20), of(15 << 20), now}
	m.made = cost{of(10<<20 + 8000<<10), of(20<<20 + 1000<<10), of(15<<20 + 2000<<10), now}
	m.recordsBase = records{keys: 10, bytes: 100, kinds: map[string]int64{"ledgers": 50}}
	m.recordsUsed = records{keys: 5010, bytes: 600_100, kinds: map[string]int64{"ledgers": 200_050, "ledger-ids": 10}}
	m.uses = []use{
		{rate: 1, many: []*steady.Result{publishing(990, 4*time.Millisecond), publishing(980, 9*time.Millisecond), publishing(1000, 3*time.Millisecond)}, few: []*steady.Result{
			publishing(1000, 4*time.Millisecond), publishing(1000, 3*time.Millisecond), publishing(1000, 2*time.Millisecond),
		}},
		{rate: 5, many: []*steady.Result{publishing(3000, time.Second)}, few: []*steady.Result{publishing(5000, time.Millisecond)}},
	}
	m.take.topics, m.take.hot = 500, 150*time.Millisecond
	m.take.all.Add(3 * time.Second)
	m.back = []restart{{ready: 1500 * time.Millisecond, scanned: 2}, {ready: time.Second, scanned: 4}}
	m.grown = []growth{{cost: cost{at: now}}, {idle: 5000, took: 2 * time.Second, cost: cost{broker: of(5000 << 10), etcd: of(2500 << 10), at: now}}}
	m.errs = []error{errors.New("idle: time\nis up")}
	text := written(m).String()
	for _, want := range []string{
		"**Not measured to the end:** idle: time is up",
		"| 14 | memory of an idle topic", "| 4.0 KiB | 1.5 KiB | met |",
		"| 15 | making 1000 topics, each with a producer and a subscription | 10.0 s | 12.0 s | NOT MET |",
		"1000 topics ÷ 10 at 1000 msg/s in all: carried | ≥ 0.8 × | 0.99 × | met |", "publish p99 | 1.5 × | 1.50 × | met |",
		"gap of a hot topic | 0.2 s | 150 ms | met |", "| 3.0 s | met |",
		"up to 4 unsealed segments | 2.0 s | worst 1.5 s | met |",
		"| connected, quiet | 8.0 KiB | 1.0 KiB | 2.0 KiB | 22.0 KiB |",
		"5.0 keys and 600 B", "| ledgers | 200 |",
		"| exists, never used (5000 of them) | 1.0 KiB | 0 B | 512 B | 3.0 KiB |",
		"| 5000 | 10 | 5000/s |",
		"| 5000 | 2.0 s | 2500 |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in:\n%s", want, text)
		}
	}
	for _, unwanted := range []string{"ledger-ids", "NaN", "%!"} {
		if strings.Contains(text, unwanted) {
			t.Errorf("%q is in:\n%s", unwanted, text)
		}
	}
	if text := written(&measured{cfg: fully(10, 10)}).String(); strings.Count(text, "not measured") < 4 || strings.Contains(text, "NaN") {
		t.Error(text)
	}
	if u := (use{many: []*steady.Result{publishing(10, 1)}, few: []*steady.Result{publishing(10, 1)}}); fmt.Sprint(u.throughput()) != "1" {
		t.Error(u.throughput())
	}
}
