package bookie

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
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

// Arrival is an add between its arrival and its answer. It may be used again once it is answered.
type Arrival struct {
	// Add is the entry; its Generation and Done are those of the [Admissions] that takes it.
	ledgerstore.Add
	// For is whose it is.
	For Answerer

	retries int
	started time.Time
	done    func(error) // bound once
}

// Answerer is who waits for an [Arrival]'s answer. An interface, since two functions would be bound for each add.
type Answerer interface {
	// Answer is called once: nil after the entry is on disk, or why not. It must not block.
	Answer(err *bookiewire.Error)
	// Own is called before the add waits for what takes long, so that it can get bytes of its own.
	Own()
}

// Admissions decides about adds as they arrive: those of a ledger that the store knows go there at once, the others wait
// until the ledger's metadata are read. Per ledger one read is under way at a time, and decides about the adds that came
// before it began; later ones wait for the next, so that each is decided by metadata as they were after it arrived. An
// add whose ledger became known meanwhile goes on all the same: its generation is from before the read.
//
//	a := NewAdmissions(AdmissionConfig{Me: me, Store: store, Ledgers: metadata})
//	x.Add.Add, x.For = add, whose
//	a.Take(x)        // for each add; it does not wait
//	a.Stop()         // what waits is refused
//	a.Wait()
//
// Ledgers take turns, and a bounded number of reads is under way: whoever sends adds for ledgers that do not exist
// must not turn each into a request to etcd of its own. How many adds wait is bounded by the budget that each is
// charged to.
type Admissions struct {
	cfg  AdmissionConfig
	ctx  context.Context    // of the reads
	stop context.CancelFunc // nobody is asked any more: what waits was not stored
	run  *sched.Group

	mu sync.Mutex
	// waiting has a key per ledger that is queued or whose metadata are being read.
	waiting map[entry.LedgerID][]*Arrival
	queue   []entry.LedgerID
	readers int
}

// AdmissionConfig is what an [Admissions] works with. Me, Store and Ledgers are required.
type AdmissionConfig struct {
	// Me is the disk's identity.
	Me entry.StorageUUID
	// Store takes what is let in.
	Store interface {
		Admission(ledger entry.LedgerID) (known bool, generation uint64)
		Add(a *ledgerstore.Add)
	}
	// Ledgers reads the metadata.
	Ledgers Ledgers
	// MaxReads is how many ledgers' metadata are read at once; 64.
	MaxReads int
	// Timeout is how long an add waits for metadata; 5 s.
	Timeout time.Duration
	// OnRead is called before each read; it may be nil.
	OnRead func()
	// Sched runs the reads; nil is the real one.
	Sched sched.Scheduler
}

// maxRetries is how often an add is admitted anew when a fence or a deletion of another ledger voided it.
const maxRetries = 3

// NewAdmissions returns one that has nothing to decide.
func NewAdmissions(cfg AdmissionConfig) *Admissions {
	setDefault(&cfg.MaxReads, 64)
	setDefault(&cfg.Timeout, 5*time.Second)
	cfg.Sched = sched.OrReal(cfg.Sched)
	a := &Admissions{cfg: cfg, run: sched.NewGroup(cfg.Sched), waiting: make(map[entry.LedgerID][]*Arrival)}
	a.ctx, a.stop = context.WithCancel(context.Background())
	return a
}

// Take hands the add to the store, now or when it is let in, or has it refused. It does not wait.
func (a *Admissions) Take(x *Arrival) {
	if x.done == nil {
		x.done = func(err error) { a.finish(x, err) }
	}
	x.retries, x.started = 0, a.cfg.Sched.Now()
	x.Done = x.done
	var known bool
	if known, x.Generation = a.cfg.Store.Admission(x.Ledger); known {
		a.cfg.Store.Add(&x.Add)
		return
	}
	a.enqueue(x)
}

// Stop has whatever waits for metadata refused, now and from now on.
func (a *Admissions) Stop() { a.stop() }

// Wait returns once nothing is read any more.
func (a *Admissions) Wait() { a.run.Wait() }

// finish is the store's last word about an add. It must not block.
func (a *Admissions) finish(x *Arrival, err error) {
	if err == nil {
		x.For.Answer(nil)
		return
	}
	answer := bookiewire.AsError(err)
	if answer.Code == bookiewire.NotAdmitted && x.retries < maxRetries {
		x.retries++
		_, x.Generation = a.cfg.Store.Admission(x.Ledger)
		a.enqueue(x)
		return
	}
	x.For.Answer(answer)
}

// enqueue takes an add whose Generation was read before. It does not block.
func (a *Admissions) enqueue(x *Arrival) {
	x.For.Own()
	a.mu.Lock()
	defer a.mu.Unlock()
	ledger := x.Ledger
	_, known := a.waiting[ledger]
	a.waiting[ledger] = append(a.waiting[ledger], x)
	if known {
		return
	}
	a.queue = append(a.queue, ledger)
	if a.readers < a.cfg.MaxReads {
		a.readers++
		a.run.Go(a.read)
	}
}

// next returns the ledger whose turn it is and the adds to decide about; false ends the reader.
func (a *Admissions) next() (entry.LedgerID, []*Arrival, bool) {
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
func (a *Admissions) done(ledger entry.LedgerID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting[ledger]) > 0 {
		a.queue = append(a.queue, ledger)
		return
	}
	delete(a.waiting, ledger)
}

func (a *Admissions) read() {
	for {
		ledger, round, ok := a.next()
		if !ok {
			return
		}
		a.decide(ledger, round)
		a.done(ledger)
	}
}

func (a *Admissions) decide(ledger entry.LedgerID, round []*Arrival) {
	var l meta.Ledger
	var err error
	// With etcd away whoever has waited for a turn that long is not made to wait anew.
	switch newest := round[len(round)-1]; {
	case a.ctx.Err() != nil:
		err = errors.New("bookie is stopping")
	case a.cfg.Sched.Now().Sub(newest.started) >= a.cfg.Timeout:
		err = errors.New("too many ledgers are waited for")
	default:
		if a.cfg.OnRead != nil {
			a.cfg.OnRead()
		}
		ctx, cancel := a.cfg.Sched.WithTimeout(a.ctx, a.cfg.Timeout)
		l, err = a.cfg.Ledgers.GetLedger(ctx, ledger)
		cancel()
	}
	for _, x := range round {
		switch {
		case errors.Is(err, meta.ErrNotFound):
			x.For.Answer(notAdmitted("ledger does not exist"))
		case err != nil:
			x.For.Answer(&bookiewire.Error{Code: bookiewire.Unknown, Detail: "metadata cannot be read: " + err.Error()})
		default:
			if refusal := Admit(l, a.cfg.Me, &x.Add.Add); refusal != nil {
				x.For.Answer(refusal)
			} else {
				a.cfg.Store.Add(&x.Add)
			}
		}
	}
}
