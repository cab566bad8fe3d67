package sim

import (
	"context"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// bookieClient carries a broker's requests to bookies, as bookieclient.Client does, over links, for one life of the broker.
type bookieClient struct {
	b     *broker
	life  int
	links map[linkKey]*link
	// opened is all of links, in the order made.
	opened []*link
}

var _ ledger.Bookies = (*bookieClient)(nil)

// use is what a link is for; a bookie has one for each.
type use uint8

const (
	forAdds use = iota
	forReads
	forRecoveries
)

type linkKey struct {
	to  entry.StorageUUID
	use use
}

func newBookieClient(b *broker) *bookieClient {
	return &bookieClient{b: b, life: b.life, links: map[linkKey]*link{}}
}

func (c *bookieClient) link(to entry.StorageUUID, u use) *link {
	k := linkKey{to, u}
	l := c.links[k]
	if l == nil {
		l = &link{n: c.b.w.net, from: c.b, to: to, adds: u == forAdds}
		c.links[k] = l
		c.opened = append(c.opened, l)
	}
	return l
}

func (c *bookieClient) dead() bool { return c.life != c.b.life || !c.b.up }

// ask sends a request that ends with ctx at the latest.
func (c *bookieClient) ask(ctx context.Context, to entry.StorageUUID, u use, r *request) {
	if c.dead() {
		return
	}
	l := c.link(to, u)
	l.ask(r)
	r.ends = c.b.onEnd(ctx, func(err error) {
		l.drop(r)
		r.end(func() { r.fail(disconnected(err.Error())) })
	})
}

// Add implements ledger.Bookies.
func (c *bookieClient) Add(to entry.StorageUUID, a *bookiewire.Add, done func(error)) {
	if c.dead() {
		return
	}
	add := *a // which is the sender's again once it has failed
	c.b.w.ghost.sent(c.b, &add)
	c.link(to, forAdds).ask(&request{
		serve: func(k *bookieProcess, reply func(func())) {
			k.add(add, func(err error) { reply(func() { done(err) }) })
		},
		fail: func(e *bookiewire.Error) { done(e) },
	})
}

// Read implements ledger.Bookies.
func (c *bookieClient) Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error)) {
	u := forReads
	if r.Recovery {
		u = forRecoveries
	}
	c.ask(ctx, to, u, &request{
		serve: func(k *bookieProcess, reply func(func())) {
			k.read(r, func(got bookiewire.ReadReply, err error) { reply(func() { done(got, err) }) })
		},
		fail: func(e *bookiewire.Error) { done(bookiewire.ReadReply{}, e) },
	})
}

// Fence implements ledger.Bookies.
func (c *bookieClient) Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error)) {
	c.ask(ctx, to, forRecoveries, &request{
		serve: func(k *bookieProcess, reply func(func())) {
			k.fence(r, func(got bookiewire.FenceReply, err error) { reply(func() { done(got, err) }) })
		},
		fail: func(e *bookiewire.Error) { done(bookiewire.FenceReply{}, e) },
	})
}

// WriteLAC implements ledger.Bookies.
func (c *bookieClient) WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error {
	c.b.w.ghost.confirms(c.b, r.Ledger, r.LAC)
	c.b.w.ghost.claimed(c.b.name, r.Ledger, r.LAC)
	var answer error
	done := make(chan struct{}, ownCapacity)
	c.ask(ctx, to, forReads, &request{
		serve: func(k *bookieProcess, reply func(func())) {
			k.writeLAC(r, func(err error) {
				reply(func() {
					answer = err
					close(done)
					c.b.wakeWaiters(done)
				})
			})
		},
		fail: func(e *bookiewire.Error) {
			answer = e
			close(done)
			c.b.wakeWaiters(done)
		},
	})
	_, _ = c.b.sched.Wait(context.WithoutCancel(ctx), sched.Channels{done})
	return answer
}

// WaitLAC implements ledger.Bookies.
func (c *bookieClient) WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error) {
	var answer bookiewire.WaitLACReply
	var failure error
	done := make(chan struct{}, ownCapacity)
	c.ask(ctx, to, forReads, &request{
		serve: func(k *bookieProcess, reply func(func())) {
			k.waitLAC(r, func(got entry.EntryID) {
				reply(func() {
					answer.LAC = got
					close(done)
					c.b.wakeWaiters(done)
				})
			})
		},
		fail: func(e *bookiewire.Error) {
			failure = e
			close(done)
			c.b.wakeWaiters(done)
		},
	})
	_, _ = c.b.sched.Wait(context.WithoutCancel(ctx), sched.Channels{done})
	return answer, failure
}
