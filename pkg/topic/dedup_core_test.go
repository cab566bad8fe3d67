package topic

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
)

func TestChunksOfOneMessageHaveAnOrder(t *testing.T) {
	t.Parallel()
	p := newDedup().get("p")
	judge := func(want verdict, first uint64, chunk, chunks uint32) {
		t.Helper()
		if got, _ := p.judge(first, sequenceOf(first, chunk, chunks)); got != want {
			t.Fatalf("sequence %d, chunk %d of %d: verdict %d, want %d", first, chunk, chunks, got, want)
		}
	}
	store := func(seq uint64, chunk, chunks uint32) { p.confirm(1, sequenceOf(seq, chunk, chunks), 0) }
	judge(verdictStore, 4, 0, 3)
	store(4, 0, 3)
	judge(verdictStored, 4, 0, 3)
	judge(verdictStore, 4, 1, 3)
	store(4, 1, 3)
	judge(verdictStore, 4, 2, 3)
	store(4, 2, 3)
	judge(verdictStored, 4, 2, 3)
	judge(verdictStored, 4, 0, 0)
	judge(verdictStore, 5, 0, 2)
	judge(verdictStored, 3, 0, 0)
}

// A batch between two that have all their copies, which did not wait for its own and was done before them, may lack some.
func TestCopiesOfWhatDidNotWaitForThemAreUnknown(t *testing.T) {
	t.Parallel()
	p := newDedup().get("p")
	one := func(seq uint64, level ledger.AckLevel) *pending {
		b := &pending{first: seq, last: sequenceOf(seq, 0, 0), level: level}
		p.enter(b)
		return b
	}
	before, weak, after, later := one(4, ledger.AckAll), one(5, ledger.AckQuorum), one(6, ledger.AckAll), one(7, ledger.AckAll)
	for _, b := range []*pending{before, weak, after, later} {
		p.confirm(1, b.last, 0)
		p.leave(b)
		p.awaitCopies(b)
	}
	for _, b := range []*pending{weak, before, after, later} {
		p.settleCopies(b, nil)
	}
	for _, b := range []*pending{weak, after, later} {
		if waits, full := p.copies(b.first, b.last); waits != nil || full != (b != weak) {
			t.Errorf("batch %d: all copies %v", b.first, full)
		}
	}
}

// A producer that pipelines, loses answers and sends everything again from a point of its choice: whatever is in flight,
// confirmed or failed, each sequence is stored once and in order; the table that the next owner rebuilds says the same.
func TestEachSequenceIsStoredOnceInOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := newDedup()
		p := d.get("p")
		var log []frame.Envelope // confirmed
		var snapshot []Record
		var snapped int
		next := uint64(1) // what the client sends next
		t.Repeat(map[string]func(*rapid.T){
			"send": func(*rapid.T) {
				seq := next
				next++
				last := sequenceOf(seq, 0, 0)
				switch v, at := p.judge(seq, last); v {
				case verdictStore:
					p.enter(&pending{first: seq, last: last, epoch: 1})
				case verdictInFlight:
					if at.first != seq {
						t.Fatalf("sequence %d is said to be in flight as %d", seq, at.first)
					}
				case verdictStored:
					found := false
					for _, e := range log {
						found = found || e.LastSeq == seq
					}
					if !found {
						t.Fatalf("sequence %d is said to be stored", seq)
					}
				case verdictOverlap:
					t.Fatal("overlap")
				}
			},
			"confirm": func(*rapid.T) {
				if len(p.inflight()) == 0 {
					return
				}
				f := p.inflight()[0]
				p.confirm(f.epoch, f.last, int64(len(log)))
				p.leave(f)
				log = append(log, frame.Envelope{
					Flags: frame.FlagDedup, Producer: []byte("p"), ProducerEpoch: f.epoch, FirstSeq: f.first, LastSeq: f.first,
					BrokerTime: int64(len(log)),
				})
			},
			"fail": func(*rapid.T) { // all that is in flight fails, and the client goes back
				for len(p.inflight()) > 0 {
					next = min(next, p.inflight()[0].first)
					p.leave(p.inflight()[0])
				}
			},
			"again": func(t *rapid.T) { next = rapid.Uint64Range(1, next).Draw(t, "from") },
			"snapshot": func(*rapid.T) {
				snapshot = append(snapshot, d.snapshot(entry.Offset(len(log)))...)
				snapped = len(log)
			},
			"": func(t *rapid.T) {
				for i, e := range log {
					if i > 0 && e.LastSeq != log[i-1].LastSeq+1 {
						t.Fatalf("stored %d after %d", e.LastSeq, log[i-1].LastSeq)
					}
				}
				fresh := newDedup()
				at, err := fresh.load(snapshot)
				if err != nil || int(at) != snapped {
					t.Fatalf("loaded up to %d of %d, %v", at, snapped, err)
				}
				for i := range log[at:] {
					fresh.replay(&log[int(at)+i])
				}
				q := fresh.producers["p"]
				if (q != nil) != p.any || q != nil && (q.stored != p.stored || q.epoch != p.epoch || q.lastTime != p.lastTime) {
					t.Fatalf("rebuilt %+v of %+v", q, p)
				}
			},
		})
	})
}

func FuzzLoadSnapshot(f *testing.F) {
	d := newDedup()
	d.get("p").confirm(3, sequenceOf(9, 1, 4), 77)
	for _, r := range d.snapshot(5) {
		f.Add(r.Key, r.Value)
	}
	d.get("q").epoch = 5
	d.toNote[d.get("q")] = struct{}{}
	_, notes := d.notes()
	f.Add(notes[0].Key, notes[0].Value)
	f.Add([]byte{}, []byte{})
	f.Add([]byte{2}, []byte{1, 2})
	f.Fuzz(func(t *testing.T, key, value []byte) {
		d := newDedup()
		if _, err := d.load([]Record{{Key: key, Value: value}}); err != nil || len(d.producers) == 0 {
			return
		}
		for name, p := range d.producers {
			if string(producerKey(name)) != string(key) || string(p.encode()) != string(value) {
				t.Fatalf("%x = %x reads as %+v", key, value, p)
			}
		}
	})
}
