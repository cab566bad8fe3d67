package chain_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// script plays events against a core and compares the actions. A line is an event, optionally followed by "->" and
// the actions expected, in order; Forget is left out. Appends are named a, b, c, … as they come.
type script struct {
	t     *testing.T
	core  *chain.Core
	now   time.Time
	items map[string]*chain.Item
	names map[*chain.Item]string
}

func play(t *testing.T, limits chain.Limits, text string) *script {
	t.Helper()
	s := &script{
		t: t, core: chain.NewCore(limits, 100), now: time.Unix(1000, 0),
		items: map[string]*chain.Item{}, names: map[*chain.Item]string{},
	}
	for n, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		event, want, _ := strings.Cut(line, "->")
		got := s.step(strings.Fields(event))
		if strings.TrimSpace(want) != got {
			t.Fatalf("line %d: %s\n got  %s\n want %s", n, strings.TrimSpace(event), got, strings.TrimSpace(want))
		}
	}
	return s
}

var errScript = errors.New("script")

func (s *script) step(f []string) string {
	arg := func(i int) string {
		if i < len(f) {
			return f[i]
		}
		return ""
	}
	num := func(i int) int64 {
		v, err := strconv.ParseInt(arg(i), 10, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		return v
	}
	ev := chain.Event{Now: s.now, Err: errScript}
	switch f[0] {
	case "append": // append NAME SPAN SIZE
		it := &chain.Item{Span: uint32(num(2)), Size: int(num(3)), Time: s.now.UnixMilli()}
		s.items[f[1]], s.names[it] = it, f[1]
		ev.Kind, ev.Item = chain.EventAppended, it
	case "opened":
		ev.Kind, ev.Ledger = chain.EventOpened, entry.LedgerID(num(1))
	case "open-failed":
		ev.Kind = chain.EventOpenFailed
	case "want-roll":
		ev.Kind = chain.EventRollWanted
	case "prepared":
		ev.Kind = chain.EventPrepared
	case "closed": // closed LAST NEXT
		ev.Kind, ev.Entry, ev.Ledger = chain.EventLedgerClosed, entry.EntryID(num(1)), entry.LedgerID(num(2))
	case "close-failed":
		ev.Kind = chain.EventCloseFailed
	case "done", "not-written", "unknown":
		ev.Kind, ev.Item = chain.EventCompleted, s.items[f[1]]
		ev.Outcome = map[string]chain.Outcome{"done": chain.Stored, "not-written": chain.NotWritten, "unknown": chain.Unknown}[f[0]]
	case "confirmed":
		ev.Kind, ev.Entry = chain.EventConfirmed, entry.EntryID(num(1))
	case "withdrawn":
		ev.Kind = chain.EventWithdrawn
	case "retired":
		ev.Kind = chain.EventRetired
	case "resumed":
		ev.Kind = chain.EventResumed
	case "close":
		ev.Kind = chain.EventCloseAsked
	case "wait":
		d, err := time.ParseDuration(arg(1))
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.now.Add(d)
		return ""
	case "next": // what the next append takes
		return strconv.FormatUint(uint64(s.core.NextOffset()), 10)
	case "phase":
		return s.core.Phase().String()
	case "end": // end LAST
		end, _ := s.core.EndAt(entry.EntryID(num(1)))
		return strconv.FormatUint(uint64(end), 10)
	default:
		s.t.Fatalf("unknown event %q", f[0])
	}
	var out []string
	for _, a := range s.core.Step(ev) {
		out = append(out, s.describe(a)...)
	}
	return strings.Join(out, ", ")
}

func (s *script) describe(a chain.Action) []string {
	name := s.names[a.Item]
	switch a.Kind {
	case chain.ActionSend:
		return []string{fmt.Sprintf("send %s=%d", name, a.Item.Entry)}
	case chain.ActionUse:
		return []string{fmt.Sprintf("use %d", a.Ledger)}
	case chain.ActionOpenNext:
		return []string{"open"}
	case chain.ActionPrepare:
		out := map[bool]string{false: "prepare", true: "prepare later"}[a.Delay]
		if a.Fruitless > 0 {
			out += fmt.Sprintf(" after %d fruitless", a.Fruitless)
		}
		return []string{out}
	case chain.ActionCloseCurrent:
		out := "close"
		if a.Next {
			out += " and open"
		}
		if a.Delay {
			out += " later"
		}
		return []string{out}
	case chain.ActionShow:
		return []string{fmt.Sprintf("show %s@%d:%d", name, a.Position.Ledger, a.Position.Entry)}
	case chain.ActionFinish:
		return []string{fmt.Sprintf("%s %s", []string{"finish", "fail", "doubt"}[a.Outcome], name)}
	case chain.ActionForget:
		if a.Held {
			return []string{"release " + name}
		}
		return nil
	case chain.ActionStop:
		return []string{"stop"}
	case chain.ActionEnd:
		return []string{"end"}
	}
	return []string{"?"}
}

var limits = chain.Limits{Bytes: 100, Entries: 1000, Age: time.Hour}

func TestTheFirstAppendOpensALedger(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 2 10 -> open
		append b 1 10
		opened 7      -> use 7, send a=0, send b=1
		confirmed 1   -> show a@7:0, show b@7:1
		done a        -> finish a
		done b        -> finish b
		next          -> 103
		end 1         -> 103
	`)
}

func TestARollKeepsOrderAndOffsets(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 60   -> open
		opened 7        -> use 7, send a=0
		confirmed 0     -> show a@7:0
		append b 1 60   -> send b=1, prepare
		# Until all is prepared, the full ledger goes on.
		append c 1 10   -> send c=2
		prepared        -> close and open
		append d 1 10
		done a          -> finish a
		end 0           -> 101
		# The transaction closes below what was sent: the rest is not there, and goes to the next ledger before d.
		not-written b
		closed 0 8
		not-written c   -> use 8, send b=0, send c=1, send d=2
		next            -> 104
		confirmed 2     -> show b@8:0, show c@8:1, show d@8:2
		done b          -> finish b
		end 2           -> 104
	`)
}

// Ledgers that take nothing are not opened as fast as etcd answers: the second at once, later ones after ever longer pauses.
func TestLedgersThatTakeNothingFollowSlower(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 60 -> open
		opened 7      -> use 7, send a=0
		want-roll     -> prepare
		prepared      -> close and open
		not-written a
		closed -1 8   -> use 8, send a=0
		want-roll     -> prepare after 1 fruitless
		prepared      -> close and open
		not-written a
		closed -1 9   -> use 9, send a=0
		want-roll     -> prepare after 2 fruitless
		prepared      -> close and open
		not-written a
		closed -1 10  -> use 10, send a=0
		confirmed 0   -> show a@10:0
		done a        -> finish a
		append b 1 60 -> send b=1, prepare
		prepared      -> close and open
		done b        -> finish b
		closed 1 11   -> show b@10:1, use 11
		append c 1 60 -> send c=0
		want-roll     -> prepare
	`)
	var pauses []time.Duration
	for _, n := range []int{0, 1, 2, 3, 7, 8, 100} {
		pauses = append(pauses, chain.RollPause(n))
	}
	ms := time.Millisecond
	if want := []time.Duration{0, 50 * ms, 100 * ms, 200 * ms, 3200 * ms, 5000 * ms, 5000 * ms}; !slices.Equal(pauses, want) {
		t.Errorf("pauses %v, want %v", pauses, want)
	}
}

func TestARollThatCannotBeDoneLeavesTheLedgerOpen(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 60 -> open
		opened 7      -> use 7, send a=0
		confirmed 0   -> show a@7:0
		append b 1 60 -> send b=1, prepare
		prepared      -> close and open
		append c 1 10
		close-failed  -> send c=2, prepare later
		append d 1 10 -> send d=3
		phase         -> open
	`)
}

func TestAgeRollsOnTheNextAppendAndAnEmptyLedgerNever(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 1 -> open
		opened 7     -> use 7, send a=0
		confirmed 0  -> show a@7:0
		done a       -> finish a
		wait 2h
		append b 1 1 -> send b=1, prepare
		prepared     -> close and open
		confirmed 1  -> show b@7:1
		done b       -> finish b
		closed 1 8   -> use 8
		wait 2h
		want-roll
		append c 1 1 -> send c=0
	`)
}

func TestNothingRollsWhileNothingIsConfirmed(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 60 -> open
		opened 7      -> use 7, send a=0
		append b 1 60 -> send b=1
		wait 2h
		append c 1 60 -> send c=2
		# The writer may ask, to get other bookies.
		want-roll     -> prepare
		prepared      -> close and open
		not-written a
		not-written b
		closed -1 8
		not-written c -> use 8, send a=0, send b=1, send c=2
		append d 1 1  -> send d=3
		confirmed 0   -> show a@8:0
		append e 1 1  -> send e=4, prepare
	`)
}

func TestEarlyReceiptsAreMovedWithoutASecondWord(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 1 -> open
		opened 7     -> use 7, send a=0
		# AckNone: done on enqueue, then the ledger is closed without it.
		done a       -> finish a
		want-roll    -> prepare
		prepared     -> close and open
		closed -1 8  -> use 8, send a=0
		confirmed 0  -> show a@8:0
		done a
		next         -> 101
	`)
}

func TestLossDoubtsWhatIsInFlightAndFailsTheRest(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 60 -> open
		opened 7      -> use 7, send a=0
		confirmed 0   -> show a@7:0
		append b 1 60 -> send b=1, prepare
		prepared      -> close and open
		append c 1 1
		withdrawn     -> stop
		unknown a     -> doubt a
		unknown b     -> doubt b, fail c, release c
		append d 1 1  -> fail d, release d
		prepared
		closed 1 8
		phase         -> lost
	`)
}

func TestFailureGivesOffsetsBackOnceAllAreTold(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 3 1 -> open
		append b 2 1
		next         -> 105
		open-failed  -> fail a, release a, fail b, release b
		next         -> 100
		append c 1 1 -> fail c, release c
		phase        -> failed
		resumed
		append d 1 1 -> open
		opened 9     -> use 9, send d=0
		next         -> 101
	`)
}

func TestCloseWaitsForWhatWasAppended(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 1 -> open
		close
		opened 7     -> use 7, send a=0, close
		append b 1 1
		confirmed 0  -> show a@7:0
		done a       -> finish a
		closed 0 0   -> use 0, fail b, release b, end
		append c 1 1 -> fail c, release c
		phase        -> closed
	`)
}

func TestCloseDuringARoll(t *testing.T) {
	t.Parallel()
	play(t, limits, `
		append a 1 200 -> open
		opened 7       -> use 7, send a=0
		confirmed 0    -> show a@7:0
		append b 1 1   -> send b=1, prepare
		close          -> close
		prepared
		close-failed   -> close later
		confirmed 1    -> show b@7:1
		done a         -> finish a
		done b         -> finish b
		closed 1 0     -> use 0, end
	`)
}

// A ledger is retired: no other is opened before something is appended, and what it had not confirmed is.
func TestRetired(t *testing.T) {
	t.Parallel()
	limits := chain.Limits{Bytes: 1000, Entries: 1000, Age: time.Hour}
	play(t, limits, `
		append a 1 10      -> open
		opened 1           -> use 1, send a=0
		retired
		phase              -> open
		# nothing is confirmed: it would free nothing
		confirmed 0        -> show a@1:0
		done a             -> finish a
		retired            -> close
		closed 0 0         -> use 0
		phase              -> idle
		append b 1 10      -> open
		opened 2           -> use 2, send b=0
	`)
	play(t, limits, `
		append a 1 10      -> open
		opened 1           -> use 1, send a=0
		confirmed 0        -> show a@1:0
		done a             -> finish a
		append b 1 10      -> send b=1
		want-roll          -> prepare
		retired            -> close
		# the preparing is for nothing
		prepared
		closed 0 0
		not-written b      -> use 0, open
		open-failed        -> fail b, release b
		resumed
		append c 1 10      -> open
	`)
	play(t, limits, `
		append a 1 10      -> open
		opened 1           -> use 1, send a=0
		confirmed 0        -> show a@1:0
		done a             -> finish a
		retired            -> close
		append b 1 10
		close-failed       -> send b=1
		phase              -> open
		want-roll          -> prepare
	`)
}

// TestNothingIsLostOrReordered drives a core at random beside a model of ledgers: whatever the order of events, every
// append is finished once, what is shown follows the order of appends without gaps, and offsets are contiguous.
func TestNothingIsLostOrReordered(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		core := chain.NewCore(chain.Limits{Bytes: 40, Entries: 6, Age: time.Hour}, 0)
		var (
			ledger    entry.LedgerID = 1
			sent      []*chain.Item  // in the open ledger
			completed int
			confirmed = -1
			queue     []chain.ActionKind
			shown     []entry.Offset
			finished  = map[*chain.Item]chain.Outcome{}
			closeNext bool
			lost      bool
			shownEnd  entry.Offset
		)
		carry := func(actions []chain.Action) {
			for _, a := range actions {
				switch a.Kind {
				case chain.ActionSend:
					if int(a.Item.Entry) != len(sent) {
						t.Fatalf("sent as entry %d, ledger has %d", a.Item.Entry, len(sent))
					}
					sent = append(sent, a.Item)
				case chain.ActionUse:
					sent, completed, confirmed = nil, 0, -1
				case chain.ActionOpenNext, chain.ActionPrepare:
					queue = append(queue, a.Kind)
				case chain.ActionCloseCurrent:
					queue, closeNext = append(queue, a.Kind), a.Next
				case chain.ActionShow:
					if a.Item.Offset != shownEnd {
						t.Fatalf("offset %d shown after %d", a.Item.Offset, shownEnd)
					}
					shownEnd = a.Item.Offset + entry.Offset(a.Item.Span)
					shown = append(shown, a.Item.Offset)
				case chain.ActionFinish:
					if _, twice := finished[a.Item]; twice {
						t.Fatal("finished twice")
					}
					finished[a.Item] = a.Outcome
				case chain.ActionStop:
					lost = true
				case chain.ActionForget, chain.ActionEnd:
				}
			}
		}
		step := func(ev chain.Event) { carry(core.Step(ev)) }
		var appended []*chain.Item
		complete := func(upTo int, o chain.Outcome) {
			for completed < upTo {
				it := sent[completed]
				completed++
				step(chain.Event{Kind: chain.EventCompleted, Item: it, Outcome: o, Err: errScript})
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				it := &chain.Item{Span: uint32(rapid.IntRange(1, 3).Draw(t, "span")), Size: 10}
				appended = append(appended, it)
				step(chain.Event{Kind: chain.EventAppended, Item: it})
				if core.Phase() == chain.PhaseFailed {
					step(chain.Event{Kind: chain.EventResumed})
				}
			},
			"confirm": func(*rapid.T) {
				if confirmed+1 < len(sent) && !lost && core.Phase() == chain.PhaseOpen {
					confirmed++
					step(chain.Event{Kind: chain.EventConfirmed, Entry: entry.EntryID(confirmed)})
					complete(confirmed+1, chain.Stored)
				}
			},
			"work": func(t *rapid.T) {
				if len(queue) == 0 {
					return
				}
				k := queue[0]
				queue = queue[1:]
				ok := rapid.IntRange(0, 3).Draw(t, "ok") > 0
				switch k {
				case chain.ActionOpenNext:
					if core.Phase() != chain.PhaseOpening {
						return
					}
					if !ok {
						step(chain.Event{Kind: chain.EventOpenFailed, Err: errScript})
						step(chain.Event{Kind: chain.EventResumed})
						return
					}
					ledger++
					step(chain.Event{Kind: chain.EventOpened, Ledger: ledger})
				case chain.ActionPrepare:
					step(chain.Event{Kind: chain.EventPrepared})
				default:
					if lost {
						return
					}
					if !ok {
						step(chain.Event{Kind: chain.EventCloseFailed})
						return
					}
					last := confirmed
					next := entry.LedgerID(0)
					if closeNext {
						ledger++
						next = ledger
					}
					complete(len(sent), chain.NotWritten)
					step(chain.Event{Kind: chain.EventLedgerClosed, Entry: entry.EntryID(last), Ledger: next})
				}
			},
			"lose": func(t *rapid.T) {
				if rapid.IntRange(0, 30).Draw(t, "really") > 0 {
					return
				}
				step(chain.Event{Kind: chain.EventWithdrawn, Err: errScript})
				complete(len(sent), chain.Unknown)
			},
		})
		// Let it come to rest: then nothing is pending.
		for range 200 {
			switch {
			case len(queue) > 0:
				k := queue[0]
				queue = queue[1:]
				switch {
				case k == chain.ActionOpenNext && core.Phase() == chain.PhaseOpening:
					ledger++
					step(chain.Event{Kind: chain.EventOpened, Ledger: ledger})
				case k == chain.ActionPrepare:
					step(chain.Event{Kind: chain.EventPrepared})
				case k == chain.ActionCloseCurrent && !lost:
					last := confirmed
					ledger++
					next := ledger
					complete(len(sent), chain.NotWritten)
					step(chain.Event{Kind: chain.EventLedgerClosed, Entry: entry.EntryID(last), Ledger: next})
				}
			case confirmed+1 < len(sent) && !lost:
				confirmed++
				step(chain.Event{Kind: chain.EventConfirmed, Entry: entry.EntryID(confirmed)})
				complete(confirmed+1, chain.Stored)
			}
		}
		if core.Pending() != 0 {
			t.Fatalf("%d appends pending at rest in phase %v", core.Pending(), core.Phase())
		}
		if len(finished) != len(appended) {
			t.Fatalf("%d of %d appends finished", len(finished), len(appended))
		}
		if core.Phase() != chain.PhaseLost && core.NextOffset() != shownEnd {
			t.Fatalf("next offset %d, shown up to %d", core.NextOffset(), shownEnd)
		}
	})
}
