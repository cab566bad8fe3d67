package bookie

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func TestJudgeTable(t *testing.T) {
	t.Parallel()
	const grace = 10 * time.Minute
	now := time.Unix(1_700_000_000, 0)
	other := entry.UUID{9}
	here, gone := Local{Stored: true, Entries: 5}, Local{}
	on := func(state meta.LedgerState, u entry.UUID) meta.Ledger {
		l := openLedger(1, other, u)
		l.State = state
		return l
	}
	intent := on(meta.LedgerClosed, other)
	intent.Pending = []meta.ReplicaIntent{{Target: me.Storage}}
	confirmed := on(meta.LedgerDeleting, me.Storage)
	confirmed.DeletedOn = []entry.StorageUUID{me.Storage}
	tombstone := meta.Ledger{ID: 1, State: meta.LedgerDeleting}
	long := Sighting{At: now.Add(-grace), Entries: 5}
	for name, c := range map[string]struct {
		here Local
		l    meta.Ledger
		err  error
		seen Sighting
		want Verdict
	}{
		"open, mine":                          {here, on(meta.LedgerOpen, me.Storage), nil, long, Keep},
		"open, another's":                     {here, on(meta.LedgerOpen, other), nil, long, Keep},
		"in recovery, another's":              {here, on(meta.LedgerInRecovery, other), nil, long, Keep},
		"closed, mine":                        {here, on(meta.LedgerClosed, me.Storage), nil, long, Keep},
		"closed, a repair copies to here":     {here, intent, nil, long, Keep},
		"closed, another's, first time":       {here, on(meta.LedgerClosed, other), nil, Sighting{}, Watch},
		"closed, another's, too soon":         {here, on(meta.LedgerClosed, other), nil, Sighting{At: now.Add(-grace + 1), Entries: 5}, Watch},
		"closed, another's, entries came":     {here, on(meta.LedgerClosed, other), nil, Sighting{At: now.Add(-grace), Entries: 4}, Watch},
		"closed, another's, twice":            {here, on(meta.LedgerClosed, other), nil, long, Delete},
		"closed, another's, nothing here":     {gone, on(meta.LedgerClosed, other), nil, long, Keep},
		"deleting, mine":                      {here, on(meta.LedgerDeleting, me.Storage), nil, Sighting{}, Delete},
		"deleting, another's":                 {here, on(meta.LedgerDeleting, other), nil, Sighting{}, Delete},
		"tombstone":                           {here, tombstone, nil, Sighting{}, Delete},
		"deleting, nothing here, unconfirmed": {gone, on(meta.LedgerDeleting, me.Storage), nil, Sighting{}, Confirm},
		"deleting, nothing here, confirmed":   {gone, confirmed, nil, Sighting{}, Keep},
		"deleting, confirmed, here again":     {here, confirmed, nil, Sighting{}, Delete},
		"no record":                           {here, meta.Ledger{}, meta.ErrNotFound, long, Quarantine},
		"no record, nothing here":             {gone, meta.Ledger{}, meta.ErrNotFound, long, Keep},
		"etcd away":                           {here, meta.Ledger{}, meta.ErrUnavailable, long, Skip},
		"damaged record":                      {here, meta.Ledger{}, &meta.CorruptRecordError{}, long, Skip},
	} {
		if got := Judge(me.Storage, c.here, c.l, c.err, c.seen, now, grace); got != c.want {
			t.Errorf("%s: verdict %d, want %d", name, got, c.want)
		}
	}
}

// shelf is a store and its metadata, in memory.
type shelf struct {
	records
	cluster   entry.UUID
	stored    map[entry.LedgerID]int64
	placed    []entry.LedgerID
	placedErr error
	confirmed []entry.LedgerID
	deleteErr error
	revision  int64
	unmarked  bool // the index does not say what is being deleted
	reads     int
	raises    int
	raiseErr  error
}

func (s *shelf) RaiseRestoreGeneration(context.Context) error {
	s.raises++
	return s.raiseErr
}

func (s *shelf) GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
	s.reads++
	return s.records.GetLedger(ctx, id)
}

// collector makes one over s that reads as fast as it can.
func (s *shelf) collector(fs vfs.FS) *Collector {
	return NewCollector(GCConfig{ReadsPerSecond: 1e9}, me, s, s, fs, revisionName, quiet(), nil)
}

func newShelf() *shelf {
	return &shelf{
		records: records{all: make(map[entry.LedgerID]meta.Ledger)}, cluster: me.Cluster, stored: make(map[entry.LedgerID]int64),
	}
}

func (s *shelf) GetCluster(context.Context) (meta.ClusterInfo, error) {
	return meta.ClusterInfo{UUID: s.cluster}, nil
}

func (s *shelf) Holdings(context.Context, entry.StorageUUID) (meta.Holdings, error) {
	h := meta.Holdings{Revision: s.revision, Ledgers: s.placed}
	for _, id := range s.placed {
		if s.all[id].State == meta.LedgerDeleting && !s.unmarked {
			h.Deleting = append(h.Deleting, id)
		}
	}
	return h, s.placedErr
}

func (s *shelf) Revision(context.Context) (int64, error) { return s.revision, nil }

func (s *shelf) ConfirmDeleted(_ context.Context, id entry.LedgerID, _ entry.StorageUUID) error {
	s.confirmed = append(s.confirmed, id)
	return nil
}

func (s *shelf) Ledgers(yield func(ledgerstore.LedgerInfo) bool) {
	for id, n := range s.stored {
		if !yield(ledgerstore.LedgerInfo{Ledger: id, Entries: n}) {
			return
		}
	}
}

func (s *shelf) Ledger(id entry.LedgerID) (ledgerstore.LedgerInfo, bool) {
	n, ok := s.stored[id]
	return ledgerstore.LedgerInfo{Ledger: id, Entries: n}, ok
}

func (s *shelf) Mark(entry.LedgerID) uint64 { return 0 }

func (s *shelf) DeleteLedger(_ context.Context, id entry.LedgerID, _ uint64) error {
	if s.deleteErr == nil {
		delete(s.stored, id)
	}
	return s.deleteErr
}

func (s *shelf) left() []entry.LedgerID {
	var ids []entry.LedgerID
	for id := range s.stored {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// standing is a clock that stands still.
type standing struct {
	sched.Scheduler
	at time.Time
}

func (s *standing) Now() time.Time { return s.at }

func closedElsewhere(id entry.LedgerID) meta.Ledger {
	l := openLedger(id, entry.UUID{9})
	l.State = meta.LedgerClosed
	return l
}

func TestCollectorDeletesWhatMayGo(t *testing.T) {
	t.Parallel()
	s := newShelf()
	for id := entry.LedgerID(1); id <= 5; id++ {
		s.stored[id] = 3
	}
	s.set(openLedger(1, me.Storage))
	s.set(meta.Ledger{ID: 2, State: meta.LedgerDeleting, Fragments: openLedger(2, me.Storage).Fragments})
	s.set(meta.Ledger{ID: 3, State: meta.LedgerDeleting})
	s.set(closedElsewhere(4))
	// 5 has no record. 6 is not stored, its deletion waits for this bookie.
	s.set(meta.Ledger{ID: 6, State: meta.LedgerDeleting, Fragments: openLedger(6, me.Storage).Fragments})
	s.placed = []entry.LedgerID{1, 2, 6}
	c := s.collector(vfs.NewMem())
	clock := &standing{Scheduler: sched.Real, at: time.Unix(0, 0)}
	c.sched = clock

	p, err := c.Pass(t.Context())
	if err != nil || p != (Pass{Deleted: 2, Quarantined: 1}) {
		t.Fatalf("%+v %v", p, err)
	}
	if got := s.left(); !slices.Equal(got, []entry.LedgerID{1, 4, 5}) {
		t.Fatalf("left %v", got)
	}
	if !slices.Equal(s.confirmed, []entry.LedgerID{2, 6}) {
		t.Fatalf("confirmed %v", s.confirmed)
	}
	clock.at = clock.at.Add(9 * time.Minute)
	if _, err := c.Pass(t.Context()); err != nil || len(s.left()) != 3 {
		t.Fatalf("within the grace time: left %v, %v", s.left(), err)
	}
	clock.at = clock.at.Add(time.Minute)
	if _, err := c.Pass(t.Context()); err != nil || !slices.Equal(s.left(), []entry.LedgerID{1, 5}) {
		t.Fatalf("after the grace time: left %v, %v", s.left(), err)
	}
}

func TestCollectorForgetsASightingThatWasContradicted(t *testing.T) {
	t.Parallel()
	s := newShelf()
	s.stored[4] = 3
	s.set(closedElsewhere(4))
	c := s.collector(vfs.NewMem())
	clock := &standing{Scheduler: sched.Real, at: time.Unix(0, 0)}
	c.sched = clock
	pass := func() {
		t.Helper()
		if _, err := c.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
		clock.at = clock.at.Add(11 * time.Minute)
	}
	pass()
	mine := closedElsewhere(4)
	mine.Pending = []meta.ReplicaIntent{{Target: me.Storage}}
	s.set(mine)
	pass()
	s.set(closedElsewhere(4))
	pass()
	if len(s.left()) != 1 {
		t.Fatal("deleted at the first sighting after it was this bookie's")
	}
	pass()
	if len(s.left()) != 0 {
		t.Fatal("not deleted at the second")
	}
}

// overtaken is a store and its metadata, in which something happens as soon as a pass has read what is here, or the
// record, of a ledger: before it can act on that.
type overtaken struct {
	Collection
	Records
	counted, read func()
}

func (o *overtaken) Ledger(id entry.LedgerID) (ledgerstore.LedgerInfo, bool) {
	defer o.counted()
	return o.Collection.Ledger(id)
}

func (o *overtaken) GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
	defer o.read()
	return o.Records.GetLedger(ctx, id)
}

// A repair begins after a pass has read that the ledger is not this bookie's, and copies to here what is here already:
// what was acknowledged to it is counted on from then on, and stays.
func TestCollectorKeepsWhatARepairCountsOn(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"as the record is read", "after the entries are counted"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, ServerConfig{})
			repair := func() bookiewire.Code {
				a := makeAdd(1, 0, "x")
				a.Recovery = true
				return r.add(a)
			}
			s := newShelf()
			o := &overtaken{Collection: r.store, Records: s, counted: func() {}, read: func() {}}
			c := NewCollector(GCConfig{ReadsPerSecond: 1e9}, me, o, o, vfs.NewMem(), revisionName, quiet(), nil)
			clock := &standing{Scheduler: sched.Real, at: time.Unix(0, 0)}
			c.sched = clock
			pass := func(want Pass) {
				t.Helper()
				if p, err := c.Pass(t.Context()); err != nil || p != want {
					t.Fatalf("%+v %v, want %+v", p, err, want)
				}
				clock.at = clock.at.Add(c.cfg.Grace)
			}
			r.want("add", r.add(makeAdd(1, 0, "x")), bookiewire.OK)
			s.set(closedElsewhere(1))
			pass(Pass{})
			copied := func() {
				intent := closedElsewhere(1)
				intent.Pending = []meta.ReplicaIntent{{Target: me.Storage}}
				s.set(intent)
				r.want("repair's add", repair(), bookiewire.OK)
			}
			if when == "as the record is read" {
				o.read = copied
			} else {
				o.counted = copied
			}
			pass(Pass{Postponed: 1})
			o.counted, o.read = func() {}, func() {}
			if _, code := r.read(bookiewire.Read{Ledger: 1, Stride: 1, MaxEntries: 1, MaxBytes: 1}); code != bookiewire.OK {
				t.Fatalf("what the repair was acknowledged is read: %s", code)
			}
			// The repair comes to nothing: the ledger goes, after another grace time.
			pass(Pass{})
			s.set(closedElsewhere(1))
			pass(Pass{})
			pass(Pass{Deleted: 1})
		})
	}
}

// An error, a partial answer or another cluster's metadata delete nothing.
func TestCollectorDeletesNothingInDoubt(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(*shelf){
		"other cluster":  func(s *shelf) { s.cluster = entry.UUID{1} },
		"listing fails":  func(s *shelf) { s.placedErr = meta.ErrUnavailable },
		"reading fails":  func(s *shelf) { s.err = meta.ErrUnavailable },
		"store is stuck": func(s *shelf) { s.deleteErr = errors.New("disk error") },
	} {
		s := newShelf()
		s.stored[3] = 1
		s.set(meta.Ledger{ID: 3, State: meta.LedgerDeleting})
		change(s)
		if _, err := s.collector(vfs.NewMem()).Pass(t.Context()); err == nil {
			t.Errorf("%s: no error", what)
		}
		if len(s.left()) != 1 || len(s.confirmed) != 0 {
			t.Errorf("%s: left %v, confirmed %v", what, s.left(), s.confirmed)
		}
	}
	// A record that cannot be understood is skipped, the others are not.
	s := newShelf()
	s.stored[3] = 1
	s.err = &meta.CorruptRecordError{Key: "k", Err: errors.New("bad")}
	p, err := s.collector(vfs.NewMem()).Pass(t.Context())
	if err != nil || p.Skipped != 1 || len(s.left()) != 1 {
		t.Fatalf("%+v %v", p, err)
	}
}

func TestCollectorCapsAPass(t *testing.T) {
	t.Parallel()
	s := newShelf()
	for id := entry.LedgerID(1); id <= 200; id++ {
		s.stored[id] = 1
		s.set(meta.Ledger{ID: id, State: meta.LedgerDeleting})
	}
	c := s.collector(vfs.NewMem())
	p, err := c.Pass(t.Context())
	if err != nil || p.Deleted != 50 || p.Postponed != 150 || len(s.left()) != 150 {
		t.Fatalf("%+v %v", p, err)
	}
	for len(s.left()) > 0 {
		if p, err = c.Pass(t.Context()); err != nil || p.Deleted == 0 {
			t.Fatalf("%+v %v", p, err)
		}
	}
}

// Whoever sees that etcd was restored has it give ledger ids above those it has forgotten, once, and not in another cluster's.
func TestCollectorRaisesTheRestoreGeneration(t *testing.T) {
	t.Parallel()
	s := newShelf()
	fs := vfs.NewMem()
	s.revision = 100
	c := s.collector(fs)
	if _, err := c.Pass(t.Context()); err != nil || s.raises != 0 {
		t.Fatalf("%d times without need, %v", s.raises, err)
	}
	s.revision, s.cluster = 50, entry.UUID{77}
	if err := c.Look(t.Context()); err == nil || s.raises != 0 {
		t.Fatalf("%d times of another cluster, %v", s.raises, err)
	}
	s.cluster, s.raiseErr = me.Cluster, meta.ErrUnavailable
	if err := c.Look(t.Context()); !errors.Is(err, meta.ErrUnavailable) {
		t.Fatal(err)
	}
	s.raiseErr = nil
	for range 3 {
		var back *wentBackError
		if err := c.Look(t.Context()); !errors.As(err, &back) || s.raises != 2 {
			t.Fatalf("%d times, %v", s.raises, err)
		}
	}
	if err := s.collector(fs).Look(t.Context()); err == nil || s.raises != 3 {
		t.Fatalf("%d times after a restart, %v", s.raises, err)
	}
}

// An etcd that was restored from an older copy says of deletions what is no longer true: garbage collection ends until
// somebody has looked, however far that etcd gets and however often the bookie is started.
func TestCollectorStopsWhenEtcdWentBack(t *testing.T) {
	t.Parallel()
	s := newShelf()
	s.stored[3] = 1
	s.set(openLedger(3, me.Storage))
	fs := vfs.NewMem()
	for s.revision = 100; s.revision < 105; s.revision++ {
		if _, err := s.collector(fs).Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s.set(meta.Ledger{ID: 3, State: meta.LedgerDeleting})
	s.revision = 103
	stopped := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "103 after 104") || !strings.Contains(err.Error(), revisionName) || len(s.left()) != 1 {
			t.Fatalf("%s: left %v, %v", what, s.left(), err)
		}
	}
	stopped("after a restart", s.collector(fs).Look(t.Context()))
	s.revision = 1000
	c := s.collector(fs)
	_, err := c.Pass(t.Context())
	stopped("when it has caught up", err)
	stopped("look", c.Look(t.Context()))
	if valueOf(c.metrics.stopped) != 1 {
		t.Fatal("no metric says so")
	}
	if err := fs.Remove(revisionName); err != nil {
		t.Fatal(err)
	}
	if p, err := s.collector(fs).Pass(t.Context()); err != nil || p.Deleted != 1 {
		t.Fatalf("after somebody looked: %+v %v", p, err)
	}
}

// A pass does not read every record: with many ledgers here it is the index that says what is due. What the index does
// not say is found all the same, in turn.
func TestCollectorReadsWhatIsDue(t *testing.T) {
	t.Parallel()
	s := newShelf()
	const ledgers = 10_000
	for id := entry.LedgerID(1); id <= ledgers; id++ {
		s.stored[id] = 1
		s.set(openLedger(id, me.Storage))
		s.placed = append(s.placed, id)
	}
	remove := func(id entry.LedgerID) {
		l := openLedger(id, me.Storage)
		l.State = meta.LedgerDeleting
		s.set(l)
	}
	remove(7000)
	s.stored[ledgers+1] = 1
	s.set(meta.Ledger{ID: ledgers + 1, State: meta.LedgerDeleting})
	c := s.collector(vfs.NewMem())
	p, err := c.Pass(t.Context())
	if err != nil || p.Deleted != 2 || s.reads > sweepPerPass+2 {
		t.Fatalf("%+v with %d reads, %v", p, s.reads, err)
	}
	s.unmarked = true
	remove(ledgers)
	remove(1)
	for range ledgers/sweepPerPass + 1 {
		if _, err := c.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.left()) != ledgers-3 {
		t.Fatalf("%d ledgers left", len(s.left()))
	}
}

func TestRevisionFile(t *testing.T) {
	t.Parallel()
	checkDocumented(t, "bookie-revision", seenRevision{highest: 1234567, back: 0x1000}.encode())
	// Whatever a power cut leaves of a write, the file holds the revision before it or the one after it.
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		fs := vfs.NewMem()
		highest := int64(0)
		for range 6 {
			r := newRevisions(fs, revisionName)
			rev := highest + 1 + rng.Int64N(3)
			cut := rng.IntN(14)
			fs.CutPowerAfter(cut)
			err := r.note(rev)
			if err == nil {
				err = r.save()
			}
			fs.Crash(rng)
			again := newRevisions(fs, revisionName)
			if err := again.load(); err != nil {
				t.Fatalf("seed %d, power cut after %d operations: %v", seed, cut, err)
			}
			if got := again.seen; got.back != 0 || got.highest != rev && (got.highest != highest || err == nil) {
				t.Fatalf("seed %d, power cut after %d operations: %+v, was %d, noted %d", seed, cut, got, highest, rev)
			}
			highest = again.seen.highest
		}
	}
	// A file that nobody can read may have said anything.
	fs := vfs.NewMem()
	r := newRevisions(fs, revisionName)
	if err := errors.Join(r.note(5), r.save()); err != nil {
		t.Fatal(err)
	}
	f, err := fs.Open(revisionName)
	if err != nil {
		t.Fatal(err)
	}
	for _, slot := range []int64{0, secondSlot} {
		if err := newRevisions(fs, revisionName).note(5); err != nil {
			t.Fatalf("one slot damaged: %v", err)
		}
		if _, err := f.WriteAt([]byte{0xff}, slot+20); err != nil {
			t.Fatal(err)
		}
	}
	if err := newRevisions(fs, revisionName).note(6); !errors.Is(err, errRevision) {
		t.Fatalf("both slots damaged: %v", err)
	}
}

func FuzzRevision(f *testing.F) {
	f.Add(seenRevision{highest: 7}.encode())
	f.Add(seenRevision{highest: 7, back: 3}.encode())
	f.Add([]byte("PNSTREVN"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRevision(b)
		if err == nil && !bytes.Equal(r.encode()[:16], b[:16]) && b[10] == 0 {
			t.Fatalf("%x decodes to %+v", b, r)
		}
	})
}
