package quorum

import (
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// TestTrackerAgainstAPlainList drives a tracker and a list of sets with the same random steps.
func TestTrackerAgainstAPlainList(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 0))
		e := 1 + rng.IntN(5)
		qw := 1 + rng.IntN(e)
		q := MustNew(Config{e, qw, 1 + rng.IntN(qw), 0}, nil)
		tr := NewTracker(q, entry.NoEntry)
		var acks []Set
		lac, one := -1, -1
		for range 400 {
			switch k := rng.IntN(20); {
			case k < 6:
				if got := tr.Append(); int(got) != len(acks) {
					t.Fatalf("seed %d: appended %d, want %d", seed, got, len(acks))
				}
				acks = append(acks, 0)
			case k < 15 && len(acks) > 0:
				id := max(0, lac-2) + rng.IntN(len(acks)-max(0, lac-2))
				slot := rng.IntN(e)
				news := entry.EntryID(id) >= tr.Tail() && q.WriteSet(entry.EntryID(id)).Has(slot) && !acks[id].Has(slot)
				if tr.Ack(entry.EntryID(id), slot) != news {
					t.Fatalf("seed %d: Ack(%d, %d) = %t", seed, id, slot, !news)
				}
				if news {
					acks[id] |= 1 << slot
				}
			case k < 17:
				for lac+1 < len(acks) && q.Valid(acks[lac+1]) {
					lac++
				}
				one = max(one, lac)
				tr.Advance()
			case k == 17:
				for one+1 < len(acks) && acks[one+1] != 0 {
					one++
				}
				tr.AdvanceOne()
			case k == 18:
				changed := Set(rng.Uint64()) & All(e)
				for id := lac + 1; id < len(acks); id++ {
					acks[id] &^= changed
				}
				one = lac
				// Confirmed entries that count without the changed slots may move along.
				from := lac + 1
				for from > int(tr.Tail()) && q.Valid(acks[from-1]&^changed) && rng.IntN(3) > 0 {
					from--
					acks[from] &^= changed
				}
				tr.Prune(entry.EntryID(from), changed, q)
			default:
				tr.Drop(entry.EntryID(max(0, lac-3)))
				tr.Shrink()
			}
			if int(tr.LAC()) != lac || int(tr.One()) != one || int(tr.Next()) != len(acks) {
				t.Fatalf("seed %d: LAC %d one %d next %d, want %d %d %d", seed, tr.LAC(), tr.One(), tr.Next(), lac, one, len(acks))
			}
			for id := tr.Tail(); id < tr.Next(); id++ {
				if tr.Acks(id) != acks[id] {
					t.Fatalf("seed %d: acks of %d are %b, want %b", seed, id, tr.Acks(id), acks[id])
				}
			}
		}
	}
}

func TestTrackerRefusesToForgetWhatIsNotConfirmed(t *testing.T) {
	t.Parallel()
	q := MustNew(Config{3, 3, 2, 0}, nil)
	mustPanic(t, func() {
		tr := NewTracker(q, entry.NoEntry)
		tr.Append()
		tr.Drop(1)
	})
	mustPanic(t, func() { NewTracker(q, 5).Prune(5, 1, q) })
	mustPanic(t, func() { NewTracker(q, 5).Acks(7) })
	mustPanic(t, func() {
		tr := NewTracker(q, entry.NoEntry)
		e := tr.Append()
		tr.Ack(e, 0)
		tr.Ack(e, 1)
		tr.Advance()
		tr.Prune(e, Of(1), q) // confirmed, and would not be
	})
}

func mustPanic(t *testing.T, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	f()
}
