package command

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

var rewrite = flag.Bool("rewrite", false, "write golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type result struct {
	code     int
	out, err string
}

func run(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	var out, errOut bytes.Buffer
	code := Main(t.Context(), "test", args, strings.NewReader(stdin), &out, &errOut)
	return result{code, out.String(), errOut.String()}
}

// lines counts what a person was told, but for the line which says that the cluster is slow to answer: so may a machine be.
func lines(text string) (n int) {
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "no answer yet; ") {
			n++
		}
	}
	return n
}

func mustRun(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	r := run(t, stdin, args...)
	if r.code != exitOK {
		t.Fatalf("penstock %s: exit %d: %s", strings.Join(args, " "), r.code, r.err)
	}
	return r.out
}

func TestFirstFiveMinutes(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "hello\nworld\n", "produce", "orders", "-q", url)
	mustRun(t, "", "produce", "orders", "-q", "-m", "again", "--key", "k", url)
	if got := mustRun(t, "", "consume", "orders", "-s", "demo", "--from", "earliest", "-n", "2", url); got != "hello\nworld\n" {
		t.Fatalf("consumed %q", got)
	}
	var m consumedMessage
	line := mustRun(t, "", "consume", "orders", "-s", "demo", "-n", "1", "-o", "jsonl", url)
	if err := json.Unmarshal([]byte(line), &m); err != nil || m.Value != "again" || m.Key != "k" || m.Offset != 2 {
		t.Fatalf("consumed %s: %v", line, err)
	}
	if got := mustRun(t, "", "topic", "list", "-o", "name", url); got != "public/default/orders\n" {
		t.Fatalf("topics %q", got)
	}
	if got := mustRun(t, "", "subscription", "why", "orders", "demo", url); !strings.HasPrefix(got, "no-consumers: ") {
		t.Fatalf("why: %q", got)
	}
	mustRun(t, "", "subscription", "seek", "orders", "demo", "--to", "offset=1", url)
	if got := mustRun(t, "", "consume", "orders", "-s", "demo", "-n", "1", url); got != "world\n" {
		t.Fatalf("consumed %q after seeking", got)
	}
	// Without --force: a command that has ended left nothing in use.
	mustRun(t, "", "subscription", "delete", "orders", "demo", "--yes", url)
	mustRun(t, "", "topic", "delete", "orders", "--yes", url)
}

func TestLoadIsCounted(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	r := run(t, "", "produce", "load", "--count", "500", "--size", "64", "--compression", "zstd", url)
	if r.code != exitOK || !strings.HasPrefix(r.err, "500 acknowledged in ") {
		t.Fatalf("exit %d: %s", r.code, r.err)
	}
	lines := strings.Split(strings.TrimSpace(mustRun(t, "", "consume", "load", "-s", "s", "--from", "earliest", "-n", "500", url)), "\n")
	if len(lines) != 500 || len(lines[7]) != 64 || !strings.HasPrefix(lines[7], "7.") {
		t.Fatalf("%d lines, the eighth is %q", len(lines), lines[7])
	}
}

// Exit codes are an interface: scripts decide by them.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	url := "--url=" + cluster.URL()
	mustRun(t, "", "topic", "create", "busy", url)
	p, err := cluster.Client().Producer(t.Context(), "busy", client.WithProducerName("p"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(t.Context(), &client.Message{Value: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"unknown command":    {[]string{"topci"}, exitUsage, `did you mean "topic"?`},
		"unknown subcommand": {[]string{"topic", "lst"}, exitUsage, `did you mean "list"?`},
		"unknown flag":       {[]string{"topic", "list", "--outptu", "json"}, exitUsage, "did you mean --output?"},
		"unknown format":     {[]string{"topic", "list", "-o", "xml", url}, exitUsage, `unknown output format "xml"`},
		"missing argument":   {[]string{"topic", "create"}, exitUsage, "takes 1 argument"},
		"bad name":           {[]string{"topic", "create", "a b", url}, exitUsage, `"a b"`},
		"unknown type":       {[]string{"consume", "busy", "-s", "s", "--type", "shard", url}, exitUsage, `did you mean "shared"?`},
		"bad start":          {[]string{"consume", "busy", "-s", "s", "--from", "yesterday", url}, exitUsage, "earliest"},
		"bad quorum":         {[]string{"namespace", "create", "public/n", "--ensemble", "2", "--write-quorum", "3", url}, exitUsage, "write quorum"},
		"limbo of nothing":   {[]string{"bookie", "end-limbo", "127.0.0.1:1"}, exitUsage, "--ledger"},
		"unknown topic":      {[]string{"topic", "describe", "nothing", url}, exitNotFound, "does not exist"},
		"unknown ledger":     {[]string{"ledger", "describe", "4711", url}, exitNotFound, "there is no ledger 4711, or no longer: penstock ledger list"},
		"damage of a topic":  {[]string{"ledger", "list", "--under-replicated", "--topic", "busy", url}, exitUsage, "--under-replicated"},
		"damage on no one":   {[]string{"ledger", "list", "--under-replicated", "--on", "nobody", url}, exitNotFound, "penstock bookie list"},
		"topic in use":       {[]string{"topic", "delete", "busy", "--yes", url}, exitRefused, "--force"},
		"no terminal to ask": {[]string{"topic", "delete", "busy", url}, exitUsage, "--yes"},
		"exists already":     {[]string{"topic", "create", "busy", url}, exitFailed, "exists"},
		"nobody there":       {[]string{"topic", "list", "--url", "penstock://127.0.0.1:1", "--timeout", "5s"}, exitUnreachable, "127.0.0.1:1"},
		"near topic":         {[]string{"topic", "describe", "bsuy", url}, exitNotFound, `did you mean "busy"?`},
		"near nothing":       {[]string{"consume", "none/such/busy", "-s", "s", url}, exitNotFound, "none/such"},
		"no such namespace":  {[]string{"topic", "list", "public/nope", url}, exitNotFound, "public/nope"},
		"no such tenant":     {[]string{"namespace", "list", "publik", url}, exitNotFound, `did you mean "public"?`},
		"no such file":       {[]string{"segment", "dump", "/nonexistent"}, exitNotFound, "/nonexistent"},
		"streamed answer":    {[]string{"ledger", "read", "4711", url}, exitNotFound, "there is no ledger 4711, or no longer: penstock ledger list"},
		"streamed refusal":   {[]string{"ledger", "read", "1", "--first", "-3", url}, exitUsage, "start at 0"},
		"required flag":      {[]string{"subscription", "seek", "busy", "s", url}, exitUsage, "--to"},
		"short flag's name":  {[]string{"topic", "list", "--frm"}, exitUsage, "unknown flag: --frm (see"},
		"unknown shell":      {[]string{"completion", "bahs"}, exitUsage, `did you mean "bash"?`},
		"unknown help":       {[]string{"help", "topci"}, exitUsage, `did you mean "topic"?`},
		"negative count":     {[]string{"consume", "busy", "-s", "s", "-n", "-1", url}, exitUsage, "not below 0"},
		"no time at all":     {[]string{"topic", "list", "--timeout", "0", url}, exitUsage, "--timeout"},
		"unset nothing":      {[]string{"namespace", "update", "public/default", url}, exitUsage, "name a policy"},
		"unset unknown":      {[]string{"namespace", "update", "public/default", "--unset", "mesage-ttl", url}, exitUsage, `did you mean "message-ttl"?`},
		"set and unset":      {[]string{"namespace", "update", "public/default", "--unset", "ensemble", "--ensemble", "3", url}, exitUsage, "exclude each other"},
		"not a URL":          {[]string{"topic", "list", "--url", "http://x"}, exitUsage, "want penstock"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, "", c.args...)
			if r.code != c.code || !strings.Contains(r.err, c.want) {
				t.Errorf("penstock %s: exit %d, %q; want exit %d with %q", strings.Join(c.args, " "), r.code, r.err, c.code, c.want)
			}
			if lines(r.err) != 1 {
				t.Errorf("the error is not one line: %q", r.err)
			}
		})
	}
}

// What is unset goes back to the cluster's default; the rest stays.
func TestPoliciesAreUnset(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	create := []string{"namespace", "create", "public/p", "--bundles", "1", url}
	for _, name := range policyNames {
		value, known := map[string]string{
			"ensemble": "1", "write-quorum": "1", "ack-quorum": "1", "min-zones": "1", "retention-time": "1h", "message-ttl": "2h",
			"backlog-action": "evict", "auto-create-topics": "false",
		}[name]
		if !known {
			value = "7"
		}
		create = append(create, "--"+name+"="+value)
	}
	mustRun(t, "", create...)
	policies := func() map[string]any {
		var doc struct {
			Item struct {
				Policies map[string]any `json:"policies"`
			} `json:"item"`
		}
		if err := json.Unmarshal([]byte(mustRun(t, "", "namespace", "get", "public/p", "-o", "json", url)), &doc); err != nil {
			t.Fatal(err)
		}
		return doc.Item.Policies
	}
	if got := policies(); len(got) != len(policyNames) {
		t.Fatalf("set %v, got %v", policyNames, got)
	}
	mustRun(t, "", "namespace", "update", "public/p", "--unset", "message-ttl,backlog-action", "--retention-time", "3h", url)
	got := policies()
	if len(got) != len(policyNames)-2 || got["messageTTL"] != nil || got["backlogAction"] != nil || got["retentionTime"] != "3h0m0s" {
		t.Fatalf("got %v", got)
	}
	mustRun(t, "", "namespace", "update", "public/p", "--unset", strings.Join(policyNames, ","), url)
	if got := policies(); len(got) != 0 {
		t.Fatalf("left %v", got)
	}
}

// A topic with partitions tells what they hold.
func TestPartitionsAreDescribed(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "", "topic", "create", "parts", "--partitions", "2", url)
	mustRun(t, "", "produce", "parts-partition-1", "-m", "x", "-q", url)
	if got := mustRun(t, "", "topic", "describe", "parts", url); !strings.Contains(got, "0  offsets [0, 0)") || !strings.Contains(got, "1  offsets [0, 1)") {
		t.Fatal(got)
	}
}

// What cannot be printed was not done, whoever prints it.
func TestFullOutputIsAFailure(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "x\n", "produce", "orders", "-q", url)
	for _, args := range [][]string{
		{"version"},
		{"topic", "list", "-o", "name", url},
		{"topic", "list", url},
		{"topic", "list", "-o", "json", url},
		{"consume", "orders", "-s", "s", "--from", "earliest", "-n", "1", url},
		{"completion", "bash"},
		{"topic", "--help"},
	} {
		var errOut bytes.Buffer
		code := Main(t.Context(), "test", args, strings.NewReader(""), fullDisk{}, &errOut)
		if code != exitFailed || !strings.Contains(errOut.String(), "no space left") || lines(errOut.String()) != 1 {
			t.Errorf("penstock %s: exit %d, %q", strings.Join(args, " "), code, errOut.String())
		}
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// A command that is stopped before it was done says so, at once, even while it waits for input.
func TestInterruptedIsAFailure(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "", "topic", "create", "t", url)
	for name, args := range map[string][]string{
		"waits for input":      {"produce", "t", url},
		"has more to publish":  {"produce", "t", "--count", "1000000", "--rate", "10", url},
		"waits for messages":   {"consume", "silent", "-s", "s", "-n", "1", url},
		"waits for an answer":  {"topic", "list", "--url", "penstock://127.0.0.1:1"},
		"waits for the broker": {"produce", "t", "-m", "x", "--url", "penstock://127.0.0.1:1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(100*time.Millisecond, cancel)
			in, feed := io.Pipe()
			defer feed.Close()
			var out, errOut bytes.Buffer
			code := Main(ctx, "test", args, in, &out, &errOut)
			if code != exitFailed || !strings.Contains(errOut.String(), "penstock: interrupted") {
				t.Errorf("exit %d: %s", code, errOut.String())
			}
		})
	}
}

// patiently tries something that --timeout ends, with more and more of it until the machine is fast enough to get as far as
// that: what comes before has the same time.
func patiently(t *testing.T, try func(timeout time.Duration) (code int, said string), want func(timeout time.Duration) string) {
	t.Helper()
	for timeout := 2 * time.Second; ; timeout *= 3 {
		code, said := try(timeout)
		if code == exitUnreachable && strings.Contains(said, want(timeout)) {
			return
		}
		if timeout > time.Minute {
			t.Fatalf("exit %d: %s", code, said)
		}
	}
}

// Publishing that stands still is given up after --timeout.
func TestPublishingThatStandsStillIsGivenUp(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	url := "--url=" + cluster.URL()
	mustRun(t, "zero\n", "produce", "t", "-q", url)
	patiently(t, func(timeout time.Duration) (int, string) {
		in, feed := io.Pipe()
		defer feed.Close()
		var errOut bytes.Buffer
		done := make(chan int, 1)
		go func() {
			code := Main(t.Context(), "test", []string{"produce", "t", "--timeout", timeout.String(), url}, in, io.Discard, &errOut)
			_ = in.Close() // it may give up early; nobody reads what comes then
			done <- code
		}()
		if _, err := io.WriteString(feed, "one\n"); err == nil {
			cluster.StopBookie(0)
			defer cluster.StartBookie(0)
			_, _ = io.WriteString(feed, "two\n")
		}
		return <-done, errOut.String()
	}, func(timeout time.Duration) string { return "nothing was acknowledged for " + timeout.String() })
}

// Consuming whose acknowledgements nobody confirms ends after --timeout, and names them.
func TestConsumingThatNobodyConfirmsIsGivenUp(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	url := "--url=" + cluster.URL()
	for name, end := range map[string]func(timeout time.Duration) []string{
		"counted": func(time.Duration) []string { return []string{"-n", "2"} },
		"waiting": func(timeout time.Duration) []string { return []string{"--wait", (timeout / 10).String()} },
	} {
		patiently(t, func(timeout time.Duration) (int, string) {
			topic := name + "-" + timeout.String()
			mustRun(t, "one\ntwo\nthree\n", "produce", topic, "-q", url)
			mustRun(t, "", "consume", topic, "-s", "s", "--from", "earliest", "-n", "1", url)
			stopped := false
			out := &stopping{stop: func() { cluster.StopBookie(0); stopped = true }} // two are left, and none of them is acknowledged
			var errOut bytes.Buffer
			args := append([]string{"consume", topic, "-s", "s", "--timeout", timeout.String(), url}, end(timeout)...)
			code := Main(t.Context(), "test", args, strings.NewReader(""), out, &errOut)
			if stopped {
				cluster.StartBookie(0)
			}
			return code, errOut.String()
		}, func(timeout time.Duration) string {
			return "not confirmed: offsets 1 to 2: nothing was confirmed for " + timeout.String()
		})
	}
}

// stopping calls stop when the first message is written to it.
type stopping struct {
	once sync.Once
	stop func()
}

func (s *stopping) Write(p []byte) (int, error) {
	s.once.Do(s.stop)
	return len(p), nil
}

// A consumer without a number of messages is meant to be stopped.
func TestConsumingIsStopped(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "x\n", "produce", "t", "-q", url)
	ctx, cancel := context.WithCancel(t.Context())
	out := &ready{word: "x", found: make(chan struct{})}
	done := make(chan int, 1)
	go func() {
		done <- Main(ctx, "test", []string{"consume", "t", "-s", "s", "--from", "earliest", url}, strings.NewReader(""), out, os.Stderr)
	}()
	<-out.found
	cancel()
	if code := <-done; code != exitOK {
		t.Fatalf("exit %d", code)
	}
	// What was printed is acknowledged.
	if got := mustRun(t, "", "consume", "t", "-s", "s", "-n", "1", "--wait", "200ms", url); got != "" {
		t.Fatalf("delivered again: %q", got)
	}
}

// volatile is what differs from run to run.
var volatile = regexp.MustCompile(`(127\.0\.0\.1:\d+)|([0-9a-f]{8}-[0-9a-f-]{27})|("(free|total)Bytes": \d+)|("started": "[^"]*")|("sync": "[^"]*")|("lagSeconds": [0-9.e-]+)|("(ledger|bundles)": \d+)|("id": \d+)|("ledgers": \d+)|("(openLedgers|entryBytes)": \d+)`)

// JSON is an interface too: fields are only added.
func TestJSONIsGolden(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "", "topic", "create", "parts", "--partitions", "2", url)
	mustRun(t, "", "subscription", "create", "parts", "demo", url)
	for _, line := range []string{"a", "b"} { // an entry each, whatever the client would have batched
		mustRun(t, "", "produce", "orders", "-q", "-m", line, "--producer-name", "p", url)
	}
	mustRun(t, "", "consume", "orders", "-s", "demo", "--from", "earliest", "-n", "2", url)
	for {
		d := mustRun(t, "", "topic", "describe", "orders", "-o", "json", url)
		if strings.Contains(d, `"consumers": 0`) && strings.Contains(d, `"producers": []`) {
			break // the broker has noticed that both have left
		}
	}
	mustRun(t, "", "tenant", "create", "acme", url)
	mustRun(t, "", "namespace", "create", "acme/web", "--retention-time", "1h", "--backlog-action", "evict", "--bundles", "1", url)
	for name, args := range map[string][]string{
		"topic-list":            {"topic", "list"},
		"topic-describe":        {"topic", "describe", "orders"},
		"subscription-list":     {"subscription", "list", "orders"},
		"subscription-describe": {"subscription", "describe", "orders", "demo"},
		"subscription-why":      {"subscription", "why", "orders", "demo"},
		"partitions-list":       {"subscription", "list", "parts"},
		"partitions-describe":   {"subscription", "describe", "parts", "demo"},
		"partitions-why":        {"subscription", "why", "parts", "demo"},
		"version":               {"version"},
		"segment-dump":          {"segment", "dump", sealedSegment(t)},
		"namespace-get":         {"namespace", "get", "acme/web"},
		"tenant-list":           {"tenant", "list"},
		"broker-list":           {"broker", "list"},
		"bookie-list":           {"bookie", "list"},
		"bookie-describe":       {"bookie", "describe", "bookie-0"},
		"ledger-list":           {"ledger", "list", "--topic", "orders"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := volatile.ReplaceAllStringFunc(mustRun(t, "", append(args, "-o", "json", url)...), func(s string) string {
				if i := strings.Index(s, ":"); strings.HasPrefix(s, `"`) && i > 0 {
					return s[:i+1] + ` "VARIES"`
				}
				return "VARIES"
			})
			path := filepath.Join("testdata", name+".json")
			if *rewrite {
				if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("penstock %s -o json changed; if fields were only added, run the test with -rewrite\ngot:\n%s\nwant:\n%s", strings.Join(args, " "), got, want)
			}
			yaml := mustRun(t, "", append(args, "-o", "yaml", url)...)
			if !strings.HasPrefix(yaml, "apiVersion: penstock/v1\nkind: ") {
				t.Errorf("YAML begins %q", yaml[:min(60, len(yaml))])
			}
			for _, format := range []string{"table", "wide", "jsonl", "name"} {
				if out := mustRun(t, "", append(args, "-o", format, url)...); out == "" {
					t.Errorf("-o %s prints nothing", format)
				}
			}
		})
	}
}

func TestContexts(t *testing.T) {
	url := brokertest.Start(t).URL()
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	t.Setenv(urlVariable, "")
	mustRun(t, "", "context", "set", "here", url)
	mustRun(t, "", "context", "set", "nowhere", "penstock://127.0.0.1:1")
	mustRun(t, "", "topic", "list") // the first one set is current
	mustRun(t, "", "context", "use", "nowhere")
	if r := run(t, "", "topic", "list", "--timeout", "200ms"); r.code != exitUnreachable {
		t.Fatalf("exit %d: %s", r.code, r.err)
	}
	t.Setenv(urlVariable, url) // the environment wins over the context
	mustRun(t, "", "topic", "list")
	if r := run(t, "", "context", "set", "bad", "penstock://"); r.code != exitUsage {
		t.Fatalf("exit %d: %s", r.code, r.err)
	}
	if r := run(t, "", "context", "use", "her"); r.code != exitNotFound || !strings.Contains(r.err, `did you mean "here"?`) {
		t.Fatalf("exit %d: %s", r.code, r.err)
	}
	mustRun(t, "", "context", "delete", "nowhere")
	if got := mustRun(t, "", "context", "list", "-o", "name"); got != "here\n" {
		t.Fatalf("contexts %q", got)
	}
	// A damaged file is said in one line, and does not stand in the way of who names the cluster.
	path := filepath.Join(os.Getenv("XDG_CONFIG_HOME"), "penstock", "contexts.yaml")
	if err := os.WriteFile(path, []byte("currnt: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	mustRun(t, "", "topic", "list")
	t.Setenv(urlVariable, "")
	if r := run(t, "", "topic", "list"); r.code != exitUsage || lines(r.err) != 1 || !strings.Contains(r.err, path) {
		t.Fatalf("exit %d: %s", r.code, r.err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mustRun(t, "", "context", "list")
}

// Who has no home has no contexts, and needs none.
func TestNoHome(t *testing.T) {
	url := brokertest.Start(t).URL()
	for _, home := range []string{"", "/dev/null"} {
		t.Setenv("HOME", home)
		t.Setenv("XDG_CONFIG_HOME", "")
		t.Setenv(urlVariable, "")
		mustRun(t, "", "context", "list")
		r := run(t, "", "topic", "list", "--timeout", "10ms")
		if r.code != exitUnreachable && r.code != exitOK || strings.Contains(r.err, "configuration") {
			t.Fatalf("exit %d: %s", r.code, r.err)
		}
		if r := run(t, "", "context", "set", "here", url); r.code == exitOK {
			t.Fatal("set a context nowhere")
		}
	}
}

func TestStandaloneSaysReadyOnce(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &ready{word: " ready in ", found: make(chan struct{})}
	done := make(chan int, 1)
	go func() {
		done <- Main(ctx, "test", []string{
			"standalone", "--data-dir", t.TempDir(), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
		}, strings.NewReader(""), out, os.Stderr)
	}()
	select {
	case <-out.found:
	case code := <-done:
		t.Fatalf("ended with %d before it was ready", code)
	}
	cancel()
	if code := <-done; code != exitOK {
		t.Fatalf("exit %d", code)
	}
	if n := strings.Count(out.text.String(), " ready in "); n != 1 {
		t.Fatalf("%d lines with ready:\n%s", n, &out.text)
	}
}

// ready closes found when word was written.
type ready struct {
	word  string
	text  bytes.Buffer
	found chan struct{}
	once  bool
}

func (r *ready) Write(p []byte) (int, error) {
	r.text.Write(p)
	if !r.once && strings.Contains(r.text.String(), r.word) {
		r.once = true
		close(r.found)
	}
	return len(p), nil
}

// What is printed is what --config reads, and nothing that is not standalone's own.
func TestStandalonePrintsItsSettings(t *testing.T) {
	t.Parallel()
	printed := mustRun(t, "", "standalone", "--bookies", "3", "--print-config")
	if !strings.Contains(printed, "bookies: 3\n") || strings.Contains(printed, "url:") {
		t.Fatal(printed)
	}
	config := filepath.Join(t.TempDir(), "standalone.yaml")
	if err := os.WriteFile(config, []byte(printed), 0o600); err != nil {
		t.Fatal(err)
	}
	if again := mustRun(t, "", "standalone", "--config", config, "--print-config"); again != printed {
		t.Fatalf("%s\nwant:\n%s", again, printed)
	}
}

func TestStandaloneRefusesBadSettings(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"no bookies":   {"--bookies", "0", "--print-config"},
		"address":      {"--listen", "nonsense"},
		"port in use":  {"--listen", strings.TrimPrefix(brokertest.Start(t).URL(), "penstock://"), "--http", "127.0.0.1:0", "--data-dir", t.TempDir()},
		"config":       {"--config", "/nonexistent.yaml"},
		"unknown flag": {"--bookeis", "3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, "", append([]string{"standalone"}, args...)...)
			if r.code != exitUsage || strings.Count(strings.TrimSpace(r.err), "\n") > 0 {
				t.Errorf("exit %d: %q, want 2 and one line", r.code, r.err)
			}
		})
	}
}

func TestParseStart(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for text, want := range map[string]client.Position{
		"earliest":             client.Earliest(),
		"latest":               client.Latest(),
		"offset=7":             client.AtOffset(7),
		"90m":                  client.AtTime(now.Add(-90 * time.Minute)),
		"2026-01-01T00:00:00Z": client.AtTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)),
	} {
		if got, err := parseStart(text, now); err != nil || got != want {
			t.Errorf("%q is %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "offset=-1", "-5m", "1:2:3:4", "tomorrow"} {
		if got, err := parseStart(text, now); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}
