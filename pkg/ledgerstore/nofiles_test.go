package ledgerstore

import (
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// A store that can open no more files refuses what needs another segment, and nothing else; it lives, and goes on when it can
// open files again.
func TestNoFileDescriptors(t *testing.T) {
	t.Parallel()
	fs := vfs.NewFaulty(vfs.NewMem())
	s := openStore(t, small(), fs)
	must(t, s.fillReserve())
	fill(t, s, 1, 0, 300, 100)
	waitSealed(s)
	var rules []*vfs.Active
	for _, op := range []vfs.Op{vfs.OpCreate, vfs.OpOpen} {
		rules = append(rules, fs.Add(vfs.Rule{Op: op, Err: syscall.EMFILE}))
	}
	stored := entry.EntryID(300)
	exhaust := func(opts ...addOption) {
		t.Helper()
		for limit := stored + 2000; ; stored++ {
			if err := add(s, 1, stored, opts...); err != nil {
				wantCode(t, err, bookiewire.ReadOnly)
				return
			}
			if stored > limit {
				t.Fatal("adds are never refused")
			}
		}
	}
	for range 3 {
		exhaust()
		exhaust(urgent)
		wantEntry(t, s, 1, stored-1, body(1, stored-1, 100)) // in a segment that is open
		s.look()
	}
	if s.State() == Full {
		t.Error("the disk is said to be full")
	}
	if _, err := s.CompactOnce(t.Context()); err != nil {
		t.Errorf("compaction of nothing: %v", err)
	}
	select {
	case err := <-s.Fatal():
		t.Fatalf("the store has stopped: %v", err)
	default:
	}
	for _, r := range rules {
		r.Remove()
	}
	s.look()
	fill(t, s, 1, stored, stored+600, 100)
	stored += 600
	waitSealed(s)
	s = reopen(t, s)
	for e := range stored {
		wantEntry(t, s, 1, e, body(1, e, 100))
	}
	if i := slices.IndexFunc(s.segments.list(), func(g *Segment) bool { return g.damaged.Load() }); i >= 0 {
		t.Error("a segment is said to be damaged")
	}
}

// Whichever open it is that fails, once, nothing stops and nothing is lost.
func TestNoFileDescriptorOnce(t *testing.T) {
	t.Parallel()
	for _, op := range []vfs.Op{vfs.OpCreate, vfs.OpOpen} {
		hits := 0
		for n := range 40 {
			fs := vfs.NewFaulty(vfs.NewMem())
			s := openStore(t, small(), fs)
			rule := fs.Add(vfs.Rule{Op: op, Err: syscall.EMFILE, After: n, Times: 1})
			live, dead := entry.EntryID(0), entry.EntryID(0)
			for round := range 4 {
				for range 60 {
					for _, of := range []struct {
						ledger entry.LedgerID
						next   *entry.EntryID
					}{{1, &live}, {2 + entry.LedgerID(round/3), &dead}} {
						err := add(s, of.ledger, *of.next)
						if err == nil {
							*of.next++
							continue
						}
						wantCode(t, err, bookiewire.ReadOnly)
						s.look()
					}
				}
				s.look()
				if round == 2 {
					must(t, s.DeleteLedger(t.Context(), 2, s.Mark(2)))
					dead += 1000
					if _, err := s.CompactOnce(t.Context()); err != nil && !errors.Is(err, syscall.EMFILE) {
						t.Fatalf("%s %d: compaction: %v", op, n, err)
					}
				}
			}
			select {
			case err := <-s.Fatal():
				t.Fatalf("%s %d: the store has stopped: %v", op, n, err)
			default:
			}
			hits += rule.Hits()
			rule.Remove()
			s = reopen(t, s)
			if loss := s.Loss(); loss.All || len(loss.Ledgers) > 0 {
				t.Fatalf("%s %d: loses %+v", op, n, loss)
			}
			for e := range live {
				wantEntry(t, s, 1, e, body(1, e, 100))
			}
			closeStore(t, s)
		}
		if hits < 8 {
			t.Errorf("%s: %d failed", op, hits)
		}
	}
}
