package broker

import (
	"context"
	"time"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// While a bookie is marked, open ledgers are told to leave it again every leaveEvery: there may have been nowhere to go. No
// more than leaveAtOnce are told in a leavePause, since each that leaves takes two transactions.
const (
	leaveEvery  = 3 * time.Second
	leaveAtOnce = 16
	leavePause  = 20 * time.Millisecond
)

// followMarks has open ledgers leave the bookies that are marked, those too to which nothing is appended.
func (b *Broker) followMarks(ctx context.Context) {
	marked := false
	for {
		changed := b.deps.Cache.Changed(meta.KindBookies)
		before := marked
		if marked = len(b.deps.Cache.Marks()) > 0; marked || before { // who was to leave may stay now
			b.tellWriters(ctx)
		}
		var again <-chan time.Time
		var timer *time.Timer
		if marked {
			timer = time.NewTimer(leaveEvery)
			again = timer.C
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again:
		}
		if timer != nil {
			timer.Stop()
		}
		if !sleep(ctx, 5*leavePause) { // many changes, one look
			return
		}
	}
}

// tellWriters has the writer of each open ledger look at the bookies.
func (b *Broker) tellWriters(ctx context.Context) {
	told := 0
	tell := func(c *chain.Chain) bool {
		c.CandidatesChanged()
		told++
		return told%leaveAtOnce != 0 || sleep(ctx, leavePause)
	}
	for _, u := range b.all() {
		select {
		case <-u.stateReady:
			if !tell(u.state.Chain()) {
				return
			}
		default:
		}
		for _, t := range u.opened() {
			if !tell(t.log.Chain()) {
				return
			}
		}
	}
}
