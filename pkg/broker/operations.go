package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/operation"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

const (
	// operationsRole is that of the broker which runs operations.
	operationsRole = "operations"
	// operationsEvery is the time between two looks at operations that run, operationsIdle between two looks for some.
	operationsEvery = time.Second
	operationsIdle  = 5 * time.Second
	// operationsRest is at least the pause after a look, in times that it took: a bookie may have so many ledgers that listing them,
	// again and again, would keep etcd busy. operationsRestMost bounds it.
	operationsRest     = 9
	operationsRestMost = 30 * time.Second
	// operationPatience bounds one look at them.
	operationPatience = time.Minute
	// keptOperations is how many that are over are remembered.
	keptOperations = 100
	// confirmAtOnce bounds the deletions that are confirmed in one look.
	confirmAtOnce = 256
	// repairsSeen bounds the repairs that are looked through for reasons.
	repairsSeen = 10_000
)

// operator runs the operations of the cluster while this broker has the role. All it knows is in metadata: it may end at any
// time, and another one goes on.
type operator struct {
	b       *Broker
	cores   map[string]*running
	publish latencyWindow
}

// running is an operation under way.
type running struct {
	core    operation.Core
	settled map[entry.LedgerID]operation.Left // ledgers that are closed
	failure string                            // logged last
}

// runOperations runs operations until ctx ends.
func (b *Broker) runOperations(ctx context.Context) {
	o := &operator{b: b, cores: map[string]*running{}, publish: latencyWindow{of: b.metrics.publishSeconds}}
	for {
		changed := b.deps.Cache.Changed(meta.KindOperations)
		pause, rest := operationsIdle, operationsEvery/4 // many changes, one look
		if o.pending() {
			began := time.Now()
			o.look(ctx)
			pause, rest = operationsEvery, max(rest, min(operationsRest*time.Since(began), operationsRestMost))
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-changed:
		}
		timer.Stop()
		if !sleep(ctx, rest) {
			o.release(ctx)
			return
		}
	}
}

// pending reports whether there is anything to run, or to forget.
func (o *operator) pending() bool {
	over := 0
	for _, op := range o.b.deps.Cache.Operations() {
		if !op.Over() {
			return true
		}
		over++
	}
	return over > keptOperations
}

// release lets another broker go on at once.
func (o *operator) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = o.b.deps.Meta.ReleaseRole(ctx, operationsRole, o.b.deps.Session.ID()) // its lease ends, too
}

// look takes the role, if it is to be had, and every operation a step further.
func (o *operator) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, operationPatience)
	defer cancel()
	if mine, err := o.b.deps.Meta.ClaimRole(ctx, operationsRole, o.b.cfg.Self.ID, o.b.deps.Session.ID()); err != nil || !mine {
		return // meta logs that etcd is away, and the session that its lease is
	}
	p99 := o.publish.p99(time.Now())
	all := o.b.deps.Cache.Operations()
	over := 0
	for i := len(all) - 1; i >= 0; i-- {
		op := all[i]
		if !op.Over() {
			o.run(ctx, op.ID, p99)
			continue
		}
		delete(o.cores, op.ID)
		if over++; over > keptOperations {
			_ = o.b.deps.Meta.ForgetOperation(ctx, op) // or the next time
		}
	}
}

// run takes one operation a step further. What fails is tried again.
func (o *operator) run(ctx context.Context, id string, p99 time.Duration) {
	r := o.cores[id]
	if r == nil {
		r = &running{settled: map[entry.LedgerID]operation.Left{}}
		o.cores[id] = r
	}
	failure := ""
	if err := o.step(ctx, id, r, p99); err != nil && ctx.Err() == nil {
		failure = err.Error()
	}
	if failure != r.failure && failure != "" {
		o.b.log.Warn("operation does not go on; trying again", "operation", id, "error", failure)
	}
	r.failure = failure
}

func (o *operator) step(ctx context.Context, id string, r *running, p99 time.Duration) error {
	m := o.b.deps.Meta
	op, err := m.GetOperation(ctx, id)
	if err != nil || op.Over() {
		return ignoring(err, meta.ErrNotFound)
	}
	cookie, err := m.GetCookie(ctx, op.Bookie)
	if errors.Is(err, meta.ErrNotFound) || err == nil && cookie.UUID != op.UUID {
		op.State, op.Ended, op.Error = meta.OperationFailed, time.Now(), fmt.Sprintf("bookie %s no longer has storage %s", op.Bookie, op.UUID)
		_, err = m.EndOperation(ctx, op)
		return ignoring(err, meta.ErrConflict)
	}
	if err != nil {
		return err //nolint:wrapcheck // it says what of
	}
	survey, err := o.survey(ctx, op, r)
	survey.P99 = p99
	if err != nil {
		return err
	}
	d := r.core.Step(op, survey)
	for i, l := range d.Confirm {
		if i == confirmAtOnce {
			break
		}
		if err := m.ConfirmDeleted(ctx, l, op.UUID); err != nil {
			return err //nolint:wrapcheck // it names the ledger
		}
	}
	next := op
	switch {
	case d.Finish:
		next, err = m.FinishOperation(ctx, d.Op)
		err = ignoring(err, meta.ErrNotEmpty)
	case d.Write:
		next, err = m.UpdateOperation(ctx, d.Op)
	}
	if err == nil && next.State != op.State {
		o.b.log.Info("operation goes on", "operation", op.ID, "kind", op.Kind, "bookie", op.Bookie, "storage", op.UUID, "state", next.State,
			"ledgers", next.LedgersLeft, "open", next.OpenLeft, "bytes", next.BytesLeft)
	}
	return ignoring(err, meta.ErrConflict) // somebody paused it, or runs it too: the next look sees that
}

func ignoring(err, kind error) error {
	if errors.Is(err, kind) {
		return nil
	}
	return err
}

// survey finds out what names the bookie still, linearizably, and what is known of it.
func (o *operator) survey(ctx context.Context, op meta.Operation, r *running) (operation.Survey, error) {
	m := o.b.deps.Meta
	s := operation.Survey{Runner: o.b.cfg.Self.ID}
	_, s.Up = o.b.deps.Cache.Bookie(op.UUID)
	held, err := m.Holdings(ctx, op.UUID)
	if err != nil {
		return s, err //nolint:wrapcheck // it says what of
	}
	repairs, err := m.ListRepairs(ctx, 0, repairsSeen)
	if err != nil {
		return s, err //nolint:wrapcheck // it says what of
	}
	stuck := map[entry.LedgerID]string{}
	for _, k := range repairs.Repairs {
		stuck[k.Ledger] = k.Stuck
	}
	deleting := map[entry.LedgerID]bool{}
	for _, l := range held.Deleting {
		deleting[l] = true
	}
	settled := map[entry.LedgerID]operation.Left{}
	var unknown []entry.LedgerID
	for _, id := range held.Ledgers {
		if left, ok := r.settled[id]; ok && !deleting[id] {
			settled[id] = left
		} else if !deleting[id] {
			unknown = append(unknown, id)
		}
	}
	open := map[entry.LedgerID]operation.Left{}
	names := o.b.chainNames()
	err = o.b.eachLedger(ctx, unknown, func(l meta.Ledger) {
		left := operation.Left{Ledger: l.ID, Bytes: operation.BytesOn(l, op.UUID), Open: operation.OpenOn(l, op.UUID), Owner: names(l.Chain)}
		if l.State == meta.LedgerClosed {
			settled[l.ID] = left
		} else {
			open[l.ID] = left
		}
	})
	if err != nil {
		return s, err
	}
	r.settled = settled
	for _, id := range held.Ledgers {
		left, ok := settled[id]
		if !ok {
			if left, ok = open[id]; !ok && !deleting[id] {
				continue // deleted, or no longer there, since
			}
		}
		left.Ledger, left.Deleting, left.Stuck = id, deleting[id], stuck[id]
		s.Left = append(s.Left, left)
	}
	s.Now = time.Now()
	return s, nil
}

// eachLedger calls f with the records of the ledgers, which are sorted; of those that are gone it does not.
func (b *Broker) eachLedger(ctx context.Context, ids []entry.LedgerID, f func(meta.Ledger)) error {
	const page = 500
	for len(ids) > 0 {
		n := min(page, int(min(uint64(ids[len(ids)-1]-ids[0]), page))+1)
		all, err := b.deps.Meta.ListLedgers(ctx, ids[0]-1, n)
		if err != nil {
			return err //nolint:wrapcheck // it says what of
		}
		if len(all) == 0 {
			return nil
		}
		for _, l := range all {
			for len(ids) > 0 && ids[0] < l.ID {
				ids = ids[1:]
			}
			if len(ids) > 0 && ids[0] == l.ID {
				f(l)
				ids = ids[1:]
			}
		}
	}
	return nil
}

// chainNames returns a function that names chains for people: a topic or partition by its name. It looks through the topics
// once, when it is first needed.
func (b *Broker) chainNames() func(meta.ChainID) string {
	var topics map[entry.UUID]meta.Topic
	return func(c meta.ChainID) string {
		u, index, ok := c.Data()
		if !ok {
			return string(c)
		}
		if topics == nil {
			topics = map[entry.UUID]meta.Topic{}
			for _, ns := range b.deps.Cache.Namespaces() {
				for _, t := range b.deps.Cache.Topics(ns.Name) {
					topics[t.UUID] = t
				}
			}
		}
		t, ok := topics[u]
		switch {
		case !ok:
			return string(c)
		case t.Partitions == 0:
			return t.Name
		}
		name, err := topicname.Parse(t.Name)
		if err != nil {
			return string(c)
		}
		return name.WithPartition(index).String()
	}
}
