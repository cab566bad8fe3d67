package ledgerstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// promises are what a store has answered, and what was asked of it without an answer.
type promises struct {
	mu      sync.Mutex
	stored  map[entry.LedgerID]map[entry.EntryID]bool // true: acknowledged
	term    map[entry.LedgerID]entry.Term
	asked   map[entry.LedgerID]entry.Term // highest asked for
	lac     map[entry.LedgerID]entry.EntryID
	limbo   map[entry.LedgerID]bool
	deleted map[entry.LedgerID]bool // true: acknowledged
}

func newPromises() *promises {
	return &promises{
		stored: map[entry.LedgerID]map[entry.EntryID]bool{}, term: map[entry.LedgerID]entry.Term{},
		asked: map[entry.LedgerID]entry.Term{}, lac: map[entry.LedgerID]entry.EntryID{},
		limbo: map[entry.LedgerID]bool{}, deleted: map[entry.LedgerID]bool{},
	}
}

const crashBody = 900

func (p *promises) fill(s *Store, l entry.LedgerID, from, to entry.EntryID) {
	var wg sync.WaitGroup
	for e := from; e < to; e++ {
		p.mu.Lock()
		if p.stored[l] == nil {
			p.stored[l] = map[entry.EntryID]bool{}
		}
		p.stored[l][e] = false
		p.mu.Unlock()
		wg.Add(1)
		s.Add(newAdd(s, l, e, func(err error) {
			p.mu.Lock()
			if err == nil {
				p.stored[l][e] = true
				if lac, ok := p.lac[l]; !ok || e-1 > lac {
					p.lac[l] = e - 1
				}
			}
			p.mu.Unlock()
			wg.Done()
		}, withBody(body(l, e, crashBody))))
	}
	wg.Wait()
}

func (p *promises) fence(s *Store, l entry.LedgerID, term entry.Term) {
	p.asked[l] = max(p.asked[l], term)
	if _, err := fence(s, l, term); err == nil {
		p.term[l] = max(p.term[l], term)
	}
}

func (p *promises) setLimbo(s *Store, l entry.LedgerID) {
	p.asked[l] = max(p.asked[l], 1)
	if s.SetLimbo(context.Background(), l) == nil {
		p.limbo[l] = true
		p.term[l] = max(p.term[l], 1)
	}
}

func (p *promises) remove(s *Store, l entry.LedgerID) {
	p.deleted[l] = s.DeleteLedger(context.Background(), l, s.Mark(l)) == nil || p.deleted[l]
}

// check compares a store that was opened after a crash.
func (p *promises) check(s *Store) error {
	if loss := s.Loss(); loss.All || len(loss.Ledgers) > 0 {
		return fmt.Errorf("a power cut is taken for corruption: %+v", loss)
	}
	for l, entries := range p.stored {
		acked, asked := p.deleted[l]
		if acked {
			if _, err := readOne(s, l, 0); codeOf(err) != bookiewire.NoLedger {
				return fmt.Errorf("deleted ledger %d answers %w", l, err)
			}
			continue
		}
		if asked { // deletion without an answer: all or nothing
			if _, there := s.Ledger(l); !there {
				continue
			}
		}
		for e, acked := range entries {
			got, err := readOne(s, l, e)
			switch {
			case err == nil && !bytes.Equal(got, body(l, e, crashBody)):
				return fmt.Errorf("entry %d:%d has other bytes", l, e)
			case err != nil && acked:
				return fmt.Errorf("acknowledged entry %d:%d: %w", l, e, err)
			case codeOf(err) == bookiewire.Unknown && !p.limbo[l]:
				return fmt.Errorf("entry %d:%d: %w", l, e, err)
			}
		}
		if lac, ok := p.lac[l]; ok && info(s, l).LAC < lac {
			return fmt.Errorf("ledger %d has LAC %d, was %d", l, info(s, l).LAC, lac)
		}
	}
	for l, term := range p.term {
		if _, asked := p.deleted[l]; asked {
			continue
		}
		in := info(s, l)
		if in.Term < term || in.Term > p.asked[l] {
			return fmt.Errorf("ledger %d has term %d, acknowledged %d, asked %d", l, in.Term, term, p.asked[l])
		}
		if err := add(s, l, 1<<20); codeOf(err) != bookiewire.Fenced {
			return fmt.Errorf("fenced ledger %d takes an add: %w", l, err)
		}
		if p.limbo[l] && !in.Limbo {
			return fmt.Errorf("ledger %d has left limbo", l)
		}
	}
	return nil
}

// workload takes a store through rolls, fences, deletion, unlinking and compaction.
func (p *promises) workload(s *Store) {
	ctx := context.Background()
	p.fill(s, 1, 0, 6)
	p.fill(s, 2, 0, 6)
	p.fence(s, 2, 3)
	p.setLimbo(s, 5)
	p.fill(s, 1, 6, 18) // rolls
	p.fill(s, 3, 0, 12)
	p.fence(s, 4, 1) // unknown
	p.fill(s, 1, 18, 30)
	p.remove(s, 1)
	p.fill(s, 3, 12, 24)
	p.remove(s, 6) // unknown
	for range 4 {
		_, _ = s.CompactOnce(ctx)
	}
	p.fence(s, 2, 4)
	p.fill(s, 3, 24, 40)
	_, _ = s.CompactOnce(ctx)
}

func crashConfig() Config {
	cfg := small()
	cfg.Dir = "/a/b/data"
	cfg.SegmentSize = 24 << 10
	cfg.CacheBytes = 8 << 10
	cfg.CompactBelow = 0.8
	return cfg
}

// The power is cut at each change to the disk that the workload makes, and while the restart after it is at work.
func TestPowerCutAtEachPoint(t *testing.T) {
	t.Parallel()
	cfg := crashConfig()
	fs := vfs.NewMem()
	s := openStore(t, cfg, fs)
	whole := newPromises()
	whole.workload(s)
	closeStore(t, s)
	changes := fs.Changes()
	t.Logf("%d changes", changes)
	for n := 0; n < changes; n += sweepStep {
		cfg.Trash = []time.Duration{-1, time.Hour}[n%2] // the disk has room
		if err := crashAt(cfg, n); err != nil {
			t.Fatalf("power cut after %d changes: %v", n, err)
		}
	}
}

func crashAt(cfg Config, n int) error {
	ctx := context.Background()
	fs := vfs.NewMem()
	fs.CutPowerAfter(n)
	p := newPromises()
	s, err := Open(ctx, cfg, fs, quiet, nil)
	if err == nil {
		p.workload(s)
		if err := s.Close(); err != nil && !errors.Is(err, vfs.ErrPowerCut) {
			return err
		}
	}
	rng := newRand(uint64(n))
	fs.Crash(rng)
	// The restart loses power as well, some changes in.
	fs.CutPowerAfter(n % 23)
	if s, err = Open(ctx, cfg, fs, quiet, nil); err == nil {
		_ = s.Close()
	}
	fs.Crash(rng)
	fs.CutPowerAfter(-1)
	s, err = Open(ctx, cfg, fs, quiet, nil)
	if err != nil {
		return fmt.Errorf("reopen: %w", err)
	}
	if err := p.check(s); err != nil {
		_ = s.Close()
		return err
	}
	// And it goes on from there.
	if _, err := s.CompactOnce(ctx); err != nil {
		_ = s.Close()
		return fmt.Errorf("compact: %w", err)
	}
	p.fill(s, 8, 0, 3)
	if err := s.Close(); err != nil {
		return err
	}
	if s, err = Open(ctx, cfg, fs, quiet, nil); err != nil {
		return fmt.Errorf("reopen again: %w", err)
	}
	return errors.Join(p.check(s), s.Close())
}

func info(s *Store, l entry.LedgerID) LedgerInfo {
	in, _ := s.Ledger(l)
	return in
}
