package bookie

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// staleRecords are the metadata of a ledger that was closed behind its writer's back.
type staleRecords struct{ *records }

func (s staleRecords) refuse(op string, id entry.LedgerID) (meta.Ledger, error) {
	l, err := s.GetLedger(context.Background(), id)
	if err != nil {
		return l, err
	}
	return meta.Ledger{}, &meta.LedgerStateError{Op: op, Current: l}
}

func (s staleRecords) ChangeEnsemble(_ context.Context, l meta.Ledger, _ []meta.Fragment) (meta.Ledger, error) {
	return s.refuse("change ensemble", l.ID)
}

func (s staleRecords) StartRecovery(ctx context.Context, id entry.LedgerID) (meta.Ledger, error) {
	return s.GetLedger(ctx, id)
}

// B23: all bookies of a ledger were decommissioned, its copies moved, and fresh bookies with empty disks are at the same addresses. A
// writer that has heard of none of it goes on: not one add is taken, and its close fails, so what it appends is unknown and never
// acknowledged.
func TestB23StaleWriterMeetsFreshBookies(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	old := []entry.StorageUUID{{0x91}, {0x92}, {0x93}}
	l := openLedger(7, old...)
	l.Last, l.Replication = entry.NoEntry, meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}
	r.records.set(openLedger(7, old...)) // as long as it is open, only the bookies' identity is in the way

	ticker := ledger.NewTicker(5 * time.Millisecond)
	t.Cleanup(ticker.Close)
	w := ledger.NewWriter(ledger.Env{
		Bookies: r.client, Metadata: staleRecords{r.records}, Ticker: ticker, Log: quiet(),
		Candidates: func() []ledger.Candidate { return nil },
		Config:     ledger.Config{RetryAfter: 5 * time.Millisecond, DrainTimeout: 50 * time.Millisecond},
	}, l)
	t.Cleanup(w.Shutdown)
	appended := make(chan error, 5)
	for range cap(appended) {
		w.Append([]byte("x"), ledger.AckQuorum, func(_ entry.EntryID, err error) { appended <- err })
	}
	refused := make(chan error, len(old))
	for _, u := range old {
		r.client.Add(u, makeAdd(7, 0, "x"), func(err error) { refused <- err })
		if err := <-refused; code(err) != bookiewire.Unknown {
			t.Fatalf("an add for %s: %v", u, err)
		}
		r.client.Read(t.Context(), u, bookiewire.Read{Ledger: 7, Stride: 1, MaxEntries: 1}, func(_ bookiewire.ReadReply, err error) { refused <- err })
		if err := <-refused; code(err) != bookiewire.Unknown { // a denial would count
			t.Fatalf("a read for %s: %v", u, err)
		}
	}
	closed := l
	closed.State, closed.Term, closed.Last = meta.LedgerClosed, 1, 3
	closed.Fragments = []meta.Fragment{{Slots: []meta.Slot{{UUID: entry.UUID{0x61}}, {UUID: entry.UUID{0x62}}, {UUID: entry.UUID{0x63}}}}}
	r.records.set(closed)
	if _, err := w.CloseWith(t.Context(), func(_ context.Context, last entry.EntryID, _ int64) (meta.Ledger, error) {
		if last != entry.NoEntry {
			t.Errorf("the writer has confirmed up to %d", last)
		}
		return staleRecords{r.records}.refuse("close", 7)
	}); err == nil {
		t.Error("the stale writer has closed the ledger")
	}
	for range cap(appended) {
		var e *ledger.AppendError
		if err := <-appended; !errors.As(err, &e) || e.Outcome != ledger.Unknown {
			t.Errorf("an append ended with %v", err)
		}
	}
	if _, known := r.store.Ledger(7); known {
		t.Fatal("stored under another identity")
	}
}

// B23 at the bookie itself: it does not rely on its peers to notice that it is not the one they look for, nor, once they know, on them to
// leave alone a ledger that does not name it.
func TestB23FreshBookieRefusesByItself(t *testing.T) {
	t.Parallel()
	r := newRig(t, ServerConfig{})
	old := entry.StorageUUID{0x91}
	r.records.set(openLedger(7, old))
	for _, use := range []bookiewire.Use{bookiewire.UseAdds, bookiewire.UseRequests} {
		c := r.dial()
		b, err := bookiewire.AppendHello(nil, bookiewire.Hello{
			MinVersion: bookiewire.Version, MaxVersion: bookiewire.Version, Use: use, Cluster: me.Cluster, Storage: old,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		w, err := bookiewire.ReadWelcome(c)
		if err != nil || w.Code != bookiewire.Unknown || w.Storage != me.Storage {
			t.Fatalf("a peer that looks for %s is told %+v, %v", old, w, err)
		}
		expectEnd(t, "wrong identity", c)
	}
	r.want("an add of a ledger that names the one before", r.add(makeAdd(7, 0, "x")), bookiewire.NotAdmitted)
	if _, known := r.store.Ledger(7); known {
		t.Fatal("stored, though the ledger names another identity")
	}
}
