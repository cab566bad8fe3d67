package ledgerstore

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// lazy is a policy under which nothing is synced by itself.
func lazy() Config {
	cfg := small()
	cfg.Sync.Interval = 1000 * time.Hour
	return cfg
}

// killed is the disk of a store whose process ended without a word: what it wrote is in the kernel's cache.
func killed(fs *vfs.Mem) *vfs.Mem { return fs.Clone() }

// cut is the disk after a power cut that loses everything unsynced.
func cut(fs *vfs.Mem) *vfs.Mem {
	c := fs.Clone()
	c.Crash(nil)
	return c
}

// Under an interval policy what is acknowledged survives the process, and not the power; without one, both.
func TestLazySyncSurvivesAKillAlone(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{lazy(), small()} {
		fs := vfs.NewMem()
		s := openStore(t, cfg, fs)
		for e := range entry.EntryID(200) { // some segments
			must(t, add(s, 1, e, withBody(body(1, e, 900))))
		}
		for name, c := range map[string]struct {
			fs   *vfs.Mem
			kept bool
		}{"killed": {killed(fs), true}, "cut": {cut(fs), cfg.Sync.Interval == 0}} {
			after := openStore(t, small(), c.fs)
			if loss := after.Loss(); loss.All || len(loss.Ledgers) > 0 {
				t.Fatalf("%s: taken for damage: %+v", name, loss)
			}
			if _, err := readOne(after, 1, 199); (err == nil) != c.kept {
				t.Errorf("interval %v, %s: the last entry: %v", cfg.Sync.Interval, name, err)
			}
			closeStore(t, after)
		}
		closeStore(t, s)
		after := openStore(t, small(), cut(fs))
		if _, err := readOne(after, 1, 199); err != nil {
			t.Errorf("interval %v, closed and cut: %v", cfg.Sync.Interval, err)
		}
		closeStore(t, after)
	}
}

// After the interval, or when there are as many messages, all is on the disk.
func TestLazySyncIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg := lazy()
		cfg.Sync.Interval = time.Second
		fs := vfs.NewMem()
		s := openStore(t, cfg, fs)
		must(t, add(s, 1, 0))
		has := func(e entry.EntryID) bool {
			after := openStore(t, small(), cut(fs))
			defer closeStore(t, after)
			_, err := readOne(after, 1, e)
			return err == nil
		}
		if has(0) {
			t.Error("it is synced at once")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !has(0) {
			t.Error("it is not synced after the interval")
		}
		closeStore(t, s)
	})
	cfg := lazy()
	cfg.Sync.Messages = 10
	fs := vfs.NewMem()
	s := openStore(t, cfg, fs)
	for e := range entry.EntryID(35) {
		must(t, add(s, 1, e))
		after := cut(fs)
		lost := openStore(t, small(), after)
		if in, _ := lost.Ledger(1); e+1-entry.EntryID(in.Entries) >= 10 {
			t.Fatalf("%d of %d entries are synced", in.Entries, e+1)
		}
		closeStore(t, lost)
	}
	closeStore(t, s)
}

// lazyRun is random use of a store under a policy, and what was promised whatever the policy.
type lazyRun struct {
	*Store
	rng *rand.Rand

	mu      sync.Mutex
	wg      sync.WaitGroup
	hard    map[[2]int64]bool // by ledger and entry: acknowledged to a recovery
	term    map[entry.LedgerID]entry.Term
	asked   map[entry.LedgerID]entry.Term
	limbo   map[entry.LedgerID]bool
	deleted map[entry.LedgerID]bool
	next    map[entry.LedgerID]entry.EntryID
}

const lazyLedgers = 6

func (r *lazyRun) step() {
	l := entry.LedgerID(1 + r.rng.IntN(lazyLedgers))
	if r.deleted[l] {
		return
	}
	switch n := r.rng.IntN(20); {
	case n < 12:
		e := r.next[l]
		var opts []addOption
		if r.asked[l] > 0 {
			opts = append(opts, recoveryAdd(r.asked[l]))
		}
		r.next[l]++
		r.submit(l, e, opts...)
	case n < 15 && r.next[l] > 0: // a recovery writes again what is, or may be, there
		r.asked[l] += entry.Term(1 + r.rng.IntN(2))
		r.submit(l, entry.EntryID(r.rng.Int64N(int64(r.next[l]))), recoveryAdd(r.asked[l]))
	case n == 15 && r.asked[l] == 0 && r.next[l] > 0: // a repair does, of a ledger that nobody has fenced, right behind the writer
		e := r.next[l]
		r.next[l]++
		r.submit(l, e)
		r.submit(l, e, recoveryAdd(0))
		if e > 0 {
			r.submit(l, entry.EntryID(r.rng.Int64N(int64(e))), recoveryAdd(0))
		}
	case n == 16:
		r.asked[l]++
		r.wg.Add(1)
		term := r.asked[l]
		r.Fence(bookiewire.Fence{Ledger: l, Term: term}, func(_ bookiewire.FenceReply, err error) {
			defer r.wg.Done()
			r.mu.Lock()
			defer r.mu.Unlock()
			if err == nil {
				r.term[l] = max(r.term[l], term)
			}
		})
	case n == 17:
		r.asked[l] = max(r.asked[l], 1)
		if r.SetLimbo(r.ctx, l) == nil {
			r.limbo[l] = true
		}
	case n == 18 && r.rng.IntN(4) == 0:
		r.wg.Wait()
		r.deleted[l] = r.DeleteLedger(r.ctx, l, r.Mark(l)) == nil
	default:
		_, _ = r.CompactOnce(r.ctx)
	}
}

func (r *lazyRun) submit(l entry.LedgerID, e entry.EntryID, opts ...addOption) {
	opts = append(opts, withBody(body(l, e, 100+int(e)*37%1500)))
	r.wg.Add(1)
	var a *Add
	a = newAdd(r.Store, l, e, func(err error) {
		defer r.wg.Done()
		r.mu.Lock()
		defer r.mu.Unlock()
		if err == nil && a.Recovery {
			r.hard[[2]int64{int64(l), int64(e)}] = true
			r.term[l] = max(r.term[l], a.Term)
		}
	}, opts...)
	r.Add(a)
}

// check opens what a power cut has left: what others rest on is there. Once the ledgers are in limbo, nothing is denied.
func (r *lazyRun) check(fs *vfs.Mem) error {
	s, err := Open(r.ctx, small(), fs, quiet, nil)
	if err != nil {
		return err
	}
	defer s.Close()
	if loss := s.Loss(); loss.All || len(loss.Ledgers) > 0 {
		return fmt.Errorf("taken for damage: %+v", loss)
	}
	for at := range r.hard {
		l, e := entry.LedgerID(at[0]), entry.EntryID(at[1])
		if _, err := readOne(s, l, e); err != nil && !r.deleted[l] {
			return fmt.Errorf("a recovery's entry %d:%d: %w", l, e, err)
		}
	}
	for l := entry.LedgerID(1); l <= lazyLedgers; l++ {
		in, there := s.Ledger(l)
		switch {
		case r.deleted[l] && there:
			return fmt.Errorf("deleted ledger %d is there", l)
		case !r.deleted[l] && (in.Term < r.term[l] || r.limbo[l] && !in.Limbo):
			return fmt.Errorf("ledger %d: %+v, want term %d, limbo %t", l, in, r.term[l], r.limbo[l])
		}
		if r.deleted[l] {
			continue
		}
		if err := s.SetLimbo(r.ctx, l); err != nil {
			return err
		}
		for e := range r.next[l] + 3 {
			if _, err := readOne(s, l, e); err != nil && codeOf(err) != bookiewire.Unknown {
				return fmt.Errorf("entry %d:%d of a ledger in limbo: %w", l, e, err)
			}
		}
		if err := add(s, l, r.next[l]); codeOf(err) != bookiewire.Fenced {
			return fmt.Errorf("ledger %d in limbo takes a writer's add: %w", l, err)
		}
	}
	return nil
}

// Whatever the policy is, what others rest on is on the disk before it is acknowledged: fences, limbo, tombstones, and
// what recoveries count on, be it that a writer's add of the same entry came first. And in limbo nothing is denied.
func TestLazySyncKeepsWhatOthersRestOn(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		rng := newRand(seed)
		cfg := lazy()
		cfg.Sync.Messages = []int{0, 0, 7}[seed%3]
		fs := vfs.NewMem()
		r := &lazyRun{
			Store: openStore(t, cfg, fs), rng: rng, hard: map[[2]int64]bool{},
			term: map[entry.LedgerID]entry.Term{}, asked: map[entry.LedgerID]entry.Term{}, limbo: map[entry.LedgerID]bool{},
			deleted: map[entry.LedgerID]bool{}, next: map[entry.LedgerID]entry.EntryID{},
		}
		for range 10 + rng.IntN(150) {
			r.step()
			if rng.IntN(10) == 0 {
				r.wg.Wait()
			}
		}
		r.wg.Wait()
		for subset := range uint64(3) {
			after := fs.Clone()
			after.Crash([]*rand.Rand{nil, newRand(seed), newRand(seed + 1000)}[subset])
			if err := r.check(after); err != nil {
				t.Fatalf("seed %d, subset %d: %v", seed, subset, err)
			}
		}
		closeStore(t, r.Store)
	}
}

// A repair's write of an entry that a writer had acknowledged before is acknowledged once that is on the disk.
func TestLazySyncOfACopy(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	s := openStore(t, lazy(), fs)
	must(t, add(s, 1, 0))
	must(t, add(s, 1, 1))
	must(t, add(s, 1, 0, recoveryAdd(0)))
	after := openStore(t, small(), cut(fs))
	if _, err := readOne(after, 1, 0); err != nil {
		t.Error(err)
	}
}

// A fence is in the first group of a new segment, which is synced before anybody has looked at the sync of what was written before
// it, in the old one: that is on the disk with it.
func TestLazySyncOfAFenceAfterARoll(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	h, err := OpenByHand(small(), fs)
	must(t, err)
	h.lazy, h.core.lazy = newLazySync(lazy().Sync), true
	for e := range entry.EntryID(2) { // one fills more than half of a segment
		h.Store.Add(newAdd(h.Store, 1, e, func(error) {}, withBody(body(1, e, 20<<10))))
	}
	h.Fence(bookiewire.Fence{Ledger: 2, Term: 1}, func(bookiewire.FenceReply, error) {})
	for fresh := h.Tasks(); len(fresh) > 0; fresh = h.Tasks() {
		for _, task := range fresh {
			if task.Kind != TaskSync {
				h.Do(task)
			}
		}
	}
	groups := h.core.groups
	last := groups[len(groups)-1]
	if len(groups) != 2 || groups[0].Segment == last.Segment || groups[0].hard || !last.hard {
		t.Fatalf("%d groups, not one in the old segment and the fence in the new one", len(groups))
	}
	must(t, h.sync(last).Err)
	after := openStore(t, small(), cut(fs))
	if in, _ := after.Ledger(1); in.Entries != 2 {
		t.Errorf("%d entries of 2 are on the disk with the fence", in.Entries)
	}
	closeStore(t, after)
	h.Abandon()
}

// wide is a segment that has always room.
type wide struct{}

func (wide) Room(int, int64) bool { return true }

// A recovery's copy comes while the writer's entry is being written, or after its sync was left out: both wait for one.
func TestLazySyncOfACopyOnItsWay(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		c := NewCore(NewSegment(1, wide{}), 1<<20)
		c.lazy = true
		submit := func(opts ...addOption) {
			a := &Add{Add: bookiewire.Add{Ledger: 1, Body: []byte("x")}, Generation: 1, Done: func(error) {}}
			for _, o := range opts {
				o(a)
			}
			a.Checksum = entry.Checksum(1, 0, a.Body)
			c.Step(a)
		}
		submit()
		if !late {
			submit(recoveryAdd(0))
		}
		b := c.Ready().Append
		c.Step(&Written{Batch: b, Locations: make([]segment.Location, 1), End: 5000})
		if rd := c.Ready(); len(rd.Syncs) != 1 || rd.Syncs[0].hard == late {
			t.Fatalf("late %t: %+v", late, rd.Syncs)
		}
		if late {
			submit(recoveryAdd(0))
			c.Step(&Synced{Batch: b, Skipped: true})
			if rd := c.Ready(); len(rd.Syncs) != 1 || !rd.Syncs[0].hard || len(rd.Replies) > 0 {
				t.Fatalf("the copy is not waited for: %+v", rd)
			}
		}
		c.Step(&Synced{Batch: b})
		if rd := c.Ready(); len(rd.Replies) != 1 || rd.Replies[0].err != nil || rd.Replies[0].item.next == nil {
			t.Fatalf("late %t: %+v", late, rd.Replies)
		}
	}
}

// What a policy leaves out is never stated to be on the disk, so that its loss is not taken for damage; wherever the
// power goes, in or between segments, and whatever survives.
func TestLazySyncStatesNothingUntrue(t *testing.T) {
	t.Parallel()
	use := func(fs *vfs.Mem) {
		s, err := Open(t.Context(), lazy(), fs, quiet, nil)
		if err != nil {
			return
		}
		for e := range entry.EntryID(50) {
			_ = add(s, 1, e, withBody(body(1, e, 900)))
		}
		_ = s.Close()
	}
	whole := vfs.NewMem()
	use(whole)
	for n := 0; n <= whole.Changes(); n += sweepStep {
		fs := vfs.NewMem()
		fs.CutPowerAfter(n)
		use(fs)
		for subset := range uint64(4) {
			after := fs.Clone()
			after.Crash(newRand(uint64(n)*16 + subset))
			s := openStore(t, small(), after)
			if loss := s.Loss(); loss.All || len(loss.Ledgers) > 0 {
				t.Fatalf("cut after %d of %d changes, subset %d: taken for damage: %+v", n, whole.Changes(), subset, loss)
			}
			closeStore(t, s)
		}
	}
}

// A segment that compaction gives up may hold the only durable record of a LAC. The one that is written in its place is on the disk
// before the old one goes, whatever the policy leaves for later.
func TestLazySyncCarriesLACs(t *testing.T) {
	t.Parallel()
	for _, messages := range []int{0, 1000} {
		cfg := lazy()
		cfg.Sync.Messages = messages
		fs := vfs.NewMem()
		s := openStore(t, cfg, fs)
		must(t, add(s, 1, 0, withBody(body(1, 0, 100))))
		must(t, writeLAC(s, 1, 40))
		for e := range entry.EntryID(200) {
			must(t, add(s, 2, e, withBody(body(2, e, 900))))
		}
		must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
		for e := range entry.EntryID(100) { // the tombstone's segment is sealed, too
			must(t, add(s, 3, e, withBody(body(3, e, 900))))
		}
		waitSealed(s)
		first := s.segments.list()[0]
		if compactAll(t, s) <= 0 || s.segments.list()[0].path == first.path {
			t.Fatal("the first segment is not compacted")
		}
		after := openStore(t, small(), cut(fs))
		if in, ok := after.Ledger(1); !ok || in.LAC != 40 || in.Entries != 1 {
			t.Errorf("after a power cut: %+v", in)
		}
		closeStore(t, after)
	}
}
