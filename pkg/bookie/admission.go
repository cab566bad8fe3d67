package bookie

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Admit decides whether an add may create a ledger on the bookie me, given the ledger's record as it was after the
// add arrived: a writer's if the ledger is open, the nonce is the writer's and the last fragment names me; a
// recovery's if that very recovery is under way, or a repair is copying to me, or makes anew what I should have: an entry of
// a fragment that names me and that no writer and no recovery writes any more. It returns nil, or why not.
func Admit(l meta.Ledger, me entry.StorageUUID, a *bookiewire.Add) *bookiewire.Error {
	if a.Recovery {
		if l.State == meta.LedgerInRecovery && l.Term == a.Term {
			return nil
		}
		for _, intent := range l.Pending {
			if l.State != meta.LedgerDeleting && intent.Target == me {
				return nil
			}
		}
		if mends(l, me, a.Entry) {
			return nil
		}
		return notAdmitted("no recovery of term and no repair to here is under way, ledger is " + l.State.String())
	}
	switch {
	case l.State != meta.LedgerOpen:
		return notAdmitted("ledger is " + l.State.String())
	case l.Nonce != a.Nonce:
		return notAdmitted("ledger is another writer's")
	case len(l.Fragments) == 0 || !names(l.Fragments[len(l.Fragments)-1], me):
		return notAdmitted("this bookie is not in the ledger's last fragment")
	}
	return nil
}

// mends reports whether an entry belongs to a settled fragment of which me is a member.
func mends(l meta.Ledger, me entry.StorageUUID, e entry.EntryID) bool {
	if l.State == meta.LedgerDeleting || l.State == meta.LedgerClosed && e > l.Last {
		return false
	}
	for i := len(l.Fragments) - 1; i >= 0; i-- {
		if f := l.Fragments[i]; f.First <= e {
			return names(f, me) && (i < len(l.Fragments)-1 || l.State == meta.LedgerClosed)
		}
	}
	return false
}

func names(f meta.Fragment, me entry.StorageUUID) bool {
	return slices.ContainsFunc(f.Slots, func(s meta.Slot) bool { return s.UUID == me })
}

func notAdmitted(why string) *bookiewire.Error {
	return &bookiewire.Error{Code: bookiewire.NotAdmitted, Detail: why}
}

// admissions holds the adds for ledgers that the store does not know while their metadata are read. Per ledger one
// read is under way at a time, and decides about the adds that came before it began; later ones wait for the
// next, so that each is decided by metadata as they were after it arrived. An add whose ledger became known
// meanwhile goes on all the same: its generation is from before the read.
//
// Ledgers take turns, and a bounded number of reads is under way: whoever sends adds for ledgers that do not exist
// must not turn each into a request to etcd of its own. How many adds wait is bounded by the budget that each is
// charged to.
type admissions struct {
	s       *Server
	ledgers Ledgers
	ctx     context.Context    // of the reads
	stop    context.CancelFunc // nobody is asked any more: what waits was not stored
	wg      sync.WaitGroup

	mu sync.Mutex
	// waiting has a key per ledger that is queued or whose metadata are being read.
	waiting map[entry.LedgerID][]*pendingAdd
	queue   []entry.LedgerID
	readers int
}

// enqueue takes an add whose Generation was read before. It does not block.
func (a *admissions) enqueue(x *pendingAdd) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ledger := x.Ledger
	_, known := a.waiting[ledger]
	a.waiting[ledger] = append(a.waiting[ledger], x)
	if known {
		return
	}
	a.queue = append(a.queue, ledger)
	if a.readers < a.s.cfg.MaxAdmissions {
		a.readers++
		a.wg.Go(a.run)
	}
}

// next returns the ledger whose turn it is and the adds to decide about; false ends the reader.
func (a *admissions) next() (entry.LedgerID, []*pendingAdd, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.queue) == 0 {
		a.queue = nil
		a.readers--
		return 0, nil, false
	}
	ledger := a.queue[0]
	a.queue = a.queue[1:]
	round := a.waiting[ledger]
	a.waiting[ledger] = nil
	return ledger, round, true
}

// done puts a ledger for which more adds came during the read at the end of the queue, and forgets another one.
func (a *admissions) done(ledger entry.LedgerID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting[ledger]) > 0 {
		a.queue = append(a.queue, ledger)
		return
	}
	delete(a.waiting, ledger)
}

func (a *admissions) run() {
	for {
		ledger, round, ok := a.next()
		if !ok {
			return
		}
		a.decide(ledger, round)
		a.done(ledger)
	}
}

func (a *admissions) decide(ledger entry.LedgerID, round []*pendingAdd) {
	var l meta.Ledger
	var err error
	// With etcd away whoever has waited for a turn that long is not made to wait anew.
	switch newest := round[len(round)-1]; {
	case a.ctx.Err() != nil:
		err = errors.New("bookie is stopping")
	case time.Since(newest.started) >= a.s.cfg.MetadataTimeout:
		err = errors.New("too many ledgers are waited for")
	default:
		ctx, cancel := context.WithTimeout(a.ctx, a.s.cfg.MetadataTimeout)
		l, err = a.ledgers.GetLedger(ctx, ledger)
		cancel()
		a.s.metrics.admissionReads.Inc()
	}
	for _, x := range round {
		switch {
		case errors.Is(err, meta.ErrNotFound):
			x.conclude(notAdmitted("ledger does not exist"))
		case err != nil:
			x.conclude(&bookiewire.Error{Code: bookiewire.Unknown, Detail: "metadata cannot be read: " + err.Error()})
		default:
			if refusal := Admit(l, a.s.me.Storage, &x.Add.Add); refusal != nil {
				x.conclude(refusal)
			} else {
				a.s.store.Add(&x.Add)
			}
		}
	}
}
