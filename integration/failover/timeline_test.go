package failover

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

var zero = time.UnixMilli(1_700_000_000_000)

func at(ms float64) time.Time { return zero.Add(time.Duration(ms * float64(time.Millisecond))) }

// A strike is cut where its steps' marks are: the first of each after the one before; what was not seen has no part.
func TestParts(t *testing.T) {
	t.Parallel()
	steps := takeover("broker-2", "public/keeping/4")
	marks := []mark{
		{at(-50), "broker-1", `msg="peer is suspect" peer=broker-2`}, // of an earlier strike
		{at(3), "broker-1", `msg="peer is suspect" peer=broker-2 why="it refuses connections"`},
		{at(5), "etcd", "owner of bundle public/keeping/13 is broker-1, epoch 2"},
		{at(8), "etcd", "owner of bundle public/keeping/4 is broker-1, epoch 2"},
		{at(31), "etcd", "ledger b42 of the topic is in_recovery, term 1, 1 fragments"},
		{at(38), "etcd", "ledger b81 of the topic is open, term 0, 1 fragments"},
		{at(90), "etcd", "ledger bc1 of the topic is open, term 0, 1 fragments"},
	}
	told := func(found []part) string {
		var out []string
		for _, p := range found {
			out = append(out, p.name+" "+p.took.String())
		}
		return strings.Join(out, ", ")
	}
	if got := told(parts(steps, "rest", marks, at(0), at(40))); got != "detection 3ms, takeover 5ms, lookup and opening 23ms, recovery 7ms, rest 2ms" {
		t.Error(got)
	}
	// Without a log of the suspicion its time is the takeover's; what comes after the end does not count; a log that is rounded
	// down to before the strike does.
	if got := told(parts(steps, "rest", marks[2:5], at(0), at(33))); got != "takeover 8ms, lookup and opening 23ms, rest 2ms" {
		t.Error(got)
	}
	if got := told(parts(steps, "rest", marks[:2], at(3.4), at(5))); got != "detection 0s, rest 1.6ms" {
		t.Error(got)
	}
	if got := told(parts(steps, "rest", nil, at(0), at(5))); got != "rest 5ms" {
		t.Error(got)
	}
}

// What the processes log during a strike, and nothing from before it, is put among the rest in order.
func TestTimeline(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	line := func(ms float64, what string) string {
		return "time=" + at(ms).UTC().Format("2006-01-02T15:04:05.000Z07:00") + " level=INFO " + what + "\n"
	}
	write := func(text string) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	write(line(-10, "msg=before"))
	var l timeline
	l.begin([]*process.Process{{Name: "broker-1", Log: path}, {Name: "etcd-1", Log: path + "-none"}})
	l.note(at(7), "here", "a mark")
	write(line(3, `msg="peer is suspect" peer=broker-2`) + `{"level":"warn","ts":"2026"}` + "\n" + line(9, "msg=after"))
	var got []string
	for _, m := range l.end() {
		got = append(got, m.who+" "+m.what)
	}
	if want := []string{`broker-1 msg="peer is suspect" peer=broker-2`, "here a mark", "broker-1 msg=after"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	lines := tell(l.end(), at(2), at(0), at(8), 1)
	if want := []string{`    +1.0 ms  broker-1  msg="peer is suspect" peer=broker-2`, "…"}; !slices.Equal(lines, want) {
		t.Errorf("%q", lines)
	}
}

func TestChanged(t *testing.T) {
	t.Parallel()
	encode := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for want, got := range map[string]string{
		"owner of bundle public/default/4 is broker-1, epoch 7": changed("view/owners/public/default/4", encode(&metav1.Owner{Broker: "broker-1", Epoch: 7}), false),
		"ledger b42 of the topic is in_recovery, term 1, 2 fragments": changed("ledgers/b42", encode(&metav1.Ledger{
			State: metav1.LedgerState_LEDGER_STATE_IN_RECOVERY, Term: 1, Fragments: make([]*metav1.Fragment, 2), Chain: &metav1.Ledger_Data{Data: &metav1.DataChain{}},
		}), false),
		"ledger b43 of bundle/x/state is open, term 0, 0 fragments": changed("ledgers/b43", encode(&metav1.Ledger{Chain: &metav1.Ledger_Other{Other: "bundle/x/state"}}), false),
		"view/brokers/broker-1 is deleted":                          changed("view/brokers/broker-1", nil, true),
		"ledger-ids is written":                                     changed("ledger-ids", nil, false),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Only what a probe met during the gap explains it.
func TestLongest(t *testing.T) {
	t.Parallel()
	r := []reading{{at(5), 4 * time.Millisecond}, {at(12), 3 * time.Millisecond}, {at(40), 25 * time.Millisecond}, {at(90), 50 * time.Millisecond}}
	if d := longest(r, at(10), at(20)); d != 25*time.Millisecond {
		t.Error(d)
	}
	if d := longest(r, at(6), at(9)); d != 3*time.Millisecond { // it began at 9
		t.Error(d)
	}
}

// The page tells of each kind what was measured, what was broken, and whether the target is met.
func TestWritten(t *testing.T) {
	t.Parallel()
	base := &result{kind: kinds[0], latency99: 5 * time.Millisecond}
	base.add(strike{number: 1, publish: 4 * time.Millisecond})
	base.add(strike{number: 2, publish: 2 * time.Millisecond})
	owner := &result{kind: kinds[1], delivered: workload.Report{Sent: 300}}
	owner.add(strike{number: 1, victim: "broker-1", publish: 40 * time.Millisecond, parts: []part{{"detection", 3 * time.Millisecond}, {afterTakeover, time.Millisecond}}})
	owner.add(strike{number: 2, victim: "broker-2", publish: 60 * time.Millisecond, parts: []part{{"detection", 5 * time.Millisecond}, {afterTakeover, time.Millisecond}}, lines: []string{"a line"}})
	bookie := &result{kind: kinds[2]}
	bookie.add(strike{number: 1, victim: "bookie-1", publish: 15 * time.Millisecond, began: time.Second, returned: 2 * time.Second})
	bookie.add(strike{number: 2, victim: "bookie-1", publish: 14 * time.Millisecond, began: 2 * time.Second, returned: 2 * time.Second})
	etcd := &result{kind: kinds[3], delivered: workload.Report{Sent: 9, Refused: 1, Unknown: 1, Violations: []workload.Violation{{Kind: workload.Lost, Count: 3}}}}
	text := written([]*result{base, owner, bookie, etcd}, 100, "v1").String()
	for _, want := range []string{
		"100 strikes of each kind (30 stretches",
		"| nothing, for as long | 2 | 2.00 ms | 4.00 ms | 4.00 ms | 4.00 ms | <5: 2 (ms) |",
		"| kill -9 of the owner | 2 | 40.0 ms | 60.0 ms | 60.0 ms | 60.0 ms | 20–50: 1 · 50–100: 1 (ms) |",
		"| kill -9 of the owner | 2 | 300 | 0 | 0 | 0 | 0 | 12: median ≤ 50 ms, worst ≤ 150 ms | met | 0 |",
		"| kill -9 of a bookie | 2 | 0 | 0 | 0 | 0 | 0 | 13: no failed publish, worst ≤ 3 × p99 of publishing | met | 0 |",
		"| kill -9 of etcd's leader | 0 | 9 | 2 | 3 | 0 | 0 | no failed publish | FAILED: lost: 3 () | 0 |",
		"| kill -9 of the owner | detection | 2 | 3.00 ms | 5.00 ms | 5.00 ms | 5.00 ms |",
		"| kill -9 of a bookie | while it is away | 1 | 15.0 ms |", "| kill -9 of a bookie | when it is back | 1 | 14.0 ms |",
		"**kill -9 of the owner** strike 2 (broker-2): 60.0 ms without", "detection 5.00 ms, answer to the client 1.00 ms.", "a line",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in:\n%s", want, text)
		}
	}
	bookie.add(strike{number: 3, publish: 16 * time.Millisecond})
	if text := written([]*result{base, bookie}, 3, "v1").String(); !strings.Contains(text, "| "+figures.Met(false)+" |") {
		t.Error("worse than three times the p99, and met")
	}
}

// Reports of several topics add up, each kind of violation once.
func TestSum(t *testing.T) {
	t.Parallel()
	var r workload.Report
	one := workload.Report{Sent: 10, Acknowledged: 9, Refused: 1, Received: 8, StoredTwice: 2, Violations: []workload.Violation{{Kind: workload.Lost, Count: 1}}}
	r.Add(one)
	one.Violations = append(one.Violations, workload.Violation{Kind: workload.Gap, Count: 5})
	r.Add(one)
	if r.Sent != 20 || r.Acknowledged != 18 || r.Refused != 2 || r.Received != 16 || r.StoredTwice != 4 || r.Count(workload.Lost) != 2 || r.Count(workload.Gap) != 5 {
		t.Errorf("%+v", r)
	}
}
