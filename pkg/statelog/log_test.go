package statelog_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/statelog"
)

func TestRecordsSurviveATakeover(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	big := strings.Repeat("x", 3000)
	put(t, l, rec("a", 1, "k", "1"), rec("a", 2, "k", big), rec("b", 1, "k", ""))
	put(t, l, rec("a", 1, "k", "2"), rec("a", 1, "gone", "1"))
	put(t, l, del("a", 1, "gone"), del("a", 1, "never there"), rec("c", 1, "k", "1"))
	done := make(chan error, 1)
	check(t, l.DeleteOwner(t.Context(), "c", func(err error) { done <- err }))
	check(t, <-done)
	want := map[string]string{"a/1/k": "2", "a/2/k": big, "b/1/k": ""}
	if got := state(t, l); !maps.Equal(got, want) {
		t.Fatalf("state %v", got)
	}
	if got := l.Owners(); !slices.Equal(got, []string{"a", "b"}) {
		t.Fatalf("owners %v", got)
	}
	fresh := f.open(f.Takeover(), statelog.Config{})
	if got := state(t, fresh); !maps.Equal(got, want) {
		t.Fatalf("state after a takeover %v", got)
	}
	// The old owner stores nothing more.
	var failed *ledger.AppendError
	if err := l.Append(t.Context(), []statelog.Record{rec("a", 1, "k", "old")}, func(err error) { done <- err }); err == nil {
		if err := <-done; !errors.As(err, &failed) {
			t.Fatalf("the old owner's append: %v", err)
		}
	}
	put(t, fresh, rec("a", 1, "k", "3"))
	check(t, fresh.Close(t.Context()))
	again := f.open(f.Takeover(), statelog.Config{})
	want["a/1/k"] = "3"
	if got := state(t, again); !maps.Equal(got, want) {
		t.Fatalf("state after two takeovers %v", got)
	}
}

// Calls that come while entries are under way share an entry.
func TestGroupCommit(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "first", "1"))
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	var all []<-chan error
	for i := range 100 {
		all = append(all, start(t, l, rec("a", 1, strconv.Itoa(i), "1")))
	}
	release()
	for _, done := range all {
		check(t, <-done)
	}
	last := 0
	for _, id := range f.Fake.Entries(bookieclient.FakeUUID(0), l.Chain().Runs()[0].Ledger) {
		last = int(id)
	}
	if last != 3 { // the first, two of one call each, and one of all the rest
		t.Fatalf("%d entries", last+1)
	}
	if got := len(state(t, l)); got != 101 {
		t.Fatalf("%d records", got)
	}
}

func TestLargeListsAreSplitAndLimitsHold(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	value := strings.Repeat("v", statelog.MaxValue)
	put(t, l, rec("a", 1, "0", value), rec("a", 1, "1", value), rec("a", 1, "2", "small"))
	fresh := f.open(f.Takeover(), statelog.Config{})
	got := state(t, fresh)
	if len(got) != 3 || got["a/1/1"] != value || got["a/1/2"] != "small" {
		t.Fatalf("%d records", len(got))
	}
	for _, bad := range []statelog.Record{
		rec("", 1, "k", "v"), rec(strings.Repeat("o", statelog.MaxOwner+1), 1, "k", "v"),
		rec("a", 1, strings.Repeat("k", statelog.MaxKey+1), "v"), rec("a", 1, "k", value+"v"),
	} {
		if err := fresh.Append(t.Context(), []statelog.Record{bad}, func(error) {}); !errors.Is(err, statelog.ErrTooLarge) {
			t.Fatalf("owner of %d, key of %d, value of %d bytes: %v", len(bad.Owner), len(bad.Key), len(bad.Value), err)
		}
	}
}

// A million updates of some keys: the log stays within its bound, and a takeover replays no more than that.
func TestBoundedUnderAMillionUpdates(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	const updates, keys, perCall = 1_000_000, 2000, 500
	var mu sync.Mutex
	var first error
	var wg sync.WaitGroup
	worst := 0.0
	want := map[string]string{}
	records := make([]statelog.Record, perCall)
	for i := range updates / perCall {
		for j := range records {
			n := i*perCall + j
			key := n % keys
			if n%7 != 0 {
				key = n % 97 // most updates go to few keys
			}
			records[j] = rec(fmt.Sprint("owner-", key%50), 1, strconv.Itoa(key), fmt.Sprintf("%030d", n))
			if n >= updates-20*keys { // each key's last update is among these
				want[fmt.Sprintf("owner-%d/1/%d", key%50, key)] = string(records[j].Value)
			}
		}
		wg.Add(1)
		check(t, l.Append(t.Context(), records, func(err error) {
			defer wg.Done()
			mu.Lock()
			defer mu.Unlock()
			if err != nil && first == nil {
				first = err
			}
		}))
		if i%20 == 19 {
			wg.Wait()
		}
		total, live := l.Size()
		worst = max(worst, float64(total)/float64(max(8<<20, 4*live)))
	}
	wg.Wait()
	check(t, first)
	t.Logf("largest size was %.2f of the bound", worst)
	if worst > 1 {
		t.Fatalf("the log grew to %.2f of its bound", worst)
	}
	if got := state(t, l); !maps.Equal(got, want) {
		t.Fatalf("%d records live, %d expected, or older ones", len(got), len(want))
	}
	fresh := f.open(f.Takeover(), statelog.Config{})
	if total, live := fresh.Size(); total > max(8<<20, 4*live) {
		t.Fatalf("replayed %d bytes for %d live ones", total, live)
	}
	if got := state(t, fresh); !maps.Equal(got, want) {
		t.Fatalf("%d records after the takeover, %d before, or others", len(got), len(want))
	}
}

// Whatever is updated, deleted, rewritten, trimmed and taken over in between: the replayed state is what was stored.
func TestCrashAtRandomReplaysTheSame(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		f := newCluster(t, 3)
		cfg := statelog.Config{FloorBytes: 6000}
		l := f.open(f.Takeover(), cfg)
		defer func() { l.Shutdown() }()
		want := map[string]string{}
		for range rapid.IntRange(2, 15).Draw(rt, "rounds") {
			switch rapid.IntRange(0, 10).Draw(rt, "what") {
			case 10: // an entry cannot be read for a while: what is not refused is right
				runs := l.Chain().Runs()
				if len(runs) == 0 {
					break
				}
				check(t, l.Close(t.Context()))
				runs = l.Chain().Runs()
				run := runs[rapid.IntRange(0, len(runs)-1).Draw(rt, "run")]
				f.unreadable(run.Ledger, entry.EntryID(rapid.Uint64Range(0, uint64(run.End-run.First-1)).Draw(rt, "entry")))
				opened, err := statelog.Open(t.Context(), statelog.Env{Chain: f.Env()}, f.Takeover(), bundle, cfg)
				if err == nil {
					for owner, records := range byOwner(want) {
						got, err := opened.Load(t.Context(), owner)
						var missing *statelog.UnreadableError
						switch {
						case errors.As(err, &missing):
						case err != nil:
							rt.Fatal(err)
						case !maps.Equal(named(got), records):
							rt.Fatalf("%s: %v, want %v", owner, named(got), records)
						}
					}
				}
				f.readable()
				if err == nil && rapid.Bool().Draw(rt, "goes on") {
					l = opened
				} else {
					if err == nil {
						opened.Shutdown()
					}
					l = f.open(f.Takeover(), cfg)
				}
				for owner, records := range byOwner(want) {
					got, err := l.Load(t.Context(), owner)
					check(t, err)
					if !maps.Equal(named(got), records) {
						rt.Fatalf("%s: %v, want %v", owner, named(got), records)
					}
				}
			case 0: // crash: the old owner is left as it is
				old := l
				l = f.open(f.Takeover(), cfg)
				old.Shutdown()
				if got := state(t, l); !maps.Equal(got, want) {
					rt.Fatalf("state %v, want %v", got, want)
				}
			case 1:
				owner := fmt.Sprint("o", rapid.IntRange(0, 3).Draw(rt, "owner"))
				done := make(chan error, 1)
				check(t, l.DeleteOwner(t.Context(), owner, func(err error) { done <- err }))
				check(t, <-done)
				for k := range want {
					if strings.HasPrefix(k, owner+"/") {
						delete(want, k)
					}
				}
			default:
				var all []<-chan error
				for range rapid.IntRange(1, 8).Draw(rt, "calls") {
					var records []statelog.Record
					for range rapid.IntRange(1, 6).Draw(rt, "records") {
						owner := fmt.Sprint("o", rapid.IntRange(0, 3).Draw(rt, "owner"))
						key := strconv.Itoa(rapid.IntRange(0, 5).Draw(rt, "key"))
						name := owner + "/1/" + key
						if rapid.IntRange(0, 4).Draw(rt, "delete") == 0 {
							records = append(records, del(owner, 1, key))
							delete(want, name)
							continue
						}
						value := strings.Repeat(key, rapid.SampledFrom([]int{0, 1, 100, 200, 900}).Draw(rt, "size"))
						records = append(records, rec(owner, 1, key, value))
						want[name] = value
					}
					all = append(all, start(t, l, records...))
				}
				for _, done := range all {
					check(t, <-done)
				}
			}
		}
		if got := state(t, l); !maps.Equal(got, want) {
			rt.Fatalf("state %v, want %v", got, want)
		}
	})
}

// An update that comes while its key's old value is about to be written again must win, wherever the two meet.
func TestARewriteNeverOverridesAnUpdate(t *testing.T) {
	t.Parallel()
	old, fresh := strings.Repeat("old", 100), strings.Repeat("new", 100)
	for _, updateFirst := range []bool{true, false} {
		for _, deleteIt := range []bool{true, false} {
			f := newCluster(t, 3)
			l := f.open(f.Takeover(), statelog.Config{})
			put(t, l, rec("a", 1, "k", old), rec("a", 1, "other", old))
			update, want := rec("a", 1, "k", fresh), map[string]string{"a/1/other": old, "a/1/k": fresh}
			if deleteIt {
				update, want = del("a", 1, "k"), map[string]string{"a/1/other": old}
			}
			// Values are read from a bookie, which is when the update comes in; or it is under way already.
			releaseReads := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpRead)
			releaseAdds := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
			var done <-chan error
			held := 0
			if updateFirst {
				done, held = start(t, l, update), 3
				_, err := f.Fake.AwaitHeld(t.Context(), held)
				check(t, err)
			}
			rewritten := make(chan error, 1)
			go func() { rewritten <- l.RewriteOldest() }()
			_, err := f.Fake.AwaitHeld(t.Context(), held+1)
			check(t, err)
			if !updateFirst {
				done = start(t, l, update)
				_, err := f.Fake.AwaitHeld(t.Context(), 4)
				check(t, err)
			}
			releaseReads()
			eventually(t, "the rewrite to be handed in", func() bool { return l.Gathered() == 2 })
			releaseAdds()
			check(t, <-done)
			check(t, <-rewritten)
			if got := state(t, l); !maps.Equal(got, want) {
				t.Fatalf("update first %v, delete %v: live %v", updateFirst, deleteIt, got)
			}
			l.Shutdown()
			again := f.open(f.Takeover(), statelog.Config{})
			if got := state(t, again); !maps.Equal(got, want) {
				t.Fatalf("update first %v, delete %v: replayed %v", updateFirst, deleteIt, got)
			}
		}
	}
}

// A crash with appends under way keeps each call whole or not at all.
func TestACallIsAtomic(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "x", "0"), rec("a", 1, "y", "0"))
	f.Fake.Rule(func(c bookieclient.Call) bookieclient.Fate {
		if c.From == "owner-1" && c.Op == bookieclient.OpAdd && c.Stage == bookieclient.AtReply {
			return bookieclient.Hold
		}
		return bookieclient.Deliver
	})
	pending := start(t, l, rec("a", 1, "x", "1"), rec("a", 1, "y", "1"))
	_, err := f.Fake.AwaitHeld(t.Context(), 3)
	check(t, err)
	fresh := f.open(f.Takeover(), statelog.Config{})
	got := state(t, fresh)
	if got["a/1/x"] != got["a/1/y"] {
		t.Fatalf("half a call: %v", got)
	}
	l.Shutdown()
	var failed *ledger.AppendError
	if err := <-pending; !errors.As(err, &failed) || failed.Outcome != ledger.Unknown {
		t.Fatalf("told %v", err)
	}
}

func TestNoLedgerCanBeOpenedForAWhile(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.SetDraining(0, true)
	l := f.open(f.Takeover(), statelog.Config{})
	var failed *ledger.AppendError
	if err := <-start(t, l, rec("a", 1, "k", "1")); !errors.As(err, &failed) || failed.Outcome != ledger.NotWritten {
		t.Fatalf("told %v", err)
	}
	f.SetDraining(0, false)
	eventually(t, "an append", func() bool { return <-start(t, l, rec("a", 1, "k", "2")) == nil })
	if got := state(t, l); got["a/1/k"] != "2" {
		t.Fatalf("state %v", got)
	}
}

// The bookies' disks are full. Records are stored all the same, in an open log, in one that was taken over, and while it
// rolls and is rewritten.
func TestFullBookiesTakeRecords(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{FloorBytes: 32 << 10})
	put(t, l, rec("a", 1, "k", "1"))
	for n := range 3 {
		f.SetFull(n, true)
	}
	put(t, l, rec("a", 1, "k", "2"))
	l = f.open(f.Takeover(), statelog.Config{FloorBytes: 32 << 10}) // the other one is not closed
	put(t, l, rec("b", 1, "k", "3"))
	value := strings.Repeat("v", 4<<10)
	first := l.Chain().Runs()[0].Ledger
	eventually(t, "the log to be shortened", func() bool {
		put(t, l, rec("c", 1, "k", value))
		return l.Chain().Runs()[0].Ledger > first
	})
	l = f.open(f.Takeover(), statelog.Config{})
	if got := state(t, l); got["a/1/k"] != "2" || got["b/1/k"] != "3" || got["c/1/k"] != value {
		t.Fatalf("state %v", got)
	}
}

func TestShutdownTellsEverybody(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "k", "1"))
	f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	var all []<-chan error
	for i := range 20 {
		all = append(all, start(t, l, rec("a", 1, strconv.Itoa(i), "1")))
	}
	l.Shutdown()
	for _, done := range all {
		select {
		case err := <-done:
			if err == nil {
				t.Fatal("stored after all")
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("an append is never done")
		}
	}
	if err := l.Append(t.Context(), []statelog.Record{rec("a", 1, "k", "1")}, nil); !errors.Is(err, statelog.ErrClosed) {
		t.Fatalf("after shutdown: %v", err)
	}
}

// What is stored is told so even after the log was lost; what still waited behind it is not.
func TestWhatWaitsAsTheLogIsLostIsNotStored(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "k", "1"))
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	var sent, waiting []<-chan error
	for i := 0; len(waiting) < 3; i++ {
		before := l.Gathered()
		done := start(t, l, rec("a", 1, strconv.Itoa(i), "1"))
		if l.Gathered() > before {
			sent = append(sent, done)
		} else {
			waiting = append(waiting, done)
		}
	}
	l.Lose(errors.New("another broker has it"))
	release()
	for i, done := range sent {
		if err := <-done; err != nil {
			t.Errorf("entry %d under way: %v", i, err)
		}
	}
	for i, done := range waiting {
		var failed *ledger.AppendError
		if err := <-done; !errors.As(err, &failed) || failed.Outcome != ledger.NotWritten {
			t.Errorf("call %d behind them is told %v", i, err)
		}
	}
}

// A call that is split fails as a whole when the beginning of it fails: nothing of it is stored behind what is missing.
func TestASplitCallThatFailsLeavesNoEnd(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.SetDraining(0, true)
	f.Hold = make(chan struct{})
	l := f.open(f.Takeover(), statelog.Config{})
	value := strings.Repeat("v", statelog.MaxValue)
	split := start(t, l, rec("a", 1, "0", value), rec("a", 1, "1", value), rec("a", 1, "2", value[:100<<10]))
	other := start(t, l, rec("b", 1, "k", "v"))
	f.Placed = func() { f.SetDraining(0, false) } // after the first attempt
	close(f.Hold)
	var failed *ledger.AppendError
	if err := <-split; !errors.As(err, &failed) || failed.Outcome != ledger.NotWritten {
		t.Errorf("told %v", err)
	}
	<-other //nolint:errcheck // either will do
	put(t, l, rec("c", 1, "k", "v"))
	for key := range state(t, l) {
		if strings.HasPrefix(key, "a/") {
			t.Errorf("%s is stored", key)
		}
	}
}

// The replies to deletions of ledgers are lost: the log knows its size all the same, and stays bounded.
func TestLostRepliesToDeletionsAreNotCounted(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	f.lostReplies.Store(5)
	clock := atomic.Int64{}
	env := statelog.Env{Chain: f.Env(), Now: func() time.Time { return time.UnixMilli(clock.Add(1000)) }}
	const floor = 512 << 10
	l, err := statelog.Open(t.Context(), env, f.Takeover(), bundle, statelog.Config{FloorBytes: floor})
	check(t, err)
	t.Cleanup(l.Shutdown)
	value := strings.Repeat("v", 2000)
	// How often the log is shortened meanwhile depends on how fast that goes.
	total := int64(0)
	for i := 0; i < 1000 || i < 10_000 && (f.lostReplies.Load() >= 0 || l.Rewriting() || total > floor); i++ {
		put(t, l, rec("a", 1, strconv.Itoa(i%10), value))
		total, _ = l.Size()
	}
	if n := f.lostReplies.Load(); n >= 0 {
		t.Fatalf("%d replies were not lost", n)
	}
	stored := int64(0)
	for _, r := range l.Chain().Runs() {
		stored += r.Bytes
	}
	if total, _ := l.Size(); total != stored || total > floor {
		t.Fatalf("%d bytes are stored, the log says %d; allowed are %d", stored, total, floor)
	}
}

// Takeovers alone do not make the log longer and longer to read.
func TestLedgersAreFewAfterManyTakeovers(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	want := map[string]string{}
	for i := range 60 {
		key, value := strconv.Itoa(i%7), strconv.Itoa(i)
		put(t, l, rec("a", 1, key, value), rec("b", 1, strconv.Itoa(i), "v"))
		want["a/1/"+key], want["b/1/"+strconv.Itoa(i)] = value, "v"
		eventually(t, "the log to be shortened", func() bool { return len(l.Chain().Runs()) <= 26 })
		l = f.open(f.Takeover(), statelog.Config{})
	}
	if got := state(t, l); !maps.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
}

// An entry that no bookie can give refuses the owners of what it holds, and nobody else; once it can be read again,
// nothing is missing, and what was deleted since stays so.
func TestAnUnreadableEntryRefusesItsOwnersAlone(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	large := strings.Repeat("v", 300)
	put(t, l, rec("a", 1, "k", "old"), rec("b", 1, "k", "old"), rec("c", 1, "k", "old"))
	put(t, l, rec("a", 1, "k", large), rec("a", 1, "gone", "x"), rec("b", 1, "k", "new")) // entry 1
	put(t, l, rec("c", 1, "k", "new"), rec("d", 1, "k", "new"))
	put(t, l, del("a", 1, "gone"), rec("e", 1, "k", "new"))
	ledger1 := l.Chain().Runs()[0].Ledger
	f.unreadable(ledger1, 1)
	l = f.open(f.Takeover(), statelog.Config{})
	refused := func(owner string) {
		t.Helper()
		var missing *statelog.UnreadableError
		if _, err := l.Load(t.Context(), owner); !errors.As(err, &missing) || missing.Owner != owner ||
			missing.Position != (entry.Position{Ledger: ledger1, Entry: 1}) {
			t.Fatalf("%s: %v", owner, err)
		}
	}
	loads := func(owner string, want ...statelog.Record) {
		t.Helper()
		got, err := l.Load(t.Context(), owner)
		check(t, err)
		if !slices.EqualFunc(got, want, func(a, b statelog.Record) bool {
			return a.Owner == b.Owner && string(a.Key) == string(b.Key) && string(a.Value) == string(b.Value)
		}) {
			t.Fatalf("%s: %v", owner, got)
		}
	}
	refused("a")
	refused("b")
	loads("c", rec("c", 1, "k", "new"))
	loads("d", rec("d", 1, "k", "new"))
	loads("nobody")
	// The log goes on, for those too; an owner that goes for good leaves nothing to refuse.
	put(t, l, rec("c", 1, "k", "newer"), rec("b", 1, "later", "1"))
	refused("b")
	gone := make(chan error, 1)
	check(t, l.DeleteOwner(t.Context(), "b", func(err error) { gone <- err }))
	check(t, <-gone)
	loads("b")
	refused("a")
	// The next owner finds the same.
	l.Shutdown()
	l = f.open(f.Takeover(), statelog.Config{})
	refused("a")
	loads("b")
	loads("c", rec("c", 1, "k", "newer"))
	put(t, l, rec("e", 1, "k", "newer"))
	// A bookie is back.
	f.readable()
	loads("a", rec("a", 1, "k", large))
	loads("b")
	loads("c", rec("c", 1, "k", "newer"))
	loads("e", rec("e", 1, "k", "newer"))
}

// An entry that could not be read for a while keeps the log from being shortened for that while, even if nobody ever asks
// for the state in it.
func TestAnUnreadableEntryIsReadOnceTheLogIsToBeShortened(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	const floor = 256 << 10
	l := f.open(f.Takeover(), statelog.Config{FloorBytes: floor})
	put(t, l, rec("idle", 1, "k", "old"))
	put(t, l, rec("idle", 1, "k", "new")) // entry 1
	put(t, l, rec("a", 1, "k", "v"))
	f.unreadable(l.Chain().Runs()[0].Ledger, 1)
	l = f.open(f.Takeover(), statelog.Config{FloorBytes: floor})
	f.readable()
	value := strings.Repeat("v", 2000)
	// When it is shortened meanwhile depends on how fast that goes.
	total := int64(0)
	for i := 0; i < 1000 || i < 10_000 && total > floor; i++ {
		put(t, l, rec("a", 1, strconv.Itoa(i%10), value))
		total, _ = l.Size()
	}
	if total > floor {
		t.Fatalf("the log has %d bytes, allowed are %d", total, floor)
	}
	if got, err := l.Load(t.Context(), "idle"); err != nil || len(got) != 1 || string(got[0].Value) != "new" {
		t.Fatal(got, err)
	}
}

// While an entry cannot be read, nothing that is older than what it holds is given up: nobody knows what that is.
func TestALogIsNotShortenedPastWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	const floor = 64 << 10
	l := f.open(f.Takeover(), statelog.Config{FloorBytes: floor})
	put(t, l, rec("idle", 1, "k", "old"))
	put(t, l, rec("idle", 1, "k", "new")) // entry 1
	put(t, l, rec("a", 1, "k", "v"))
	first := l.Chain().Runs()[0].Ledger
	f.unreadable(first, 1)
	l = f.open(f.Takeover(), statelog.Config{FloorBytes: floor})
	value := strings.Repeat("v", 2000)
	for i := range 100 {
		put(t, l, rec("a", 1, strconv.Itoa(i%10), value))
	}
	eventually(t, "an attempt to shorten it", func() bool { return !l.Rewriting() })
	if got := l.Chain().Runs()[0].Ledger; got != first {
		t.Fatalf("the log begins with ledger %v, and entry 1 of ledger %v was never read", got, first)
	}
	f.readable()
	if got, err := l.Load(t.Context(), "idle"); err != nil || len(got) != 1 || string(got[0].Value) != "new" {
		t.Fatal(got, err)
	}
}

// While nothing tells whose state is missing, the log is not opened: nobody's is taken for complete.
func TestUnreadableEntriesThatNothingTellsOfKeepTheLogShut(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	for i := range 4 {
		put(t, l, rec("a", 1, strconv.Itoa(i), "v"))
	}
	ledger1 := l.Chain().Runs()[0].Ledger
	check(t, l.Close(t.Context()))
	for _, missing := range [][]entry.EntryID{{3}, {1, 2}} {
		f.unreadable(ledger1, missing...)
		if _, err := statelog.Open(t.Context(), statelog.Env{Chain: f.Env()}, f.Takeover(), bundle, statelog.Config{}); err == nil {
			t.Fatalf("opened without entries %v", missing)
		}
		f.readable()
	}
	l = f.open(f.Takeover(), statelog.Config{})
	if got := state(t, l); len(got) != 4 {
		t.Fatalf("%v", got)
	}
}

// Entries that fail are not those before: what the next one names is what is stored before it.
func TestWhatIsNamedIsWhatIsStoredBefore(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "k", "v"))
	check(t, l.Close(t.Context()))
	f.SetDraining(0, true)
	l = f.open(f.Takeover(), statelog.Config{})
	if err := <-start(t, l, rec("b", 1, "k", "v")); err == nil {
		t.Fatal("stored without bookies")
	}
	f.SetDraining(0, false)
	put(t, l, rec("c", 1, "k", "v"))
	f.unreadable(l.Chain().Runs()[0].Ledger, 0)
	l = f.open(f.Takeover(), statelog.Config{})
	var missing *statelog.UnreadableError
	if _, err := l.Load(t.Context(), "a"); !errors.As(err, &missing) {
		t.Fatal(err)
	}
	for _, owner := range []string{"b", "c"} {
		_, err := l.Load(t.Context(), owner)
		check(t, err)
	}
}

// A log that is replayed beside itself misses nothing of what is stored meanwhile.
func TestReplayBesideAppends(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "k", "v"))
	put(t, l, rec("b", 1, "k", "v"))
	f.unreadable(l.Chain().Runs()[0].Ledger, 0)
	l = f.open(f.Takeover(), statelog.Config{})
	f.readable()
	var wg sync.WaitGroup
	want := map[string]string{"a/1/k": "v", "b/1/k": "v"}
	for w := range 4 {
		wg.Go(func() {
			for i := range 50 {
				put(t, l, rec(fmt.Sprint("o", w), 1, strconv.Itoa(i%7), strconv.Itoa(i)))
				if i == 20 {
					_, err := l.Load(t.Context(), "a")
					check(t, err)
				}
			}
		})
	}
	wg.Wait()
	for w := range 4 {
		for i := 43; i < 50; i++ {
			want[fmt.Sprintf("o%d/1/%d", w, i%7)] = strconv.Itoa(i)
		}
	}
	if got := state(t, l); !maps.Equal(got, want) {
		t.Fatalf("live %v, want %v", got, want)
	}
	l = f.open(f.Takeover(), statelog.Config{})
	if got := state(t, l); !maps.Equal(got, want) {
		t.Fatalf("replayed %v, want %v", got, want)
	}
}

// What is stored when a replay beside the log is at its end, and not yet in its place, is in the log as anything, and
// what is under way then overrides what is written again.
func TestWhatIsStoredAsAReplayEnds(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	l := f.open(f.Takeover(), statelog.Config{})
	put(t, l, rec("a", 1, "k", "old"), rec("b", 1, "gone", "v"), rec("c", 1, "k", "old"), rec("c", 1, "other", "v"))
	var update <-chan error
	var release func()
	check(t, l.Replay(t.Context(), func() {
		put(t, l, rec("a", 1, "k", "new"), del("b", 1, "gone"))
		release = f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
		update = start(t, l, rec("c", 1, "k", "new"))
	}))
	want := map[string]string{"a/1/k": "new", "c/1/k": "old", "c/1/other": "v"}
	if got := state(t, l); !maps.Equal(got, want) {
		t.Fatalf("live %v, want %v", got, want)
	}
	last := l.LastOwners()
	check(t, l.Replay(t.Context(), func() {})) // goes by what is stored alone
	if got := l.LastOwners(); len(got) != 2 || !slices.Equal(last, got) {
		t.Fatalf("the last entry is of %v, and was taken to be of %v", got, last)
	}
	rewritten := make(chan error, 1)
	go func() { rewritten <- l.RewriteOldest() }()
	eventually(t, "the rewrite to be handed in", func() bool { return l.Gathered() == 2 })
	release()
	check(t, <-update)
	check(t, <-rewritten)
	want["c/1/k"] = "new"
	for _, how := range []string{"live", "replayed"} {
		if got := state(t, l); !maps.Equal(got, want) {
			t.Fatalf("%s %v, want %v", how, got, want)
		}
		l = f.open(f.Takeover(), statelog.Config{})
	}
}
