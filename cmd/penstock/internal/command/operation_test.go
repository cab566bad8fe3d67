package command

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// until runs a command until it prints what is looked for.
func until(t *testing.T, what string, ok func(out string) bool, args ...string) {
	t.Helper()
	var last string
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if last = mustRun(t, "", args...); ok(last) {
			return
		}
	}
	t.Fatalf("%s: not so after two minutes: %s", what, last)
}

// item reads what -o json printed of one thing.
func item[T any](t *testing.T, out string) (d T) {
	t.Helper()
	doc := struct{ Item *T }{&d}
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return d
}

// Owners take a bookie that is drained out of the ledgers that they write, idle ones and state logs too, and it gets nothing new.
func TestADrainedBookieIsLeft(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(4))
	url := "--url=" + cluster.URL()
	for _, topic := range []string{"a", "b", "c"} {
		p, err := cluster.Client().Producer(t.Context(), topic)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Publish(t.Context(), &client.Message{Value: []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	open := func(out string) uint64 { return item[bookieDetail](t, out).OpenLedgers }
	victim := ""
	for _, id := range strings.Fields(mustRun(t, "", "bookie", "list", "-o", "name", url)) {
		if open(mustRun(t, "", "bookie", "describe", id, "-o", "json", url)) > 0 {
			victim = id
			break
		}
	}
	mustRun(t, "", "bookie", "drain", victim, url)
	until(t, "no open ledger names a drained bookie", func(out string) bool { return open(out) == 0 }, "bookie", "describe", victim, "-o", "json", url)
	if out := mustRun(t, "", "bookie", "list", url); !strings.Contains(out, "WRITABLE, MAINTENANCE") {
		t.Errorf("it is not listed as drained: %s", out)
	}
	before := item[bookieDetail](t, mustRun(t, "", "bookie", "describe", victim, "-o", "json", url))
	if before.Mark != "MAINTENANCE" || before.Marked == nil {
		t.Errorf("described %+v", before)
	}
	for _, topic := range []string{"d", "e", "f", "g"} {
		mustRun(t, "x\n", "produce", topic, "-q", url)
	}
	after := item[bookieDetail](t, mustRun(t, "", "bookie", "describe", victim, "-o", "json", url))
	if after.OpenLedgers != 0 || after.Ledgers > before.Ledgers {
		t.Errorf("it got something new: %+v, then %+v", before, after)
	}
	mustRun(t, "", "bookie", "drain", victim, "--undo", url)
	if d := item[bookieDetail](t, mustRun(t, "", "bookie", "describe", victim, "-o", "json", url)); d.Mark != "" {
		t.Errorf("it is marked still: %+v", d)
	}
}

// A plan is data, and its exit code says whether there is anything to do. What the plan refuses does not begin.
func TestPlans(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(4))
	url := "--url=" + cluster.URL()
	mustRun(t, "hello\n", "produce", "orders", "-q", url)
	ids := strings.Fields(mustRun(t, "", "bookie", "list", "-o", "name", url))
	r := run(t, "", "bookie", "decommission", ids[0], "--dry-run", "--rate", "1MiB", url)
	if r.code != exitChanges || !strings.HasPrefix(r.out, "PLAN ") || !strings.Contains(r.out, "CHECK ") || strings.Contains(r.out, "NOT SO") {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	r = run(t, "", "bookie", "decommission", ids[0], "--dry-run", "-o", "json", url)
	if p := item[planDetail](t, r.out); r.code != exitChanges || len(p.Targets) != 3 || p.Bookie != ids[0] || len(p.Checks) < 5 {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	// It lives, so it is not dead.
	r = run(t, "", "bookie", "recover", ids[0], "--dry-run", url)
	if r.code != exitRefused || !strings.Contains(r.out, "NOT SO: it lives") {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	if r = run(t, "", "bookie", "recover", ids[0], url); r.code != exitUsage || !strings.Contains(r.err, "--yes") {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	if r = run(t, "", "bookie", "recover", ids[0], "--yes", url); r.code != exitRefused || !strings.Contains(r.err, "penstock bookie decommission "+ids[0]) {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	for _, args := range [][]string{
		{"bookie", "decommission", "nobody"}, {"bookie", "describe", "nobody"}, {"bookie", "drain", "nobody"}, {"op", "get", "op-0"}, {"op", "pause", "op-0"}, {"op", "watch", "op-0"},
	} {
		if r := run(t, "", append(args, url)...); r.code != exitNotFound {
			t.Errorf("penstock %v: exit %d: %s", args, r.code, r.err)
		}
	}
	for _, rate := range []string{"fast", "10XiB", "-4", "99999999999TiB"} {
		if r := run(t, "", "bookie", "decommission", ids[0], "--rate", rate, url); r.code != exitUsage {
			t.Errorf("--rate %s: exit %d: %s", rate, r.code, r.err)
		}
	}
	if out := mustRun(t, "", "op", "list", "-o", "name", url); out != "" {
		t.Errorf("something was begun: %s", out)
	}
}

// An operation is paused, resumed and cancelled, and what is cancelled leaves no mark.
func TestOperationsAreChanged(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(4))
	url := "--url=" + cluster.URL()
	ids := strings.Fields(mustRun(t, "", "bookie", "list", "-o", "name", url))
	begin := func() operationDetail {
		t.Helper()
		return item[operationDetail](t, mustRun(t, "", "bookie", "decommission", ids[0], "--detach", "-o", "json", "--rate", "2MiB", url))
	}
	op := begin()
	if op.Kind != "decommission" || op.Bookie != ids[0] || op.Rate != 2<<20 {
		t.Fatalf("began %+v", op)
	}
	// There is nothing on it, so it ends by itself, and what has ended is not changed.
	r := run(t, "", "op", "watch", op.ID, "-o", "json", url)
	if done := item[operationDetail](t, r.out); r.code != exitOK || done.State != "DONE" || done.Ended == nil {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	if out := mustRun(t, "", "bookie", "list", url); !strings.Contains(out, "RETIRED") {
		t.Errorf("it is not listed as retired: %s", out)
	}
	if r := run(t, "", "op", "cancel", op.ID, url); r.code != exitRefused || !strings.Contains(r.err, "DONE") {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
	// With three bookies left none can be spared.
	if r := run(t, "", "bookie", "decommission", ids[1], url); r.code != exitRefused || !strings.Contains(r.err, "add bookies on other hosts first") {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
	if out := mustRun(t, "", "op", "list", url); !strings.Contains(out, op.ID) {
		t.Errorf("the operation is not listed: %s", out)
	}
}

// Every copy of a topic's ledgers is counted, and one that is not there is named.
func TestLedgersAreVerified(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	url := "--url=" + cluster.URL()
	mustRun(t, strings.Repeat("hello\n", 50), "produce", "orders", "-q", url)
	type list struct{ Items []ledgerVerification }
	verify := func() (l list, r result) {
		t.Helper()
		r = run(t, "", "ledger", "verify", "--topic", "orders", "-o", "json", url)
		if err := json.Unmarshal([]byte(r.out), &l); err != nil || len(l.Items) != 1 {
			t.Fatalf("exit %d, %v: %s%s", r.code, err, r.out, r.err)
		}
		return l, r
	}
	until(t, "three copies of each entry", func(string) bool {
		l, r := verify()
		v := l.Items[0]
		return r.code == exitOK && v.Entries > 0 && v.Copies == 3*v.Entries && v.Good == v.Copies && v.Fewest == 3 && v.Bytes > 0
	}, "version")
	cluster.StopBookie(1)
	l, r := verify()
	v := l.Items[0]
	if r.code != exitFailed || v.Good != 2*v.Entries || v.Fewest != 2 || len(v.Problems) == 0 || v.Problems[0].What != "UNREACHABLE" {
		t.Errorf("with a bookie down: exit %d: %+v", r.code, v)
	}
	if r := run(t, "", "ledger", "verify", url); r.code != exitUsage {
		t.Errorf("of nothing: exit %d: %s", r.code, r.err)
	}
	if r := run(t, "", "ledger", "verify", "4711", url); r.code != exitNotFound {
		t.Errorf("of one that does not exist: exit %d: %s", r.code, r.err)
	}
}

// A bookie that is dead for good is recovered: what it had is made anew from others, and it is retired.
func TestADeadBookieIsRecovered(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(4))
	url := "--url=" + cluster.URL()
	mustRun(t, strings.Repeat("hello\n", 50), "produce", "orders", "-q", url)
	mustRun(t, "", "topic", "unload", "orders", url) // its ledger is closed
	victim := 0
	ids := strings.Fields(mustRun(t, "", "bookie", "list", "-o", "name", url))
	for i, id := range ids {
		if item[bookieDetail](t, mustRun(t, "", "bookie", "describe", id, "-o", "json", url)).EntryBytes > 0 {
			victim = i
		}
	}
	cluster.StopBookie(victim)
	until(t, "it is known to be down", func(out string) bool { return strings.Contains(out, "OFFLINE") }, "bookie", "describe", ids[victim], url)
	r := run(t, "", "bookie", "recover", ids[victim], "--yes", "-o", "json", url)
	if op := item[operationDetail](t, r.out); r.code != exitOK || op.Kind != "recover" || op.State != "DONE" {
		t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	if out := mustRun(t, "", "ledger", "verify", "--topic", "orders", url); !strings.Contains(out, "CLOSED") {
		t.Errorf("verified: %s", out)
	}
}
