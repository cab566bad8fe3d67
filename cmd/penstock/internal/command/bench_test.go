package command

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/penstock-mq/penstock/pkg/bench/rawdisk"
	"github.com/penstock-mq/penstock/pkg/brokertest"
)

// benchDocument is what of the JSON is looked at; all of it is golden in package bench.
type benchDocument struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Items      []struct {
		Scenario struct {
			Name          string  `json:"name"`
			Rate          float64 `json:"rate"`
			InFlight      int     `json:"inFlight"`
			Subscriptions int     `json:"subscriptions"`
		} `json:"scenario"`
		Phases []struct {
			Name      string `json:"name"`
			Processes []struct {
				Name string `json:"name"`
			} `json:"processes"`
			Syncs *struct {
				Count uint64 `json:"count"`
			} `json:"syncs"`
		} `json:"phases"`
		Verified struct {
			Acknowledged, Expected, Received uint64
		} `json:"verified"`
		Interrupted string `json:"interrupted"`
	} `json:"items"`
}

func readBench(t *testing.T, text string) benchDocument {
	t.Helper()
	var doc benchDocument
	if err := json.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if doc.APIVersion != "penstock/v1" || doc.Kind != "BenchList" {
		t.Fatalf("a document of %q, %q", doc.APIVersion, doc.Kind)
	}
	return doc
}

func TestBenchOnACluster(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	url := "--url=" + cluster.URL()
	report := filepath.Join(t.TempDir(), "report.html")
	r := run(t, "", "bench", url, "--warm-up", "100ms", "--duration", "1500ms", "--rate", "500", "--html", report, "--disk-probe", t.TempDir())
	if r.code != exitOK || !strings.Contains(r.out, "\nverified: ") || !strings.Contains(r.out, "4 KiB disk probe") || !strings.Contains(r.out, " syncs of bookies") {
		t.Fatalf("exit %d: %s\n%s", r.code, r.err, r.out)
	}
	if !strings.Contains(r.err, "published") || !strings.Contains(r.err, "received") {
		t.Fatalf("no progress: %s", r.err)
	}
	if page, err := os.ReadFile(report); err != nil || !bytes.Contains(page, []byte("</html>")) || !bytes.Contains(page, []byte("<svg")) {
		t.Fatalf("report: %v, %d bytes", err, len(page))
	}
	file := filepath.Join(t.TempDir(), "scenarios.yaml")
	if err := os.WriteFile(file, []byte("name: one\nin-flight: 1\nduration: 1h\n---\nname: two\nsubscriptions: 0\nbatching: {messages: 5}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	doc := readBench(t, mustRun(t, "", "bench", file, url, "--warm-up", "0s", "--duration", "1s", "-o", "json"))
	if len(doc.Items) != 2 {
		t.Fatalf("%+v", doc)
	}
	one, two := doc.Items[0], doc.Items[1]
	if one.Scenario.Name != "one" || one.Scenario.InFlight != 1 || one.Verified.Acknowledged == 0 || one.Verified.Received != one.Verified.Acknowledged ||
		len(one.Phases) != 1 || one.Phases[0].Syncs == nil || one.Phases[0].Syncs.Count == 0 || one.Phases[0].Processes[0].Name != "bench" {
		t.Fatalf("%+v", one)
	}
	if two.Scenario.Subscriptions != 0 || two.Verified.Expected != 0 || two.Verified.Acknowledged == 0 {
		t.Fatalf("%+v", two)
	}
	if left := mustRun(t, "", "topic", "list", "-o", "name", url); left != "" {
		t.Fatalf("left behind: %s", left)
	}
	mustRun(t, "", "bench", url, "--warm-up", "0s", "--duration", "500ms", "--keep")
	if kept := mustRun(t, "", "topic", "list", "-o", "name", url); !strings.HasPrefix(kept, "public/default/bench-") {
		t.Fatalf("kept: %q", kept)
	}
}

// One command brings a cluster along, and leaves nothing of it.
func TestBenchStandalone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out := mustRun(t, "", "bench", "--standalone", "--dir", dir, "--warm-up", "0s", "--backlog", "2000", "--subscriptions", "2", "-o", "json")
	item := readBench(t, out).Items[0]
	if len(item.Phases) != 2 || item.Phases[1].Name != "catch-up" || item.Phases[0].Processes[0].Name != "bench and cluster" ||
		item.Verified.Received != 2*item.Verified.Acknowledged || item.Phases[0].Syncs == nil {
		t.Fatalf("%+v", item)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("left behind: %v, %v", left, err)
	}
}

func TestBenchUsage(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "wrong.yaml")
	if err := os.WriteFile(file, []byte("topic: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"misspelt command":   {[]string{"dsik"}, exitUsage, `did you mean "disk"?`},
		"misspelt flag":      {[]string{"--rte", "5"}, exitUsage, "did you mean --rate?"},
		"no such file":       {[]string{"./none.yaml"}, exitNotFound, "none.yaml"},
		"wrong file":         {[]string{file}, exitUsage, "field topic not found"},
		"zero topics":        {[]string{"--topics", "0"}, exitUsage, "topics is 0"},
		"zero duration":      {[]string{"--duration", "0"}, exitUsage, "duration is 0s"},
		"tiny":               {[]string{"--size", "5"}, exitUsage, "size is 5: want 28"},
		"unknown level":      {[]string{"--ack", "most"}, exitUsage, "want none, one, quorum or all"},
		"unknown keys":       {[]string{"--keys", "zpf"}, exitUsage, "want none, in-turn, uniform or zipf"},
		"live nothing":       {[]string{"--live"}, exitUsage, "backlog"},
		"no pid":             {[]string{"--process", "broker"}, exitUsage, "want NAME=PID"},
		"two clusters":       {[]string{"--standalone", "--url", "penstock://a:1"}, exitUsage, "exclude each other"},
		"no directory":       {[]string{"--standalone", "--dir", "/nonexistent"}, exitNotFound, "/nonexistent"},
		"no report":          {[]string{"--html", "/nonexistent/r.html"}, exitNotFound, "/nonexistent"},
		"nobody there":       {[]string{"--url", "penstock://127.0.0.1:1", "--timeout", "1s"}, exitUnreachable, "--standalone brings a cluster along"},
		"disk: no directory": {[]string{"disk", "--dir", "/nonexistent"}, exitNotFound, "/nonexistent"},
		"disk: tiny":         {[]string{"disk", "--size", "10"}, exitUsage, "--size is 10"},
		"disk: no files":     {[]string{"disk", "--files", "0"}, exitUsage, "--files is 0"},
		"disk: no time":      {[]string{"disk", "--duration", "0"}, exitUsage, "--duration is 0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, "", append([]string{"bench"}, c.args...)...)
			if r.code != c.code || !strings.Contains(r.err, c.want) {
				t.Errorf("exit %d, %q; want exit %d with %q", r.code, r.err, c.code, c.want)
			}
		})
	}
	url := "--url=" + brokertest.Start(t).URL()
	if r := run(t, "", "bench", url, "--process", "ghost=1073741824"); r.code != exitNotFound || !strings.Contains(r.err, "measure ghost") {
		t.Errorf("exit %d, %q", r.code, r.err)
	}
	for duration := time.Second; ; duration *= 4 { // a machine may be too busy to publish anything at first
		r := run(t, "", "bench", url, "--size", "8388608", "--in-flight", "1", "--warm-up", "0s", "--duration", duration.String())
		if r.code == exitFailed && strings.Contains(r.err, "messages failed") {
			break
		}
		if duration > time.Minute {
			t.Fatalf("exit %d, %q", r.code, r.err)
		}
	}
}

// Ctrl-C ends a run in good order: what was measured is printed, everything acknowledged is received, and the topic is gone.
func TestBenchIsInterrupted(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said := &ready{word: "steady", found: make(chan struct{})}
	go func() {
		<-said.found
		cancel()
	}()
	var out bytes.Buffer
	code := Main(ctx, "test", []string{"bench", url, "--warm-up", "0s", "--duration", "1h", "--rate", "1000", "-o", "json"}, strings.NewReader(""), &out, said)
	item := readBench(t, out.String()).Items[0]
	if code != exitFailed || item.Interrupted == "" || item.Verified.Acknowledged == 0 || item.Verified.Received != item.Verified.Acknowledged {
		t.Fatalf("exit %d: %+v", code, item)
	}
	if left := mustRun(t, "", "topic", "list", "-o", "name", url); left != "" {
		t.Fatalf("left behind: %s", left)
	}
}

func TestBenchDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if out := mustRun(t, "", "bench", "disk", "--dir", dir, "--files", "1", "--duration", "10ms"); !strings.Contains(out, "1 MiB") || !strings.Contains(out, "4 KiB") {
		t.Fatal(out)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("left behind: %v, %v", left, err)
	}
	latency := hdrhistogram.New(1000, int64(time.Minute), 3)
	for i := range int64(10) {
		_ = latency.RecordValue((i + 1) * int64(time.Millisecond))
	}
	var got bytes.Buffer
	if err := diskView([]rawdisk.Measured{
		{Files: 3, GroupBytes: 1 << 20, Elapsed: 2 * time.Second, Groups: 10, Bytes: 10 << 20, Latency: latency},
	}).print(&got, "json"); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "bench-disk.json")
	if *rewrite {
		if err := os.WriteFile(path, got.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Fatalf("%v; got\n%s", err, &got)
	}
}
