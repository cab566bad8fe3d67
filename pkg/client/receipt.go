package client

import (
	"context"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Receipt is the outcome of one PublishAsync, once there is one. It is safe for concurrent use.
type Receipt struct {
	msg  *Message
	ctx  context.Context // it bounds the message's life, which this is
	size int

	settled bool // guarded by the producer's lock

	done      chan struct{}
	partition int
	offset    entry.Offset
	position  entry.Position
	duplicate bool
	err       error
}

// Done is closed when the outcome is known.
func (r *Receipt) Done() <-chan struct{} { return r.done }

// Wait returns the outcome, or the context's error if that ends first. Giving up to wait does not stop the
// message: the context it was published with does.
func (r *Receipt) Wait(ctx context.Context) (MessageID, error) {
	select {
	case <-r.done:
		return r.result()
	default:
	}
	select {
	case <-r.done:
		return r.result()
	case <-ctx.Done():
		return MessageID{}, timeoutError("wait for receipt", "", causeOf(ctx))
	}
}

// Duplicate tells, once the receipt is done, whether the message had been stored by an earlier attempt. Its
// MessageID is not known then.
func (r *Receipt) Duplicate() bool {
	select {
	case <-r.done:
		return r.duplicate
	default:
		return false
	}
}

func (r *Receipt) result() (MessageID, error) {
	if r.err != nil {
		return MessageID{}, r.err
	}
	return MessageID{Partition: r.partition, Offset: r.offset, Position: r.position}, nil
}

func (o *outcome) deliver() {
	r := o.receipt
	r.offset, r.position, r.duplicate, r.err = o.offset, o.position, o.duplicate, o.err
	r.msg, r.ctx = nil, nil
	close(r.done)
}

func failedReceipt(err error) *Receipt {
	r := &Receipt{done: make(chan struct{}), err: err}
	close(r.done)
	return r
}
