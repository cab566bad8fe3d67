package bookie

import (
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/budget"
)

// readLimits bound reads over all connections.
type readLimits struct {
	bytes   *budget.Budget // of answers
	readers chan struct{}  // a place for each read that asks the store
}

func newReadLimits(cfg ServerConfig) readLimits {
	return readLimits{bytes: budget.New(cfg.ReadBytes), readers: make(chan struct{}, cfg.MaxReads)}
}

// readOverhead is what an entry in the answer to a read takes beside its body.
const readOverhead = 64

// request starts what a frame asks for. Its answer comes in any order.
func (c *conn) request(f bookiewire.Frame) error {
	switch f.Kind {
	case bookiewire.KindRead:
		r, err := f.Read()
		if err != nil {
			return err
		}
		return c.startRead(f.Seq, r)
	case bookiewire.KindFence:
		r, err := f.Fence()
		if err != nil {
			return err
		}
		return c.startFence(f.Seq, r)
	case bookiewire.KindWriteLAC:
		r, err := f.WriteLAC()
		if err != nil {
			return err
		}
		return c.startWriteLAC(f.Seq, r)
	case bookiewire.KindWaitLAC:
		r, err := f.WaitLAC()
		if err != nil {
			return err
		}
		return c.startWaitLAC(f.Seq, r)
	default:
		return fmt.Errorf("%w: frame of kind %d on a connection for requests", bookiewire.ErrMalformed, f.Kind)
	}
}

// take waits for one of the connection's slots and counts the request in flight. If the server has too many requests at
// work it answers instead, unless that is urgent, and reports false.
func (c *conn) take(op string, seq uint64, urgent bool) (bool, error) {
	select {
	case c.slots <- struct{}{}:
	case <-c.ctx.Done():
		return false, c.ctx.Err()
	}
	if err := c.begin(); err != nil {
		<-c.slots
		return false, err
	}
	if c.s.requests.Add(1) > int64(c.s.cfg.MaxAllRequests) && !urgent {
		c.answer(op, seq, &bookiewire.Error{Code: bookiewire.Overloaded, Detail: "too many requests are at work"}, c.give, nil)
		return false, nil
	}
	return true, nil
}

// give ends what take began; it is called when the answer is written, or cannot be.
func (c *conn) give() {
	c.s.requests.Add(-1)
	<-c.slots
}

// answer marks a request's answer: err, or what encode appends. release, if any, is called when it is written.
func (c *conn) answer(op string, seq uint64, err error, release func(), encode func(*bookiewire.Encoder)) {
	code := bookiewire.OK
	if err != nil {
		failure := bookiewire.AsError(err)
		code = failure.Code
		encode = func(e *bookiewire.Encoder) { e.Failed(seq, failure) }
	}
	c.s.metrics.answered(op, code)
	c.reply(reply{encode: encode, release: release})
}

// startRead reads on a goroutine of its own, within the budgets for answers.
func (c *conn) startRead(seq uint64, r bookiewire.Read) error {
	r.MaxEntries = min(r.MaxEntries, bookiewire.MaxReadEntries)
	r.MaxBytes = min(r.MaxBytes, bookiewire.MaxBody)
	if ok, err := c.take("read", seq, r.Recovery); !ok {
		return err
	}
	limits := c.s.reads
	if r.Recovery {
		limits = c.s.recovery
	}
	began := time.Now()
	go func() {
		reply, charged, err := c.carryOut(r, limits)
		if err == nil {
			c.s.metrics.read(charged-int64(len(reply.Entries))*readOverhead, time.Since(began))
		}
		c.answer("read", seq, err, func() {
			c.reads.Release(charged)
			limits.bytes.Release(charged)
			c.give()
		}, func(e *bookiewire.Encoder) { e.ReadReply(seq, reply) })
	}()
	return nil
}

// carryOut reads, and returns how many bytes of the budgets the reply holds. What is charged before is a guess: the
// first entry comes however large it is. So a read that has its turn looks again whether those before it were larger
// than guessed, and what a reply can hold beyond the budget is bounded by the number of reads at work.
func (c *conn) carryOut(r bookiewire.Read, limits readLimits) (reply bookiewire.ReadReply, charged int64, err error) {
	wanted := int64(max(r.MaxBytes, 64<<10))
	for {
		if err := c.reads.Acquire(c.ctx, wanted); err != nil {
			return reply, 0, err
		}
		select {
		case limits.readers <- struct{}{}:
		case <-c.ctx.Done():
			c.reads.Release(wanted)
			return reply, 0, c.ctx.Err()
		}
		if c.reads.Used() <= max(c.reads.Capacity(), wanted) {
			break
		}
		<-limits.readers
		c.reads.Release(wanted)
	}
	defer func() { <-limits.readers }()
	if err := limits.bytes.Acquire(c.ctx, wanted); err != nil {
		c.reads.Release(wanted)
		return reply, 0, err
	}
	reply, err = c.s.store.Read(c.ctx, r)
	if err == nil && len(reply.Entries) == 0 {
		panic("bookie: the store answered a read with nothing and no error")
	}
	for i := range reply.Entries {
		charged += int64(len(reply.Entries[i].Body)) + readOverhead
	}
	for _, b := range []*budget.Budget{c.reads, limits.bytes} {
		if charged > wanted {
			b.Exceed(charged - wanted)
		} else {
			b.Release(wanted - charged)
		}
	}
	return reply, charged, err
}

func (c *conn) startFence(seq uint64, r bookiewire.Fence) error {
	if ok, err := c.take("fence", seq, true); !ok {
		return err
	}
	c.s.store.Fence(r, func(reply bookiewire.FenceReply, err error) {
		c.answer("fence", seq, err, c.give, func(e *bookiewire.Encoder) { e.FenceReply(seq, reply) })
	})
	return nil
}

func (c *conn) startWriteLAC(seq uint64, r bookiewire.WriteLAC) error {
	if ok, err := c.take("write_lac", seq, false); !ok {
		return err
	}
	c.s.store.WriteLAC(r, func(err error) {
		c.answer("write_lac", seq, err, c.give, func(e *bookiewire.Encoder) { e.WriteLACReply(seq) })
	})
	return nil
}

// startWaitLAC waits on a goroutine of its own, without a slot: a reader at the tail waits most of its time.
func (c *conn) startWaitLAC(seq uint64, r bookiewire.WaitLAC) error {
	r.Timeout = min(r.Timeout, c.s.cfg.MaxWait)
	if err := c.begin(); err != nil {
		return err
	}
	if c.s.waits.Add(1) > int64(c.s.cfg.MaxWaits) {
		c.s.waits.Add(-1)
		c.answer("wait_lac", seq, &bookiewire.Error{Code: bookiewire.Overloaded, Detail: "too many wait for a LAC"}, nil, nil)
		return nil
	}
	go func() {
		reply, err := c.s.store.WaitLAC(c.ctx, r)
		c.s.waits.Add(-1)
		c.answer("wait_lac", seq, err, nil, func(e *bookiewire.Encoder) { e.WaitLACReply(seq, reply) })
	}()
	return nil
}
