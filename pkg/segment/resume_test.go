package segment

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// recordsOf lists what a recovery has found, in order.
func recordsOf(tb testing.TB, m *vfs.Mem, name string, rec *Recovered) []Record {
	tb.Helper()
	c := m.Clone()
	must(tb, SealRecovered(c, name, rec))
	r, err := Open(c, name)
	must(tb, err)
	var all []Record
	must(tb, r.Each(func(x Record, _ Location) error {
		x.Body = bytes.Clone(x.Body)
		all = append(all, x)
		return nil
	}))
	closeAll(tb, r)
	return all
}

func sameRecord(a, b Record) bool {
	return a.Kind == b.Kind && a.Ledger == b.Ledger && a.Entry == b.Entry && bytes.Equal(a.Body, b.Body)
}

// resumeStory appends to a segment until the power goes, goes on in it with batches of the same sizes, in what a restart finds,
// and so on; each life's batches begin where those began that the cut has dropped. What was durable stays, what was dropped stays
// dropped, and no cut is taken for corruption, wherever it comes.
func resumeStory(t *testing.T, seed uint64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 9))
	m := vfs.NewMem()
	w, err := Create(m, "s", header(1), 64<<10, false)
	must(t, err)
	var kept []Record // what the last restart has reported
	for life := range entry.LedgerID(5) {
		what := fmt.Sprintf("seed %d, life %d", seed, life)
		m.CutPowerAfter(rng.IntN(9))
		appended, durable, stated := kept, len(kept), int64(0)
		if life > 0 {
			rec, err := Recover(m, "s", 0)
			if err == nil {
				if rec.Corrupt != nil {
					t.Fatalf("%s: resuming was taken for corruption: %+v", what, rec.Corrupt)
				}
				w, err = Resume(m, "s", rec)
			}
			if err != nil {
				w = nil
				if !errors.Is(err, vfs.ErrPowerCut) {
					t.Fatalf("%s: %v", what, err)
				}
			} else {
				stated = w.Size()
			}
		}
		for e := entry.EntryID(0); w != nil && e < 6; e++ {
			recs := []Record{add(life, e, 700), add(100+life, e, 30)}
			appended = append(appended[:len(appended):len(appended)], recs...)
			if _, err := w.AppendBatch(recs, stated); err != nil {
				break
			}
			if rng.IntN(3) == 0 {
				if w.Sync() != nil {
					break
				}
				durable, stated = len(appended), w.Size()
			}
		}
		if w != nil {
			_ = w.Close() // the power is off
		}
		m.Crash(rng)
		rec, err := Recover(m, "s", 0)
		must(t, err)
		if rec.Corrupt != nil {
			t.Fatalf("%s: taken for corruption: %+v", what, rec.Corrupt)
		}
		kept = recordsOf(t, m, "s", rec)
		if len(kept) < durable || len(kept) > len(appended) {
			t.Fatalf("%s: %d records, of %d; %d were durable", what, len(kept), len(appended), durable)
		}
		for i, x := range kept {
			if !sameRecord(x, appended[i]) {
				t.Fatalf("%s: record %d is %v %d:%d, want %d:%d", what, i, x.Kind, x.Ledger, x.Entry, appended[i].Ledger, appended[i].Entry)
			}
		}
	}
}

func TestResumeAfterPowerCuts(t *testing.T) {
	t.Parallel()
	for seed := range uint64(400) {
		resumeStory(t, seed)
	}
}

// What a restart has dropped does not come back, not even when what is written over it is lost by the disk.
func TestResumeBlanksWhatWasDropped(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w, err := Create(m, "s", header(1), 32<<10, false)
	must(t, err)
	appendBatch(t, w, 0, add(1, 0, 500))
	end := w.Size()
	appendBatch(t, w, 0, add(1, 1, 500))
	appendBatch(t, w, 0, add(1, 2, 500))
	closeAll(t, w)
	patch(t, m, "s", end, []byte{0xff}) // the second batch is torn, the third is whole
	rec, err := Recover(m, "s", 0)
	must(t, err)
	if rec.End != end || !rec.Torn {
		t.Fatalf("ends at %d, torn %t", rec.End, rec.Torn)
	}
	w, err = Resume(m, "s", rec)
	must(t, err)
	if rest := fileBytes(t, m, "s")[end:]; !bytes.Equal(rest, make([]byte, len(rest))) {
		t.Error("something is left of what was dropped")
	}
	appendBatch(t, w, w.Size(), add(1, 3, 500))
	must(t, w.Sync())
	must(t, w.Seal())
	closeAll(t, w)
	r, err := Open(m, "s")
	must(t, err)
	for e, want := range []bool{true, false, false, true} {
		if _, found, err := r.Find(1, entry.EntryID(e)); err != nil || found != want {
			t.Errorf("entry %d: %t, %v", e, found, err)
		}
	}
	closeAll(t, r)
}

func TestResumeRefusesDamage(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(1))
	appendBatch(t, w, 0, add(1, 0, 500))
	end := w.Size()
	appendBatch(t, w, end, add(1, 1, 500))
	closeAll(t, w)
	patch(t, m, "s", headerBlockSize, []byte{0xff})
	rec, err := Recover(m, "s", 0)
	must(t, err)
	if _, err := Resume(m, "s", rec); !errors.Is(err, ErrNotResumable) {
		t.Errorf("a damaged segment is resumed: %v", err)
	}
	must(t, SealRecovered(m, "s", rec)) // it gives back what was reserved
	rec, err = Recover(m, "s", 0)
	must(t, err)
	if _, err := Resume(m, "s", rec); !errors.Is(err, ErrNotResumable) {
		t.Errorf("a sealed segment is resumed: %v", err)
	}
}
