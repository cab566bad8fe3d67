package ledgerstore

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the expected output in testdata")

// TestCoreScripts runs testdata/core/*.txt. A script is blocks of commands, a line of dashes, and what the core then
// asks for; groups are numbered as they are cut. `go test -run CoreScripts -rewrite` writes the output anew.
func TestCoreScripts(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/core/*.txt")
	must(t, err)
	if len(files) == 0 {
		t.Fatal("no scripts")
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			must(t, err)
			var out strings.Builder
			d := newScript()
			for i, block := range strings.Split(strings.TrimSpace(string(text)), "\n\n") {
				commands, want, _ := strings.Cut(block, "\n----\n")
				commands = strings.TrimSuffix(commands, "\n----")
				got := d.run(t, commands)
				if i > 0 {
					out.WriteString("\n")
				}
				fmt.Fprintf(&out, "%s\n----\n%s", commands, got)
				if want != "" {
					want += "\n"
				}
				if !*rewrite && got != want {
					t.Fatalf("after\n%s\ngot\n%s\nwant\n%s", commands, got, want)
				}
			}
			if *rewrite {
				must(t, os.WriteFile(file, []byte(out.String()), 0o600))
			}
		})
	}
}

// script drives a core by hand.
type script struct {
	core     *Core
	segments uint64
	room     map[uint64]int // records that a segment still takes
	groups   []*Batch
	ends     map[*Batch]int64
	checks   []*Check
	marks    map[entry.LedgerID]uint64
	out      strings.Builder
}

type scriptRoom struct {
	d   *script
	seq uint64
}

func (r scriptRoom) Room(records int, _ int64) bool { return records <= r.d.room[r.seq] }

func newScript() *script {
	d := &script{room: map[uint64]int{}, ends: map[*Batch]int64{}, marks: map[entry.LedgerID]uint64{}}
	d.core = NewCore(d.newSegment(), 1000)
	return d
}

func (d *script) newSegment() *Segment {
	d.segments++
	d.room[d.segments] = 4
	return NewSegment(d.segments, scriptRoom{d, d.segments})
}

func (d *script) run(t *testing.T, commands string) string {
	t.Helper()
	d.out.Reset()
	for line := range strings.Lines(commands) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		ev := d.parse(t, strings.Fields(line))
		if ev != nil {
			d.core.Step(ev)
		}
		if !strings.HasPrefix(line, "quietly") {
			d.print(d.core.Ready())
		}
	}
	return d.out.String()
}

func (d *script) parse(t *testing.T, f []string) Event {
	t.Helper()
	num := func(i int) int64 {
		n, err := strconv.ParseInt(strings.TrimPrefix(f[i], "t"), 10, 64)
		must(t, err)
		return n
	}
	say := func(name string) func(error) {
		return func(err error) { fmt.Fprintf(&d.out, "reply %s: %s\n", name, answer(err)) }
	}
	switch f[0] {
	case "add": // add LEDGER ENTRY [recovery TERM | body TEXT | stale | big]
		a := &Add{Add: bookiewire.Add{Ledger: entry.LedgerID(num(1)), Entry: entry.EntryID(num(2)), LAC: entry.EntryID(num(2)) - 1, Body: []byte("b")}}
		a.Generation = d.core.table.generation(a.Ledger).Load()
		for i := 3; i < len(f); i++ {
			switch f[i] {
			case "recovery":
				i++
				a.Recovery, a.Term = true, entry.Term(num(i))
			case "body":
				i++
				a.Body = []byte(f[i])
			case "stale":
				a.Generation--
			case "big":
				a.Body = make([]byte, 900)
			}
		}
		a.Checksum = entry.Checksum(a.Ledger, a.Entry, a.Body)
		a.Done = say(fmt.Sprintf("add %d:%d", a.Ledger, a.Entry))
		return a
	case "fence":
		name := fmt.Sprintf("fence %s %s", f[1], f[2])
		return &Fence{
			Fence: bookiewire.Fence{Ledger: entry.LedgerID(num(1)), Term: entry.Term(num(2))},
			Done: func(r bookiewire.FenceReply, err error) {
				fmt.Fprintf(&d.out, "reply %s: %s lac %d\n", name, answer(err), r.LAC)
			},
		}
	case "lac":
		return &LAC{WriteLAC: bookiewire.WriteLAC{Ledger: entry.LedgerID(num(1)), LAC: entry.EntryID(num(2))}, Done: say("lac " + f[1])}
	case "limbo":
		return &Limbo{Ledger: entry.LedgerID(num(1)), Done: say("limbo " + f[1])}
	case "limbo-cleared":
		return &Limbo{Ledger: entry.LedgerID(num(1)), Clear: true, Done: say("limbo-cleared " + f[1])}
	case "mark": // mark LEDGER: of the deletions of the ledger from here on
		d.marks[entry.LedgerID(num(1))] = d.core.Mark(entry.LedgerID(num(1)))
	case "delete": // delete LEDGER
		ev := &Delete{Ledger: entry.LedgerID(num(1)), Done: say("delete " + f[1])}
		mark, marked := d.marks[ev.Ledger]
		if ev.Mark = mark; !marked {
			ev.Mark = d.core.Mark(ev.Ledger)
		}
		return ev
	case "carry": // carry SEGMENT [LEDGER whose tombstone is obsolete]
		ev := &Carry{Segments: []uint64{uint64(num(1))}, Done: say("carry " + f[1])}
		if len(f) > 2 {
			ev.Obsolete = map[entry.LedgerID]bool{entry.LedgerID(num(2)): true}
		}
		return ev
	case "written": // written GROUP [enospc|eio]
		b := d.groups[num(1)-1]
		if len(f) > 2 {
			return &Written{Batch: b, Err: map[string]error{"enospc": syscall.ENOSPC, "eio": syscall.EIO}[f[2]]}
		}
		d.room[b.Segment.seq] -= len(b.Records)
		end := int64(100 * (4 - d.room[b.Segment.seq]))
		locs := make([]segment.Location, len(b.Records))
		for i := range locs {
			locs[i] = segment.Location{Offset: end - 100*int64(len(locs)-i), Length: 100}
		}
		return &Written{Batch: b, Locations: locs, End: end}
	case "synced":
		ev := &Synced{Batch: d.groups[num(1)-1]}
		if len(f) > 2 {
			ev.Err = syscall.EIO
		}
		return ev
	case "prepared":
		if len(f) > 1 {
			return &Prepared{Err: syscall.ENOSPC}
		}
		return &Prepared{Segment: d.newSegment()}
	case "sealed":
		for _, b := range d.groups {
			if b.Segment != nil && b.Segment.seq == uint64(num(1)) {
				return &Sealed{Segment: b.Segment}
			}
		}
		for _, l := range d.core.table.snapshot() {
			for _, r := range l.runs {
				if r.seg.seq == uint64(num(1)) {
					return &Sealed{Segment: r.seg}
				}
			}
		}
		t.Fatalf("no segment %d", num(1))
	case "checked": // checked same|differs|absent|error
		ev := &Checked{Check: d.checks[0], Found: f[1] == "same" || f[1] == "differs", Same: f[1] == "same"}
		d.checks = d.checks[1:]
		if f[1] == "error" {
			ev.Err = errors.New("input/output error")
		}
		return ev
	case "space":
		return &Space{State: map[string]State{"writable": Writable, "read-only": ReadOnly, "full": Full}[f[1]]}
	default:
		t.Fatalf("unknown command %q", f[0])
	}
	return nil
}

func answer(err error) string {
	var e *bookiewire.Error
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &e) && e.Code == bookiewire.Fenced:
		return fmt.Sprintf("fenced by %d", e.Term)
	case errors.As(err, &e):
		return e.Code.String()
	}
	return err.Error()
}

func (d *script) print(rd Ready) {
	if b := rd.Append; b != nil {
		d.groups = append(d.groups, b)
		fmt.Fprintf(&d.out, "append group %d to segment %d, durable %d:", len(d.groups), b.Segment.seq, b.DurableUpto)
		for _, r := range b.Records {
			switch r.Kind {
			case segment.KindEntry:
				fmt.Fprintf(&d.out, " %d:%d", r.Ledger, r.Entry)
			case segment.KindFence:
				fmt.Fprintf(&d.out, " fence %d t%d", r.Ledger, r.Term)
			case segment.KindLAC:
				fmt.Fprintf(&d.out, " lac %d %d", r.Ledger, r.LAC)
			default:
				fmt.Fprintf(&d.out, " %s %d", r.Kind, r.Ledger)
			}
		}
		d.out.WriteString("\n")
	}
	for _, b := range rd.Syncs {
		for i := len(d.groups) - 1; i >= 0; i-- { // the latest: batches are used again
			if d.groups[i] == b {
				fmt.Fprintf(&d.out, "sync group %d\n", i+1)
				break
			}
		}
	}
	for _, c := range rd.Checks {
		d.checks = append(d.checks, c)
		fmt.Fprintf(&d.out, "check %d:%d\n", c.Add.Ledger, c.Add.Entry)
	}
	if rd.Prepare {
		d.out.WriteString("prepare\n")
	}
	if rd.Reserve {
		d.out.WriteString("prepare from the reserve\n")
	}
	for _, s := range rd.Seals {
		fmt.Fprintf(&d.out, "seal segment %d\n", s.seq)
	}
	for _, r := range rd.Replies {
		r.Do()
	}
	if rd.Fatal != nil {
		fmt.Fprintf(&d.out, "fatal: %v\n", rd.Fatal)
	}
}
