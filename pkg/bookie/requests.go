package bookie

import (
	"fmt"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
)

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

// take waits for a slot and counts the request in flight.
func (c *conn) take() error {
	select {
	case c.slots <- struct{}{}:
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
	if err := c.begin(); err != nil {
		<-c.slots
		return err
	}
	return nil
}

func (c *conn) give() { <-c.slots }

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

// startRead reads on a goroutine of its own, within the budget for answers.
func (c *conn) startRead(seq uint64, r bookiewire.Read) error {
	r.MaxEntries = min(r.MaxEntries, bookiewire.MaxReadEntries)
	r.MaxBytes = min(r.MaxBytes, bookiewire.MaxBody)
	charge := int64(max(r.MaxBytes, 64<<10))
	if err := c.take(); err != nil {
		return err
	}
	go func() {
		if err := c.s.reads.Acquire(c.ctx, charge); err != nil {
			c.answer("read", seq, &bookiewire.Error{Code: bookiewire.Unknown, Detail: err.Error()}, c.give, nil)
			return
		}
		reply, err := c.s.store.Read(c.ctx, r)
		if err == nil && len(reply.Entries) == 0 {
			panic("bookie: the store answered a read with nothing and no error")
		}
		c.answer("read", seq, err, func() {
			c.s.reads.Release(charge)
			c.give()
		}, func(e *bookiewire.Encoder) { e.ReadReply(seq, reply) })
	}()
	return nil
}

func (c *conn) startFence(seq uint64, r bookiewire.Fence) error {
	if err := c.take(); err != nil {
		return err
	}
	c.s.store.Fence(r, func(reply bookiewire.FenceReply, err error) {
		c.answer("fence", seq, err, c.give, func(e *bookiewire.Encoder) { e.FenceReply(seq, reply) })
	})
	return nil
}

func (c *conn) startWriteLAC(seq uint64, r bookiewire.WriteLAC) error {
	if err := c.take(); err != nil {
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
	c.mu.Lock()
	surplus := c.waits >= c.s.cfg.MaxWaits
	if !surplus {
		c.waits++
	}
	c.mu.Unlock()
	if surplus {
		c.answer("wait_lac", seq, &bookiewire.Error{Code: bookiewire.Overloaded, Detail: "too many waits on this connection"}, nil, nil)
		return nil
	}
	go func() {
		reply, err := c.s.store.WaitLAC(c.ctx, r)
		c.mu.Lock()
		c.waits--
		c.mu.Unlock()
		c.answer("wait_lac", seq, err, nil, func(e *bookiewire.Encoder) { e.WaitLACReply(seq, reply) })
	}()
	return nil
}
