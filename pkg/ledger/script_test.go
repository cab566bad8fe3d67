package ledger_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the expected output of the scripts in testdata")

// TestScripts plays the stories in testdata: commands are events of a core, and below "----" stands what it wants done.
// Bookies are b0, b1 …; b0 … are the first ensemble. -rewrite brings the expectations up to date: read the diff.
func TestScripts(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"writer", "recovery"} {
		files, err := filepath.Glob(filepath.Join("testdata", dir, "*.txt"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no scripts for %s: %v", dir, err)
		}
		for _, file := range files {
			t.Run(dir+"/"+strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
				t.Parallel()
				playFile(t, file, dir)
			})
		}
	}
}

// script runs one command and returns the lines it leads to.
type script interface {
	run(args []string) error
	output() []string
}

func playFile(t *testing.T, file, kind string) {
	t.Helper()
	text, err := os.ReadFile(file)
	noError(t, err)
	var out bytes.Buffer
	var s script
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if line == "" || strings.HasPrefix(line, "#") {
			fmt.Fprintln(&out, line)
			continue
		}
		// A block: commands, "----", expectations up to an empty line.
		var got []string
		for ; i < len(lines) && lines[i] != "" && lines[i] != "----"; i++ {
			fmt.Fprintln(&out, lines[i])
			args := strings.Fields(lines[i])
			if args[0] == "ensemble" {
				s = newScript(t, kind, args[1:])
				got = append(got, s.output()...)
				continue
			}
			if err := s.run(args); err != nil {
				t.Fatalf("%s:%d: %v", file, i+1, err)
			}
			got = append(got, s.output()...)
		}
		for ; i < len(lines) && lines[i] != ""; i++ {
			continue // old expectations
		}
		fmt.Fprintln(&out, "----")
		for _, g := range got {
			fmt.Fprintln(&out, g)
		}
		if i < len(lines) {
			fmt.Fprintln(&out)
		}
	}
	if *rewrite {
		noError(t, os.WriteFile(file, out.Bytes(), 0o600))
		return
	}
	if got, want := strings.TrimRight(out.String(), "\n"), strings.TrimRight(string(text), "\n"); got != want {
		t.Errorf("%s plays differently:\n%s", file, got)
	}
}

var scriptUUIDs = bookieclient.FakeUUIDs(10)

func bookieName(u entry.StorageUUID) string { return fmt.Sprint("b", slices.Index(scriptUUIDs, u)) }

func slotNames(slots []meta.Slot, set quorum.Set) string {
	var names []string
	set.Each(func(i int) { names = append(names, bookieName(slots[i].UUID)) })
	return strings.Join(names, " ")
}

func fragmentNames(fragments []meta.Fragment) string {
	var b strings.Builder
	for _, f := range fragments {
		fmt.Fprintf(&b, "[%d: %s]", f.First, slotNames(f.Slots, quorum.All(len(f.Slots))))
	}
	return b.String()
}

// newScript reads "E/Qw/Qa [zones=abc…] [hosts=abc…] [minzones=N] [bookies=N] [fragments=F,F…] [urgent] [option=value]": the zones and hosts of b0, b1 …, the number of bookies that
// are candidates, and the firsts of a recovery's fragments, of which the last is on b0 …, the ones before on b5 ….
func newScript(t *testing.T, kind string, args []string) script {
	t.Helper()
	var r meta.Replication
	if _, err := fmt.Sscanf(args[0], "%d/%d/%d", &r.Ensemble, &r.WriteQuorum, &r.AckQuorum); err != nil {
		t.Fatal(err)
	}
	s := common{t: t, now: simStart, bookies: r.Ensemble, cfg: ledger.Config{
		SuspectAfter: 100 * time.Millisecond, DelayedChange: 200 * time.Millisecond, RetryAfter: 20 * time.Millisecond,
		StallTimeout: 500 * time.Millisecond, IdleLAC: 50 * time.Millisecond, RequestTimeout: 100 * time.Millisecond,
		NegativeWait: 20 * time.Millisecond, RecoveryWindow: 4, MaxFragments: 4, HandOverAfter: 50 * time.Millisecond,
	}}
	firsts := []entry.EntryID{0}
	for _, a := range args[1:] {
		key, value, _ := strings.Cut(a, "=")
		switch key {
		case "zones":
			s.zones = value
		case "hosts":
			s.hosts = value
		case "minzones":
			r.MinZones = number(value)
		case "bookies":
			s.bookies = number(value)
		case "fragments":
			firsts = nil
			for f := range strings.SplitSeq(value, ",") {
				firsts = append(firsts, entry.EntryID(number(f)))
			}
		case "urgent":
			s.cfg.Urgent = true
		case "straggler":
			s.cfg.StragglerBytes = int64(number(value))
		case "window":
			s.cfg.RecoveryWindow = number(value)
		default:
			t.Fatalf("unknown option %q", a)
		}
	}
	l := meta.Ledger{ID: simLedger, Nonce: 5, Rev: 1, Replication: r, Last: entry.NoEntry}
	for n, first := range firsts {
		f := meta.Fragment{First: first}
		for i := range r.Ensemble {
			at := i
			if n < len(firsts)-1 {
				at += 5
			}
			f.Slots = append(f.Slots, meta.Slot{UUID: scriptUUIDs[at], Zone: s.zone(at), Host: meta.HostHash(s.host(at))})
		}
		l.Fragments = append(l.Fragments, f)
	}
	if kind == "recovery" {
		l.State, l.Term = meta.LedgerInRecovery, 1
		k := &recoveryScript{common: s, core: ledger.NewRecoveryCore(s.cfg, l, s.now)}
		k.collect()
		return k
	}
	return &writerScript{common: s, core: ledger.NewWriterCore(s.cfg, l, s.now)}
}

type common struct {
	t       *testing.T
	now     time.Time
	cfg     ledger.Config
	bookies int
	zones   string
	hosts   string
	gone    []int // no candidates
	drain   []int
	full    []int // not writable
	lines   []string
}

func (s *common) zone(i int) string {
	if i < len(s.zones) && s.zones[i] != '-' {
		return s.zones[i : i+1]
	}
	return ""
}

func (s *common) host(i int) string {
	if i < len(s.hosts) {
		return s.hosts[i : i+1]
	}
	return fmt.Sprint("h", i)
}

func (s *common) output() []string {
	out := s.lines
	s.lines = nil
	return out
}

func (s *common) printf(format string, a ...any) {
	s.lines = append(s.lines, fmt.Sprintf(format, a...))
}

func (s *common) candidates() []ledger.Candidate {
	var list []ledger.Candidate
	for i := range s.bookies {
		if !slices.Contains(s.gone, i) {
			list = append(list, ledger.Candidate{
				UUID: scriptUUIDs[i], Host: s.host(i), Zone: s.zone(i), FreeBytes: 1000 - uint64(i),
				Writable: !slices.Contains(s.full, i), Draining: slices.Contains(s.drain, i),
			})
		}
	}
	return list
}

// change reads "gone=1,2 draining=3 full=4 bookies=5".
func (s *common) change(args []string) {
	s.gone, s.drain, s.full = nil, nil, nil
	for _, a := range args {
		key, value, _ := strings.Cut(a, "=")
		for v := range strings.SplitSeq(value, ",") {
			switch key {
			case "gone":
				s.gone = append(s.gone, number(v))
			case "full":
				s.full = append(s.full, number(v))
			case "draining":
				s.drain = append(s.drain, number(v))
			case "bookies":
				s.bookies = number(v)
			}
		}
	}
}

func number(s string) int {
	n, err := strconv.Atoi(strings.TrimLeft(s, "eb"))
	if err != nil {
		panic(err)
	}
	return n
}

var codes = map[string]bookiewire.Code{
	"ok": bookiewire.OK, "noentry": bookiewire.NoEntry, "noledger": bookiewire.NoLedger, "unknown": bookiewire.Unknown,
	"fenced": bookiewire.Fenced, "readonly": bookiewire.ReadOnly, "overloaded": bookiewire.Overloaded,
	"notadmitted": bookiewire.NotAdmitted, "disconnected": bookiewire.Disconnected, "badrequest": bookiewire.BadRequest,
}

func code(s string) bookiewire.Code {
	c, ok := codes[s]
	if !ok {
		panic("no code " + s)
	}
	return c
}

// writerScript plays a WriterCore. Commands:
//
//	append LEVEL [N]               ack eN bN [slot=N]           fail eN bN CODE [slot=N]
//	tick D                         candidates [gone=…] …        verified open|recovering|failed
//	t2 applied|notapplied|lost|nooutcome    close [D]   t3 …     early yes|no    withdraw
type writerScript struct {
	common
	core   *ledger.WriterCore
	change *ledger.Change
	close  *ledger.CloseProposal
	n      int
}

func (s *writerScript) slotOf(u entry.StorageUUID, args []string) int {
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "slot="); ok {
			return number(v)
		}
	}
	fragments := s.core.Ledger().Fragments
	for i := len(fragments) - 1; i >= 0; i-- {
		if at := slices.IndexFunc(fragments[i].Slots, func(x meta.Slot) bool { return x.UUID == u }); at >= 0 {
			return at
		}
	}
	panic("bookie was never in the ensemble")
}

func (s *writerScript) run(args []string) error {
	c := s.core
	switch args[0] {
	case "append":
		level := map[string]ledger.AckLevel{"none": ledger.AckNone, "one": ledger.AckOne, "quorum": ledger.AckQuorum, "all": ledger.AckAll}[args[1]]
		n := 1
		if len(args) > 2 {
			n = number(args[2])
		}
		for range n {
			at := s.n
			s.n++
			c.Append(body(at), level, func(id entry.EntryID, err error) {
				s.printf("done append %d as e%d %s: %s", at, id, level, outcome(err))
			})
		}
	case "ack":
		u := scriptUUIDs[number(args[2])]
		c.Ack(entry.EntryID(number(args[1])), s.slotOf(u, args), u)
	case "fail":
		u := scriptUUIDs[number(args[2])]
		c.Fail(entry.EntryID(number(args[1])), s.slotOf(u, args), u, code(args[3]))
	case "tick":
		d, err := time.ParseDuration(args[1])
		if err != nil {
			return err
		}
		s.now = s.now.Add(d)
		c.Tick(s.now)
	case "candidates":
		s.common.change(args[1:])
		c.Candidates(s.candidates())
	case "verified":
		l := c.Ledger()
		switch args[1] {
		case "recovering":
			l.State = meta.LedgerInRecovery
			c.Verified(l, nil)
		case "failed":
			c.Verified(l, meta.ErrUnavailable)
		default:
			c.Verified(l, nil)
		}
	case "t2":
		l := s.change.Ledger
		l.Fragments = s.change.Fragments
		l.Rev++
		c.ChangeDone(txnResult(args[1]), l, nil)
	case "close":
		var d time.Duration
		if len(args) > 1 {
			d, _ = time.ParseDuration(args[1])
		}
		c.RequestClose(s.now.Add(d))
	case "cancel":
		s.printf("canceled: %t", c.CancelClose())
	case "t3":
		l := c.Ledger()
		l.State, l.Last = meta.LedgerClosed, s.close.Last
		c.CloseDone(txnResult(args[1]), l, nil)
	case "early":
		c.SetMayAckEarly(args[1] == "yes")
	case "withdraw":
		c.Withdraw(ledger.ErrShutdown)
	default:
		return fmt.Errorf("unknown command %q", args[0])
	}
	s.collect()
	return nil
}

func txnResult(s string) ledger.TxnResult {
	return map[string]ledger.TxnResult{
		"applied": ledger.Applied, "notapplied": ledger.NotApplied, "lost": ledger.Lost, "nooutcome": ledger.NoOutcome,
	}[s]
}

func outcome(err error) string {
	var e *ledger.AppendError
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &e):
		return fmt.Sprintf("%s (%v)", e.Outcome, e.Err)
	}
	return err.Error()
}

func (s *writerScript) collect() {
	c := s.core
	for rd := c.Ready(); rd.NeedCandidates; rd = c.Ready() {
		rd.NeedCandidates = false
		c.Candidates(s.candidates())
	}
	rd := c.Ready()
	for _, x := range rd.Sends {
		s.printf("send e%d to %s, lac %d", x.Entry, slotNames(x.Ensemble, x.Slots), rd.LAC)
	}
	if rd.WriteLAC != 0 {
		f := c.Ledger().Fragments
		s.printf("write lac %d to %s", rd.LAC, slotNames(f[len(f)-1].Slots, rd.WriteLAC))
	}
	if rd.Verify {
		s.printf("verify the record")
	}
	if rd.Change != nil {
		change := *rd.Change
		s.change = &change
		s.printf("propose T2 %s", fragmentNames(rd.Change.Fragments))
	}
	if rd.Close != nil {
		p := *rd.Close
		s.close = &p
		s.printf("propose T3 last %d length %d", p.Last, p.Length)
	}
	if rd.Confirmed {
		s.printf("confirmed %d", rd.LAC)
	}
	for _, k := range rd.Completions {
		if k.Dropped {
			s.printf("dropped e%d %q", k.Entry, k.Body)
			continue
		}
		k.Done(k.Entry, k.Err)
	}
	if rd.Released > 0 {
		s.printf("released %d bytes", rd.Released)
	}
	for _, h := range rd.Hints {
		s.printf("hint: fragment %d slot %d %s lacks e%d-e%d", h.Fragment, h.Slot, bookieName(h.UUID), h.First, h.Last)
	}
	if rd.Stalled {
		s.printf("stalled")
	}
	if c.Phase() == ledger.Withdrawn {
		s.printf("withdrawn: %v", c.Err())
	}
	if c.WantsRoll() {
		s.printf("wants to roll")
	}
	c.Done()
}

// recoveryScript plays a RecoveryCore. Commands:
//
//	fenced bN lac=N | CODE     read eN bN CODE|damaged     added eN bN CODE [slot=N]      tick D     candidates …
type recoveryScript struct {
	common
	core     *ledger.RecoveryCore
	ensemble []meta.Slot
}

func (s *recoveryScript) run(args []string) error {
	c := s.core
	slot := func(name string) int {
		u := scriptUUIDs[number(name)]
		return slices.IndexFunc(c.Fragment().Slots, func(x meta.Slot) bool { return x.UUID == u })
	}
	switch args[0] {
	case "fenced":
		if lac, ok := strings.CutPrefix(args[2], "lac="); ok {
			n, err := strconv.Atoi(lac)
			if err != nil {
				return err
			}
			c.FenceDone(slot(args[1]), entry.EntryID(n), bookiewire.OK)
		} else {
			c.FenceDone(slot(args[1]), 0, code(args[2]))
		}
	case "read":
		e := entry.EntryID(number(args[1]))
		b := body(int(e))
		switch sum := entry.Checksum(simLedger, e, b); args[3] {
		case "ok":
			c.ReadDone(e, slot(args[2]), bookiewire.OK, sum, b)
		case "damaged":
			c.ReadDone(e, slot(args[2]), bookiewire.OK, sum, []byte("dust"))
		default:
			c.ReadDone(e, slot(args[2]), code(args[3]), 0, nil)
		}
	case "added":
		u := scriptUUIDs[number(args[2])]
		at := slices.IndexFunc(s.ensemble, func(x meta.Slot) bool { return x.UUID == u })
		if len(args) > 4 {
			at = number(strings.TrimPrefix(args[4], "slot="))
		}
		c.AddDone(entry.EntryID(number(args[1])), at, u, code(args[3]))
	case "tick":
		d, err := time.ParseDuration(args[1])
		if err != nil {
			return err
		}
		s.now = s.now.Add(d)
		c.Tick(s.now)
	case "candidates":
		s.common.change(args[1:])
	default:
		return fmt.Errorf("unknown command %q", args[0])
	}
	s.collect()
	return nil
}

func (s *recoveryScript) collect() {
	c := s.core
	for rd := c.Ready(); rd.NeedCandidates; rd = c.Ready() {
		rd.NeedCandidates = false
		c.Candidates(s.candidates())
	}
	rd := c.Ready()
	slots := c.Fragment().Slots
	if rd.Fence != 0 {
		s.printf("fence %s with term %d", slotNames(slots, rd.Fence), c.Ledger().Term)
	}
	for _, r := range rd.Reads {
		s.printf("read e%d from %s", r.Entry, slotNames(slots, r.Slots))
	}
	for _, w := range rd.Writes {
		s.ensemble = w.Ensemble
		s.printf("write e%d to %s, lac %d", w.Entry, slotNames(w.Ensemble, w.Slots), c.Base())
	}
	if rd.Finish != nil {
		s.printf("propose T5 last %d %s", rd.Finish.Last, fragmentNames(rd.Finish.Tail))
		for _, h := range rd.Finish.Hints {
			s.printf("hint: fragment %d slot %d %s lacks e%d-e%d", h.Fragment, h.Slot, bookieName(h.UUID), h.First, h.Last)
		}
	}
	if rd.Abort != nil {
		s.printf("abort: %v", rd.Abort)
	}
	c.Done()
}
