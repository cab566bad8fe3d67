package workload

import (
	"fmt"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Outcome is what became of a message, as its producer was told.
type Outcome uint8

// The outcomes.
const (
	// Acknowledged: it is stored, once; where, a receipt may tell.
	Acknowledged Outcome = iota
	// Refused: it is certainly not stored.
	Refused
	// Unknown: it may be stored or not; without deduplication any number of times.
	Unknown
)

// Receipt tells where an acknowledged message stands.
type Receipt struct {
	Partition int
	Offset    entry.Offset
	// Known is false when the broker could not tell: the message was stored by an earlier attempt.
	Known bool
}

// recentReceipts bounds the receipts that are compared with what is read, per producer. A message that is read more
// than that many numbers before or after its receipt is not compared.
const recentReceipts = 1 << 16

// Book keeps what was sent and what became of it. It is pure and not safe for concurrent use.
//
// It holds sets of numbers as ranges. A map from each number to its outcome would tell more about a single message, and
// would make the memory of a checker grow with the length of a run.
type Book struct {
	run      uint64
	accounts []account
	readings []*Reading
	lowest   map[int]entry.Offset // per partition, the lowest offset of a receipt
}

// account is one producer's.
type account struct {
	sent                    uint64 // numbers below are sent
	acked, refused, unknown ranges
	deduplicated            uint64
	recent                  []place // by number
}

// place is where a number was stored, or which number is stored there. seen is false for an empty place.
type place struct {
	seen      bool
	number    uint64
	partition int
	offset    entry.Offset
}

// NewBook returns the book of a run with so many producers.
func NewBook(run uint64, producers int) *Book {
	return &Book{run: run, accounts: make([]account, producers), lowest: make(map[int]entry.Offset)}
}

// Send gives out the producer's next message. Call it before the message is published: nothing may be read that was not
// sent.
func (b *Book) Send(producer uint32) Tag {
	a := &b.accounts[producer]
	t := Tag{Run: b.run, Producer: producer, Number: a.sent}
	a.sent++
	return t
}

// Settle tells the outcome of a message, once. where counts for Acknowledged ones.
func (b *Book) Settle(t Tag, o Outcome, where Receipt) {
	a := &b.accounts[t.Producer]
	set := map[Outcome]*ranges{Acknowledged: &a.acked, Refused: &a.refused, Unknown: &a.unknown}[o]
	if t.Number >= a.sent || !set.add(t.Number) {
		panic(fmt.Sprintf("workload: message %d of producer %d settled twice, or never sent", t.Number, t.Producer))
	}
	if o != Acknowledged {
		return
	}
	if !where.Known {
		a.deduplicated++
		return
	}
	if low, ok := b.lowest[where.Partition]; !ok || where.Offset < low {
		b.lowest[where.Partition] = where.Offset
	}
	p := place{seen: true, number: t.Number, partition: where.Partition, offset: where.Offset}
	if a.recent == nil {
		a.recent = make([]place, recentReceipts)
	}
	a.recent[t.Number%recentReceipts] = p
	for _, r := range b.readings {
		if read := r.placeOf(t); read.seen && read.number == t.Number {
			r.compare(t, p, read)
		}
	}
}

// Sent counts the messages of all producers.
func (b *Book) Sent() (n uint64) {
	for i := range b.accounts {
		n += b.accounts[i].sent
	}
	return n
}

// Unsettled counts messages that have no outcome yet.
func (b *Book) Unsettled() (n uint64) {
	for i := range b.accounts {
		a := &b.accounts[i]
		n += a.sent - a.acked.count() - a.refused.count() - a.unknown.count()
	}
	return n
}

// NewReading begins a reading that is to be judged by this book. ordered tells that messages are delivered by rising
// offsets, as all but Shared subscriptions do, so that their order is checked as they come.
func (b *Book) NewReading(ordered bool) *Reading {
	r := &Reading{book: b, ordered: ordered, producers: make([]producerReading, len(b.accounts)), partitions: make(map[int]*partitionReading)}
	b.readings = append(b.readings, r)
	return r
}
