package bookie

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Admit decides whether an add may create a ledger on the bookie me, given the ledger's record as it was after the
// add arrived: a writer's if the ledger is open, the nonce is the writer's and the last fragment names me; a
// recovery's if that very recovery is under way, or a repair is copying to me. It returns nil, or why not.
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
type admissions struct {
	s       *Server
	ledgers Ledgers
	wg      sync.WaitGroup

	mu sync.Mutex
	// waiting has a key per ledger with a goroutine in run.
	waiting map[entry.LedgerID][]*pendingAdd
}

// enqueue takes an add whose Generation was read before. It does not block.
func (a *admissions) enqueue(x *pendingAdd) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ledger := x.Ledger
	_, running := a.waiting[ledger]
	a.waiting[ledger] = append(a.waiting[ledger], x)
	if !running {
		a.wg.Go(func() { a.run(ledger) })
	}
}

func (a *admissions) run(ledger entry.LedgerID) {
	for {
		a.mu.Lock()
		round := a.waiting[ledger]
		if len(round) == 0 {
			delete(a.waiting, ledger)
			a.mu.Unlock()
			return
		}
		a.waiting[ledger] = nil
		a.mu.Unlock()

		ctx, cancel := context.WithTimeout(a.s.ctx, a.s.cfg.MetadataTimeout)
		l, err := a.ledgers.GetLedger(ctx, ledger)
		cancel()
		a.s.metrics.admissionReads.Inc()
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
}
