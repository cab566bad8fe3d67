package workload

import (
	"fmt"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// recentOffsets bounds the offsets, per partition, that are remembered with what stood at them.
const recentOffsets = 1 << 16

// maxExamples bounds the violations of one kind that are told one by one.
const maxExamples = 5

// Reading keeps what was read of a run. It is pure and not safe for concurrent use.
type Reading struct {
	book       *Book
	ordered    bool
	producers  []producerReading
	partitions map[int]*partitionReading

	redelivered, storedTwice uint64
	violations               map[Kind]*Violation
}

type producerReading struct {
	numbers ranges
	twice   ranges         // stored at more than one offset
	strayed ranges         // read elsewhere than the receipt told
	highest map[int]uint64 // per partition, the highest number read
	recent  []place        // by number
}

type partitionReading struct {
	offsets ranges
	front   entry.Offset // above all offsets read
	recent  []stored     // by offset
}

// stored is what stood at an offset.
type stored struct {
	seen   bool
	offset entry.Offset
	tag    Tag
}

// Read tells of a message that was read.
func (r *Reading) Read(t Tag, partition int, offset entry.Offset) {
	p := r.partition(partition)
	again := !p.offsets.add(uint64(offset))
	if r.changed(p, t, partition, offset) {
		return
	}
	if t.Producer == lastWord && t.Run == r.book.run {
		if again {
			r.redelivered++
		}
		return
	}
	if t.Run != r.book.run || int(t.Producer) >= len(r.producers) || t.Number >= r.book.accounts[t.Producer].sent {
		r.violate(Phantom, "offset %d of partition %d holds message %d of producer %d, run %x, which was never sent",
			offset, partition, t.Number, t.Producer, t.Run)
		return
	}
	p.note(t, offset)
	w := &r.producers[t.Producer]
	first := w.numbers.add(t.Number)
	switch {
	case first && again:
		r.violate(Changed, "offset %d of partition %d holds message %d of producer %d; it held another before", offset, partition, t.Number, t.Producer)
	case first:
		r.order(p, w, t, partition, offset)
		r.remember(w, t, partition, offset)
	case again:
		r.redelivered++
	default:
		r.storedTwice++
		w.twice.add(t.Number)
		r.violate(StoredTwice, "message %d of producer %d is stored at offset %d of partition %d too", t.Number, t.Producer, offset, partition)
	}
}

// Foreign tells of something read that no run has made, or that is damaged.
func (r *Reading) Foreign(partition int, offset entry.Offset, why error) {
	r.partition(partition).offsets.add(uint64(offset))
	r.violate(Phantom, "offset %d of partition %d holds what was never sent: %v", offset, partition, why)
}

// Received counts the different messages read.
func (r *Reading) Received() (n uint64) {
	for i := range r.producers {
		n += r.producers[i].numbers.count()
	}
	return n
}

// Complete reports whether every offset was read, of each partition, up to its last word.
func (r *Reading) Complete(lastWords map[int]entry.Offset) bool {
	for partition, last := range lastWords {
		p := r.partitions[partition]
		if p == nil || len(p.offsets) == 0 {
			return false
		}
		first := p.offsets[0].first
		if low, ok := r.book.lowest[partition]; ok {
			first = min(first, uint64(low))
		}
		if !p.offsets.covers(first, uint64(last)) {
			return false
		}
	}
	return true
}

func (r *Reading) partition(n int) *partitionReading {
	p := r.partitions[n]
	if p == nil {
		p = &partitionReading{recent: make([]stored, recentOffsets)}
		r.partitions[n] = p
	}
	return p
}

func (p *partitionReading) note(t Tag, offset entry.Offset) {
	p.recent[offset%recentOffsets] = stored{seen: true, offset: offset, tag: t}
}

// changed reports, as a violation, another message than the one that was read at this offset before.
func (r *Reading) changed(p *partitionReading, t Tag, partition int, offset entry.Offset) bool {
	s := p.recent[offset%recentOffsets]
	if !s.seen || s.offset != offset || s.tag == t {
		return false
	}
	r.violate(Changed, "offset %d of partition %d held message %d of producer %d, and holds message %d of producer %d",
		offset, partition, s.tag.Number, s.tag.Producer, t.Number, t.Producer)
	return true
}

func (r *Reading) order(p *partitionReading, w *producerReading, t Tag, partition int, offset entry.Offset) {
	if !r.ordered {
		return
	}
	if offset < p.front {
		r.violate(Reordered, "message %d of producer %d comes for the first time at offset %d of partition %d, after offset %d",
			t.Number, t.Producer, offset, partition, p.front-1)
		return
	}
	p.front = offset + 1
	if w.highest == nil {
		w.highest = make(map[int]uint64)
	}
	if high, ok := w.highest[partition]; ok && t.Number < high {
		r.violate(Reordered, "message %d of producer %d comes after its message %d, at offset %d of partition %d",
			t.Number, t.Producer, high, offset, partition)
		return
	}
	w.highest[partition] = t.Number
}

func (r *Reading) remember(w *producerReading, t Tag, partition int, offset entry.Offset) {
	read := place{seen: true, number: t.Number, partition: partition, offset: offset}
	if w.recent == nil {
		w.recent = make([]place, recentReceipts)
	}
	w.recent[t.Number%recentReceipts] = read
	if told := r.book.accounts[t.Producer].receipt(t.Number); told.seen && told.number == t.Number {
		r.compare(t, told, read)
	}
}

func (a *account) receipt(number uint64) place {
	if a.recent == nil {
		return place{}
	}
	return a.recent[number%recentReceipts]
}

func (r *Reading) placeOf(t Tag) place {
	w := &r.producers[t.Producer]
	if w.recent == nil {
		return place{}
	}
	return w.recent[t.Number%recentReceipts]
}

// compare holds a receipt against what was read. Of a message that is stored twice, the receipt may tell either place.
func (r *Reading) compare(t Tag, told, read place) {
	if told.offset != read.offset || told.partition != read.partition {
		r.producers[t.Producer].strayed.add(t.Number)
	}
}

func (r *Reading) violate(k Kind, format string, args ...any) {
	r.violations = violate(r.violations, k, 1, fmt.Sprintf(format, args...))
}
