// Package audit asks every bookie of a cluster for every entry that it should hold.
package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// maxLedgers bounds the ledgers of a cluster that is audited.
const maxLedgers = 10_000

// Metadata connects to a cluster's etcd, as its processes do. The caller calls done.
func Metadata(c *process.Cluster) (store *meta.Store, done func(), err error) {
	k, err := clientv3.New(clientv3.Config{Endpoints: c.Endpoints(), Logger: zap.NewNop()})
	if err != nil {
		return nil, nil, fmt.Errorf("connect to etcd: %w", err)
	}
	return meta.New(k, "penstock", slog.New(slog.DiscardHandler)), func() { _ = k.Close() }, nil
}

// Ledgers lists all there are.
func Ledgers(ctx context.Context, c *process.Cluster) ([]meta.Ledger, error) {
	store, done, err := Metadata(c)
	if err != nil {
		return nil, err
	}
	defer done()
	return store.ListLedgers(ctx, 0, maxLedgers)
}

// Summary is what there was.
type Summary struct {
	Entries, Ledgers int
	// Missing counts copies that are not there, although enough are.
	Missing int
}

// String tells all of it.
func (s Summary) String() string {
	return fmt.Sprintf("audited %d entries of %d ledgers; %d copies are missing", s.Entries, s.Ledgers, s.Missing)
}

// Run audits all ledgers there are, topics' and state logs'. Copies are equal, and as many as the ledger's ack quorum, over
// as many zones as it demands; anything else is an error. A copy counts as there where its bookie does not run, or is left
// out. A reader would not notice that a copy is missing.
func Run(ctx context.Context, c *process.Cluster, leftOut func(*process.Process) bool) (Summary, error) {
	var sum Summary
	store, done, err := Metadata(c)
	if err != nil {
		return sum, err
	}
	defer done()
	cluster, err := store.GetCluster(ctx)
	if err != nil {
		return sum, err
	}
	address := make(map[entry.StorageUUID]string)
	cookies, err := store.ListCookies(ctx)
	if err != nil {
		return sum, err
	}
	for _, k := range cookies {
		if p := c.Bookie(k.ID); p != nil && p.Running() && !leftOut(p) {
			address[k.UUID] = p.Addr
		}
	}
	//nolint:contextcheck // it lives until it is closed
	bookies := bookieclient.New(bookieclient.Config{Cluster: cluster.UUID}, func(u entry.StorageUUID) (string, bool) {
		a, ok := address[u]
		return a, ok
	}, slog.New(slog.DiscardHandler), nil)
	defer bookies.Close()
	ledgers, err := store.ListLedgers(ctx, 0, maxLedgers)
	if err != nil {
		return sum, err
	}
	var wrong []error
	for _, l := range ledgers {
		if l.State == meta.LedgerDeleting {
			continue
		}
		a := ledgerAudit{ledger: l, copies: make(map[entry.EntryID]map[entry.StorageUUID]uint32)}
		if err := a.collect(ctx, bookies, address); err != nil {
			return sum, err
		}
		n, missing, err := a.judge(address)
		if now, getErr := store.GetLedger(ctx, l.ID); err != nil && getErr == nil && now.State != meta.LedgerDeleting {
			wrong = append(wrong, fmt.Errorf("ledger %d of %v: %w", l.ID, l.Chain, err))
		}
		sum.Ledgers++
		sum.Entries += n
		sum.Missing += missing
	}
	if sum.Entries == 0 {
		wrong = append(wrong, errors.New("there are no entries to audit"))
	}
	return sum, errors.Join(wrong...)
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
