package model

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// mostHistories bounds the comparison; there are fewer.
var mostHistories = 10_000

// shelf is a bookie's real store, and what the model says of it.
type shelf struct {
	store      *ledgerstore.ByHand
	disk       disk
	generation uint64 // as it was at the last look
	mark       uint64 // likewise
}

// deed is one thing that happens to a bookie, in the store and in the model; either says how it was answered.
type deed struct {
	name  string
	store func(s *shelf) bookiewire.Code
	model func(k *disk) bookiewire.Code
}

// refusedByMark stands for what no bookie answers: the store refuses its own garbage collection.
const refusedByMark = bookiewire.Overloaded

func codeOf(err error) bookiewire.Code {
	var e *bookiewire.Error
	switch {
	case err == nil:
		return bookiewire.OK
	case errors.As(err, &e):
		return e.Code
	}
	return bookiewire.Disconnected
}

func (s *shelf) add(a bookiewire.Add, generation uint64) (code bookiewire.Code) {
	a.Ledger, a.Nonce, a.LAC = theLedger, theNonce, entry.NoEntry
	a.Body = bodyOf(int(a.Entry))
	a.Checksum = entry.Checksum(theLedger, a.Entry, a.Body)
	s.store.AtOnce(func() {
		s.store.Add(&ledgerstore.Add{Add: a, Generation: generation, Done: func(err error) { code = codeOf(err) }})
	})
	s.store.AtOnce(func() {})
	return code
}

func (s *shelf) fence(term entry.Term) (code bookiewire.Code) {
	s.store.AtOnce(func() {
		s.store.Fence(bookiewire.Fence{Ledger: theLedger, Term: term}, func(_ bookiewire.FenceReply, err error) { code = codeOf(err) })
	})
	s.store.AtOnce(func() {})
	return code
}

func (s *shelf) read(e entry.EntryID) bookiewire.Code {
	_, err := s.store.Read(context.Background(), bookiewire.Read{Ledger: theLedger, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1 << 10})
	return codeOf(err)
}

// deeds are all that can happen: adds by the writer, with and without an old admission, by recoveries and by repair; fences;
// a recovery's reads; deletion; the mark of a loss.
func deeds() []deed {
	c := &Config{}
	var all []deed
	for e := range 2 {
		all = append(all, deed{
			fmt.Sprintf("add %d", e),
			func(s *shelf) bookiewire.Code {
				_, generation := s.store.Admission(theLedger)
				return s.add(bookiewire.Add{Entry: entry.EntryID(e)}, generation)
			},
			func(k *disk) bookiewire.Code { return k.add(c, e) },
		})
		for term := range uint8(3) {
			all = append(all, deed{
				fmt.Sprintf("write back %d in term %d", e, term),
				func(s *shelf) bookiewire.Code {
					_, generation := s.store.Admission(theLedger)
					return s.add(bookiewire.Add{Entry: entry.EntryID(e), Recovery: true, Term: entry.Term(term)}, generation)
				},
				func(k *disk) bookiewire.Code { return k.addAgain(c, e, term) },
			})
		}
	}
	for term := uint8(1); term < 3; term++ {
		all = append(all, deed{
			fmt.Sprintf("fence with term %d", term),
			func(s *shelf) bookiewire.Code { return s.fence(entry.Term(term)) },
			func(k *disk) bookiewire.Code { return k.fence(c, term) },
		}, deed{
			fmt.Sprintf("recovery's read in term %d", term),
			func(s *shelf) bookiewire.Code {
				if code := s.fence(entry.Term(term)); code != bookiewire.OK { // as Store.Read begins
					return code
				}
				return s.read(0)
			},
			func(k *disk) bookiewire.Code { return k.read(c, 0, term) },
		})
	}
	return append(all, deed{
		"look for admission",
		func(s *shelf) bookiewire.Code {
			if known, generation := s.store.Admission(theLedger); !known {
				s.generation = generation
			}
			return bookiewire.OK
		},
		func(k *disk) bookiewire.Code {
			if !k.is(known) {
				k.flags = k.flags&^staleWriter | admitsWriter
			}
			return bookiewire.OK
		},
	}, deed{
		"add by an old look",
		func(s *shelf) bookiewire.Code {
			if !s.disk.is(admitsWriter) {
				return bookiewire.OK
			}
			return s.add(bookiewire.Add{Entry: 1}, s.generation)
		},
		func(k *disk) bookiewire.Code {
			switch {
			case !k.is(admitsWriter):
				return bookiewire.OK
			case !k.is(known) && k.is(staleWriter):
				return bookiewire.NotAdmitted
			}
			return k.add(c, 1)
		},
	}, deed{
		"delete",
		func(s *shelf) (code bookiewire.Code) {
			s.store.AtOnce(func() { code = codeOf(s.store.DeleteLedger(context.Background(), theLedger, s.store.Mark(theLedger))) })
			return code
		},
		func(k *disk) bookiewire.Code {
			was := k.is(known) || k.is(buried)
			k.bury()
			if !was { // there was nothing to remember
				k.flags &^= buried
			}
			return bookiewire.OK
		},
	}, deed{
		"look for deletion",
		func(s *shelf) bookiewire.Code {
			s.mark = s.store.Mark(theLedger)
			return bookiewire.OK
		},
		func(k *disk) bookiewire.Code {
			k.flags = k.flags&^touched | marked
			return bookiewire.OK
		},
	}, deed{
		"delete by an old look",
		func(s *shelf) (code bookiewire.Code) {
			if s.disk.is(marked) {
				s.store.AtOnce(func() {
					if err := s.store.DeleteLedger(context.Background(), theLedger, s.mark); errors.Is(err, ledgerstore.ErrMarked) {
						code = refusedByMark
					} else {
						code = codeOf(err)
					}
				})
			}
			return code
		},
		func(k *disk) bookiewire.Code {
			was := k.is(known) || k.is(buried)
			switch {
			case !k.is(marked):
			case !k.buryMarked(c):
				return refusedByMark
			case !was:
				k.flags &^= buried
			}
			return bookiewire.OK
		},
	}, deed{
		"limbo",
		func(s *shelf) (code bookiewire.Code) {
			s.store.AtOnce(func() { code = codeOf(s.store.SetLimbo(context.Background(), theLedger)) })
			return code
		},
		func(k *disk) bookiewire.Code {
			if !k.is(limbo) {
				k.moved()
			}
			k.appear()
			k.flags |= limbo
			k.term = max(k.term, 1)
			return bookiewire.OK
		},
	})
}

// The model's bookie answers as the store does, in every state that the model tells apart.
func TestBookieIsALedgerstore(t *testing.T) {
	all := deeds()
	seen := map[disk]bool{{}: true}
	checked := 0
	for paths := [][]int{{}}; len(paths) > 0 && checked < mostHistories; paths = paths[1:] {
		for i := range all {
			path := append(append([]int{}, paths[0]...), i)
			after := play(t, all, path)
			checked++
			if !seen[after] {
				seen[after] = true
				paths = append(paths, path)
			}
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d states, %d histories", len(seen), checked)
}

// play does what path says and compares.
func play(t *testing.T, all []deed, path []int) disk {
	t.Helper()
	store, err := ledgerstore.OpenByHand(ledgerstore.Config{
		Dir: "/d", Cluster: entry.UUID{1}, Storage: uuidOf(0), Fresh: true, SegmentSize: 24 << 10, Spares: 1, CacheBytes: 1 << 16,
		IndexBytes: 1 << 16, CompactBytesPerSecond: -1, Trash: -1,
	}, vfs.NewMem())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Abandon()
	s := &shelf{store: store}
	var names []string
	for _, i := range path {
		d := all[i]
		names = append(names, d.name)
		got := d.store(s)
		if want := d.model(&s.disk); got != want {
			t.Errorf("%q: the store says %s, the model %s", names, got, want)
		}
	}
	if is, _ := store.Admission(theLedger); is != s.disk.is(known) {
		t.Errorf("%q: known to the store: %v", names, is)
	}
	for e := range entry.EntryID(2) {
		want := bookiewire.NoEntry
		switch {
		case s.disk.has>>e&1 != 0:
			want = bookiewire.OK
		case s.disk.is(limbo):
			want = bookiewire.Unknown
		case !s.disk.is(known):
			want = bookiewire.NoLedger
		}
		if got := s.read(e); got != want {
			t.Errorf("%q: the store reads entry %d: %s, the model %s", names, e, got, want)
		}
	}
	return s.disk
}
