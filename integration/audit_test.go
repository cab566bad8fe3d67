package integration

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// metadata connects to etcd as a process of the cluster does.
func (w *town) metadata() *meta.Store {
	w.Helper()
	k, err := clientv3.New(clientv3.Config{Endpoints: w.c.Endpoints(), Logger: zap.NewNop()})
	w.check(err)
	w.Cleanup(func() { _ = k.Close() })
	return meta.New(k, "penstock", slog.New(slog.DiscardHandler))
}

// audit asks every bookie for every entry that it should hold, of all ledgers there are: topics' and state logs'. Copies
// are equal, and as many as the ledger's ack quorum, over as many zones as it demands; a copy counts as there where its
// bookie is gone. A reader would not notice that a copy is missing.
func (w *town) audit() {
	w.Helper()
	store := w.metadata()
	cluster, err := store.GetCluster(w.ctx)
	w.check(err)
	address := make(map[entry.StorageUUID]string)
	cookies, err := store.ListCookies(w.ctx)
	w.check(err)
	for _, c := range cookies {
		if p := w.c.Bookie(c.ID); p != nil && p.Running() && p != w.damaged {
			address[c.UUID] = p.Addr
		}
	}
	bookies := bookieclient.New(bookieclient.Config{Cluster: cluster.UUID}, func(u entry.StorageUUID) (string, bool) {
		a, ok := address[u]
		return a, ok
	}, slog.New(slog.DiscardHandler), nil)
	defer bookies.Close()
	ledgers, err := store.ListLedgers(w.ctx, 0, 10_000)
	w.check(err)
	entries, missing := 0, 0
	for _, l := range ledgers {
		if l.State == meta.LedgerDeleting {
			continue
		}
		a := ledgerAudit{ledger: l, copies: make(map[entry.EntryID]map[entry.StorageUUID]uint32)}
		w.check(a.collect(w.ctx, bookies, address))
		n, short, err := a.judge(address)
		if now, getErr := store.GetLedger(w.ctx, l.ID); err != nil && getErr == nil && now.State != meta.LedgerDeleting {
			w.Errorf("ledger %d of %v: %v", l.ID, l.Chain, err)
		}
		entries += n
		missing += short
	}
	if entries == 0 {
		w.Error("there are no entries to audit")
	}
	w.Logf("audited %d entries of %d ledgers; %d copies are missing", entries, len(ledgers), missing)
}

// fewLedgers fails the test when ledgers were made in a loop.
func (w *town) fewLedgers() {
	w.Helper()
	ledgers, err := w.metadata().ListLedgers(w.ctx, 0, 10_000)
	w.check(err)
	if len(ledgers) > 20 {
		w.Errorf("there are %d ledgers", len(ledgers))
	}
}

// ledgerAudit is what bookies hold of one ledger.
type ledgerAudit struct {
	ledger meta.Ledger
	last   entry.EntryID // what a reader may see
	copies map[entry.EntryID]map[entry.StorageUUID]uint32
}

// end is where fragment i ends, and what readers may see, exclusive.
func (a *ledgerAudit) end(i int) entry.EntryID {
	if i+1 < len(a.ledger.Fragments) {
		return min(a.last+1, a.ledger.Fragments[i+1].First)
	}
	return a.last + 1
}

func (a *ledgerAudit) collect(ctx context.Context, bookies *bookieclient.Client, address map[entry.StorageUUID]string) error {
	if a.ledger.State == meta.LedgerClosed {
		a.last = a.ledger.Last
	} else {
		a.last = entry.NoEntry
		f := a.ledger.Fragments[len(a.ledger.Fragments)-1]
		for _, s := range f.Slots { // whichever knows most
			if reply, err := readSome(ctx, bookies, s.UUID, a.ledger.ID, f.First); err == nil {
				a.last = max(a.last, reply.LAC)
			}
		}
	}
	for i, f := range a.ledger.Fragments {
		for _, s := range f.Slots {
			if address[s.UUID] == "" {
				continue
			}
			if err := a.read(ctx, bookies, s.UUID, f.First, a.end(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

func readSome(ctx context.Context, bookies *bookieclient.Client, from entry.StorageUUID, l entry.LedgerID, first entry.EntryID) (reply bookiewire.ReadReply, err error) {
	done := make(chan struct{})
	bookies.Read(ctx, from, bookiewire.Read{Ledger: l, First: first, Stride: 1, MaxEntries: 1000, MaxBytes: 1 << 20}, func(r bookiewire.ReadReply, e error) {
		reply, err = r, e
		close(done)
	})
	<-done
	return reply, err
}

// read notes what one bookie holds of a stretch.
func (a *ledgerAudit) read(ctx context.Context, bookies *bookieclient.Client, from entry.StorageUUID, first, end entry.EntryID) error {
	for e := first; e < end; {
		reply, err := readSome(ctx, bookies, from, a.ledger.ID, e)
		if err != nil {
			if !bookiewire.AsError(err).Code.Negative() {
				return fmt.Errorf("read entry %d of ledger %d from %v: %w", e, a.ledger.ID, from, err)
			}
			e++
			continue
		}
		for _, x := range reply.Entries {
			if entry.Checksum(a.ledger.ID, x.Entry, x.Body) != x.Checksum {
				return fmt.Errorf("entry %d of ledger %d from %v is damaged", x.Entry, a.ledger.ID, from)
			}
			if a.copies[x.Entry] == nil {
				a.copies[x.Entry] = make(map[entry.StorageUUID]uint32)
			}
			a.copies[x.Entry][from] = x.Checksum
			e = x.Entry + 1
		}
	}
	return nil
}

// judge counts the entries that readers may see, and the copies that are missing of them.
func (a *ledgerAudit) judge(address map[entry.StorageUUID]string) (entries, missing int, err error) {
	l := a.ledger
	for i, f := range l.Fragments {
		zones := make([]string, len(f.Slots))
		for s, slot := range f.Slots {
			zones[s] = slot.Zone
		}
		q, err := quorum.New(quorum.Config{Ensemble: l.Ensemble, WriteQuorum: l.WriteQuorum, AckQuorum: l.AckQuorum, MinZones: l.MinZones}, zones)
		if err != nil {
			return entries, missing, fmt.Errorf("fragment at %d: %w", f.First, err)
		}
		for e := f.First; e < a.end(i); e++ {
			entries++
			var there quorum.Set
			var sums []uint32
			q.WriteSet(e).Each(func(slot int) {
				u := f.Slots[slot].UUID
				sum, ok := a.copies[e][u]
				switch {
				case ok:
					sums = append(sums, sum)
				case address[u] == "":
				default:
					missing++
					return
				}
				there |= quorum.Of(slot)
			})
			slices.Sort(sums)
			if len(slices.Compact(sums)) > 1 {
				return entries, missing, fmt.Errorf("entry %d has copies that differ", e)
			}
			if !q.Valid(there) {
				return entries, missing, fmt.Errorf("entry %d of those up to %d has too few copies: slots %b of %v", e, a.last, there, f.Slots)
			}
		}
	}
	return entries, missing, nil
}

// The audit finds what it is there for.
func TestAuditFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	ids := []entry.StorageUUID{{1}, {2}, {3}}
	here := map[entry.StorageUUID]string{ids[0]: "a", ids[1]: "b", ids[2]: "c"}
	for name, c := range map[string]struct {
		copies map[entry.StorageUUID]uint32
		gone   []entry.StorageUUID
		zones  [3]string
		min    int
		bad    bool
	}{
		"three copies":               {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[1]: 1, ids[2]: 1}},
		"two copies":                 {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[2]: 1}},
		"one copy":                   {copies: map[entry.StorageUUID]uint32{ids[0]: 1}, bad: true},
		"one copy, one bookie gone":  {copies: map[entry.StorageUUID]uint32{ids[0]: 1}, gone: ids[1:2]},
		"copies that differ":         {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[1]: 2, ids[2]: 1}, bad: true},
		"two copies in one zone":     {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[1]: 1}, zones: [3]string{"x", "x", "y"}, min: 2, bad: true},
		"two copies in two of zones": {copies: map[entry.StorageUUID]uint32{ids[0]: 1, ids[2]: 1}, zones: [3]string{"x", "x", "y"}, min: 2},
	} {
		a := ledgerAudit{
			ledger: meta.Ledger{State: meta.LedgerClosed, Replication: meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2, MinZones: c.min}},
			copies: map[entry.EntryID]map[entry.StorageUUID]uint32{0: c.copies},
		}
		f := meta.Fragment{}
		for i, u := range ids {
			f.Slots = append(f.Slots, meta.Slot{UUID: u, Zone: c.zones[i]})
		}
		a.ledger.Fragments = []meta.Fragment{f}
		address := make(map[entry.StorageUUID]string)
		for u, a := range here {
			if !slices.Contains(c.gone, u) {
				address[u] = a
			}
		}
		if n, _, err := a.judge(address); n != 1 || (err != nil) != c.bad {
			t.Errorf("%s: %d entries, %v", name, n, err)
		}
	}
}
