package topic

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
)

// sequence is a place in what a producer sends: the sequence id of a batch's last message, and for a chunk of a
// large message, which shares its id with its siblings, the chunk. The last chunk, and anything that is no chunk,
// completes its id.
type sequence struct {
	id    uint64
	chunk uint32
}

const whole = math.MaxUint32

func sequenceOf(last uint64, chunk, chunks uint32) sequence {
	if chunks == 0 || chunk+1 >= chunks {
		return sequence{last, whole}
	}
	return sequence{last, chunk}
}

func (s sequence) after(o sequence) bool { return s.id > o.id || s.id == o.id && s.chunk > o.chunk }

// producerState is what deduplication knows of one producer.
type producerState struct {
	name  string
	epoch uint64 // of the newest incarnation seen

	any    bool     // something is stored
	stored sequence // the highest that is confirmed

	// queue[head:] are batches handed to the chain and not confirmed, in order.
	queue []*pending
	head  int
	drain chan struct{} // closed when queue is empty, if somebody waits

	// partial are batches that are confirmed and wait for the rest of their copies, in order; fullFrom to full those that
	// have all of them, as far as this owner knows: the log does not tell.
	partial  []*pending
	anyFull  bool
	fullFrom uint64
	full     sequence
	// weak is the newest batch handed to the chain that is done with less than all its copies.
	anyWeak bool
	weak    sequence

	lastTime int64  // broker time of what was stored last, or of when the newest was let in, Unix milliseconds
	asks     []asks // of the newest incarnations, as far as this owner let them in
	durable  uint64 // epoch of an incarnation that every later owner knows of
	dirty    bool   // differs from what the snapshot store has
	saved    bool   // the snapshot store has a record
	open     int    // handles open
}

// verdict says what to do with a batch.
type verdict uint8

const (
	verdictStore verdict = iota
	// verdictStored: a duplicate of what is confirmed.
	verdictStored
	// verdictInFlight: a duplicate of a batch that is under way.
	verdictInFlight
	// verdictOverlap: partly a duplicate.
	verdictOverlap
)

func (p *producerState) inflight() []*pending { return p.queue[p.head:] }

// noted tells that every later owner knows of the newest incarnation.
func (p *producerState) noted() bool { return p.durable>>GenerationShift >= p.epoch>>GenerationShift }

// idle tells that nobody uses the state.
func (p *producerState) idle() bool { return p.open == 0 && len(p.inflight()) == 0 }

// enter puts a batch on the producer's list, leave takes it off: the oldest mostly.
func (p *producerState) enter(b *pending) {
	if b.level != ledger.AckAll {
		p.anyWeak, p.weak = true, b.last
	}
	if p.head > 32 && p.head > len(p.queue)/2 {
		n := copy(p.queue, p.queue[p.head:])
		clear(p.queue[n:])
		p.queue, p.head = p.queue[:n], 0
	}
	p.queue = append(p.queue, b)
}

func (p *producerState) leave(b *pending) {
	i := p.head
	for i < len(p.queue) && p.queue[i] != b {
		i++
	}
	if i == len(p.queue) {
		return // it left before: failed, then confirmed after all
	}
	copy(p.queue[p.head+1:i+1], p.queue[p.head:i])
	p.queue[p.head] = nil
	p.head++
	if p.head == len(p.queue) {
		if p.drain != nil {
			close(p.drain)
			p.drain = nil
		}
		p.queue, p.head = p.queue[:0], 0
		if cap(p.queue) > 64 {
			p.queue = nil
		}
	}
}

// top is the highest sequence that is stored or under way, if any is.
func (p *producerState) top() (sequence, bool) {
	if under := p.inflight(); len(under) > 0 {
		return under[len(under)-1].last, true
	}
	return p.stored, p.any
}

// beyond is the lowest sequence id of which something is neither stored nor under way.
func (p *producerState) beyond() uint64 {
	top, has := p.top()
	if has && top.chunk == whole {
		return top.id + 1
	}
	return top.id
}

// judge decides about a batch of sequences first … last. With verdictInFlight, the batch that carries it.
func (p *producerState) judge(first uint64, last sequence) (verdict, *pending) {
	if p.any && !last.after(p.stored) {
		return verdictStored, nil
	}
	top, has := p.top()
	if under := p.inflight(); len(under) > 0 {
		if !last.after(top) {
			i := sort.Search(len(under), func(i int) bool { return !last.after(under[i].last) })
			return verdictInFlight, under[i]
		}
	}
	if has && (first < top.id || first == top.id && top.chunk == whole) {
		return verdictOverlap, nil
	}
	return verdictStore, nil
}

// awaitCopies notes a confirmed batch that is done only with all its copies, and is not done.
func (p *producerState) awaitCopies(b *pending) {
	if b.level == ledger.AckAll && !b.finished {
		p.partial = append(p.partial, b)
	}
}

// settleCopies notes the end of a batch: with all its copies, or without anybody knowing.
func (p *producerState) settleCopies(b *pending, err error) {
	if i := slices.Index(p.partial, b); i >= 0 {
		p.partial = slices.Delete(p.partial, i, i+1)
	}
	switch {
	case b.level != ledger.AckAll || err != nil:
		p.anyFull = false
	case !p.anyFull, p.anyWeak && p.weak.after(p.full): // one of another level may lie between, done before those that wait
		p.anyFull, p.fullFrom, p.full = true, b.first, b.last
	default:
		p.full = b.last
	}
}

// copies tells of a stored batch whether it has all its copies, or else which batch it is that waits for them; neither,
// if that is not known.
func (p *producerState) copies(first uint64, last sequence) (waits *pending, full bool) {
	if p.anyFull && first >= p.fullFrom && !last.after(p.full) {
		return nil, true
	}
	for _, b := range p.partial {
		if first >= b.first && !last.after(b.last) {
			return b, false
		}
	}
	return nil, false
}

// confirm notes that a batch is stored for good.
func (p *producerState) confirm(epoch uint64, last sequence, time int64) {
	p.epoch, p.durable = max(p.epoch, epoch), max(p.durable, epoch)
	if !p.any || last.after(p.stored) {
		p.any, p.stored = true, last
	}
	p.lastTime = max(p.lastTime, time)
	p.dirty = true
}

// dedup is the table of a topic's producers. It is pure: the topic's lock guards it.
type dedup struct {
	producers map[string]*producerState
	forgotten []string                    // saved and to be deleted from the snapshot store
	toNote    map[*producerState]struct{} // whose newest incarnation is not durable
}

func newDedup() *dedup {
	return &dedup{producers: map[string]*producerState{}, toNote: map[*producerState]struct{}{}}
}

func (d *dedup) get(name string) *producerState {
	p := d.producers[name]
	if p == nil {
		p = &producerState{name: name}
		d.producers[name] = p
	}
	return p
}

// replay merges a stored entry. Merging is idempotent, so a snapshot may be ahead of where its replay starts.
func (d *dedup) replay(e *frame.Envelope) {
	if e.Flags&frame.FlagDedup == 0 || len(e.Producer) == 0 {
		return
	}
	p := d.producers[string(e.Producer)]
	if p == nil {
		p = d.get(string(e.Producer))
	}
	p.confirm(e.ProducerEpoch, sequenceOf(e.LastSeq, e.Chunk, e.Chunks), e.BrokerTime)
}

// prune forgets producers that are not in use: those that stored nothing since before, and the oldest above most.
func (d *dedup) prune(before int64, most int) {
	var idle []*producerState
	for _, p := range d.producers {
		if p.idle() {
			idle = append(idle, p)
		}
	}
	sort.Slice(idle, func(i, j int) bool {
		if idle[i].lastTime != idle[j].lastTime {
			return idle[i].lastTime < idle[j].lastTime
		}
		return idle[i].name < idle[j].name
	})
	for _, p := range idle {
		if p.lastTime >= before && len(d.producers) <= most {
			return
		}
		d.forget(p)
		if p.saved {
			d.forgotten = append(d.forgotten, p.name)
		}
	}
}

func (d *dedup) forget(p *producerState) {
	delete(d.producers, p.name)
	delete(d.toNote, p)
}

// note is the newest incarnation of a producer, on its way to the snapshot store.
type note struct {
	p     *producerState
	epoch uint64
}

// notes returns the records of producers whose newest incarnation later owners do not know of yet.
func (d *dedup) notes() ([]note, []Record) {
	notes := make([]note, 0, len(d.toNote))
	for p := range d.toNote {
		notes = append(notes, note{p, p.epoch})
	}
	slices.SortFunc(notes, func(a, b note) int { return strings.Compare(a.p.name, b.p.name) })
	records := make([]Record, len(notes))
	for i, n := range notes {
		n.p.saved = true
		records[i] = Record{Key: producerKey(n.p.name), Value: n.p.encode()}
	}
	return notes, records
}

// noted says that what notes returned is durable.
func (d *dedup) noted(notes []note) {
	for _, n := range notes {
		if n.p.durable = max(n.p.durable, n.epoch); n.p.noted() {
			delete(d.toNote, n.p)
		}
	}
}

// The snapshot's records: one header, and one for each producer that changed since the snapshot before. The header
// is last, so that a snapshot saved half-way only runs ahead of its offset.
const (
	snapshotVersion = 1

	keyHeader   = 0
	keyProducer = 1
)

// snapshot returns the records of what changed, and of the offset up to which the state is complete.
func (d *dedup) snapshot(at entry.Offset) []Record {
	var out []Record
	for _, name := range d.forgotten {
		if p := d.producers[name]; p != nil { // it came back before that was written: what is known of it now replaces it
			p.dirty = true
			continue
		}
		out = append(out, Record{Key: producerKey(name), Delete: true})
	}
	d.forgotten = nil
	names := make([]string, 0, len(d.producers))
	for name, p := range d.producers {
		if p.dirty {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for _, name := range names {
		p := d.producers[name]
		p.dirty, p.saved = false, true
		out = append(out, Record{Key: producerKey(name), Value: p.encode()})
	}
	header := binary.BigEndian.AppendUint64([]byte{snapshotVersion}, uint64(at))
	return append(out, Record{Key: []byte{keyHeader}, Value: header})
}

// unsaved takes a snapshot back that was not saved.
func (d *dedup) unsaved(records []Record) {
	for _, r := range records {
		if len(r.Key) < 2 || r.Key[0] != keyProducer {
			continue
		}
		name := string(r.Key[1:])
		switch p := d.producers[name]; {
		case p != nil:
			p.dirty = true
		case r.Delete:
			d.forgotten = append(d.forgotten, name)
		}
	}
}

func producerKey(name string) []byte { return append([]byte{keyProducer}, name...) }

// encode: version, epoch, sequence id, chunk, time; 8 bytes each but the version (1) and the chunk (4). Sequence id and chunk
// are left out when nothing is stored.
func (p *producerState) encode() []byte {
	b := binary.BigEndian.AppendUint64([]byte{snapshotVersion}, p.epoch)
	if p.any {
		b = binary.BigEndian.AppendUint64(b, p.stored.id)
		b = binary.BigEndian.AppendUint32(b, p.stored.chunk)
	}
	return binary.BigEndian.AppendUint64(b, uint64(p.lastTime))
}

// SnapshotError says that a deduplication record cannot be understood. Nothing is guessed: producers with
// deduplication are refused until it is gone.
type SnapshotError struct {
	Key    []byte
	Detail string
}

// Error says which record it is.
func (e *SnapshotError) Error() string {
	return fmt.Sprintf("deduplication record %q: %s", e.Key, e.Detail)
}

// load reads a snapshot's records into a fresh table, and returns the offset from which to replay.
func (d *dedup) load(records []Record) (entry.Offset, error) {
	var at entry.Offset
	for _, r := range records {
		if r.Delete {
			continue
		}
		if len(r.Key) == 0 || len(r.Value) == 0 {
			return 0, &SnapshotError{Key: r.Key, Detail: "empty key or value"}
		}
		if r.Value[0] != snapshotVersion {
			return 0, &SnapshotError{Key: r.Key, Detail: fmt.Sprintf("version %d, this program knows %d", r.Value[0], snapshotVersion)}
		}
		v := r.Value[1:]
		switch {
		case r.Key[0] == keyHeader && len(r.Key) == 1 && len(v) == 8:
			at = entry.Offset(binary.BigEndian.Uint64(v))
		case r.Key[0] == keyProducer && len(r.Key) > 1 && (len(v) == 16 || len(v) == 28):
			p := &producerState{name: string(r.Key[1:]), epoch: binary.BigEndian.Uint64(v), saved: true}
			p.durable = p.epoch
			if v = v[8:]; len(v) == 20 {
				p.any, p.stored = true, sequence{binary.BigEndian.Uint64(v), binary.BigEndian.Uint32(v[8:])}
				v = v[12:]
			}
			p.lastTime = int64(binary.BigEndian.Uint64(v))
			d.producers[p.name] = p
		default:
			return 0, &SnapshotError{Key: r.Key, Detail: fmt.Sprintf("%d bytes of value do not fit the key", len(r.Value))}
		}
	}
	return at, nil
}
