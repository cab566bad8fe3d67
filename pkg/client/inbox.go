package client

import (
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
)

// inbox is the state machine of one consumer on one partition: what of the broker's deliveries goes to the
// application, and what the application holds. It has no goroutine, clock or socket.
//
// After a reconnect the broker delivers again whatever it has no durable acknowledgement for. Of that, the
// inbox leaves out what the application still holds and may yet acknowledge (once per reconnect: a second
// delivery of the same message is a real one), and what it acknowledged while the answer was under way. What was
// buffered for the application and not handed out is thrown away instead, and comes again in order.
type inbox struct {
	flow flow
	acks acker

	held     rangeSet // handed to the application, neither acknowledged nor given back
	suppress rangeSet // held when the stream broke: leave the broker's next delivery of them out

	next      entry.Offset // a reader's: the offset after the last one handed out
	started   bool         // next is known
	reader    bool
	epoch     uint64 // of what is handed out: a seek makes the older worthless
	streamGen uint64 // of what is buffered: a new stream makes the older worthless
}

// connected says that a new stream is open. Permits are to be given after it, and acknowledgements sent.
func (b *inbox) connected(startOffset entry.Offset) {
	b.streamGen++
	b.flow.connected()
	if b.reader && !b.started {
		b.next, b.started = startOffset, true
	}
}

// broken says that the stream is gone.
func (b *inbox) broken(now time.Time) {
	b.streamGen++
	b.flow.connected()
	b.suppress = b.held.clone()
	b.acks.broken(now)
}

// moved says that the subscription was moved by a seek: nothing from before counts. It returns the waiters to
// tell.
func (b *inbox) moved() []chan error {
	b.streamGen++
	b.epoch++
	b.flow.connected()
	b.held, b.suppress = rangeSet{}, rangeSet{}
	b.started = false
	return b.acks.reset()
}

// wanted tells whether a delivered message goes to the application.
func (b *inbox) wanted(o entry.Offset) bool {
	if b.reader {
		return o >= b.next
	}
	if b.suppress.remove(o) && b.held.contains(o) {
		return false
	}
	return !b.acks.unconfirmed(o)
}

// delivered takes what became of one entry: charged permits, and the messages that are kept.
func (b *inbox) delivered(charged int, kept []*Delivery) {
	var bytes int64
	for _, d := range kept {
		d.epoch, d.streamGen = b.epoch, b.streamGen
		bytes += d.size
	}
	b.flow.received(charged, len(kept), bytes)
}

// current tells whether a buffered message still counts.
func (b *inbox) current(d *Delivery) bool { return d.streamGen == b.streamGen }

// taken says that the application took a buffered message.
func (b *inbox) taken(d *Delivery) {
	b.flow.consumed(d.size)
	if b.reader {
		b.next = d.ID.Offset + 1
		return
	}
	b.held.add(d.ID.Offset)
}

// nacked says that the application gives a message back. It reports whether the broker must be told: not if
// the stream it came on is gone and the broker has yet to deliver it again.
func (b *inbox) nacked(d *Delivery) bool {
	if b.reader || d.epoch != b.epoch || !b.held.remove(d.ID.Offset) {
		return false
	}
	due := b.suppress.remove(d.ID.Offset)
	return d.streamGen == b.streamGen || !due
}

// skips tells which indices of an entry are not to be consumed.
func skips(e *brokerv1.DeliveredEntry, index uint64) bool {
	for _, r := range e.GetSkip() {
		if index >= r.GetFirst() && index <= r.GetLast() {
			return true
		}
	}
	return false
}

// charge counts the permits that an entry used up.
func charge(e *brokerv1.DeliveredEntry) int {
	n := int64(e.GetSpan())
	for _, r := range e.GetSkip() {
		if r.GetFirst() <= r.GetLast() && r.GetLast() < uint64(e.GetSpan()) {
			n -= int64(r.GetLast()-r.GetFirst()) + 1
		}
	}
	return int(max(n, 0))
}

// unpack decodes the messages of an entry that are to be consumed.
func unpack(e *brokerv1.DeliveredEntry, topic string, partition int) ([]*Delivery, error) {
	f, err := frame.Parse(e.GetFrame(), frame.Limits{MaxMessage: maxReceive})
	if err != nil {
		return nil, err
	}
	if f.Marker {
		return nil, nil
	}
	payload, err := decompress(&f)
	if err != nil {
		return nil, err
	}
	all, out := make([]Delivery, 0, f.Count), make([]*Delivery, 0, f.Count)
	producer := string(f.Producer)
	index := uint64(0)
	position := e.GetPosition()
	for m, err := range f.Messages(payload) {
		if err != nil {
			return nil, err
		}
		if i := index; !m.CompactedOut && !skips(e, i) {
			all = append(all, Delivery{
				Message: fromFrame(&m),
				ID: MessageID{
					Partition: partition, Offset: entry.Offset(e.GetOffset() + i),
					Position: entry.Position{
						Ledger: entry.LedgerID(position.GetLedger()), Entry: entry.EntryID(position.GetEntry()),
						Batch: position.GetBatch() + int32(i),
					},
				},
				Topic: topic, Producer: producer,
				PublishTime: time.UnixMilli(f.PublishTime), BrokerTime: time.UnixMilli(int64(e.GetBrokerTimeMs())),
				RedeliveryCount: int(e.GetRedeliveryCount()), size: int64(len(m.Value) + 64),
			})
			out = append(out, &all[len(all)-1])
		}
		index++
	}
	return out, nil
}
