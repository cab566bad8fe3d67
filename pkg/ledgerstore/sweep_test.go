package ledgerstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// sweepStep is how many calls the tests here and the power cuts go on at a time; with the race detector they leave most
// out.
var sweepStep = 1

// Each call that may ask for space fails with ENOSPC, from a certain one on, until space is back. What was answered
// stands, the store does not stop, and takes everything again afterwards.
func TestNoSpaceAtEachCall(t *testing.T) {
	t.Parallel()
	for _, ops := range [][]vfs.Op{{vfs.OpCreate}, {vfs.OpAllocate}, {vfs.OpWrite}, {vfs.OpCreate, vfs.OpAllocate}} {
		for n := 0; ; n += sweepStep {
			hit, err := noSpaceFrom(crashConfig(), ops, n)
			if err != nil {
				t.Fatalf("ENOSPC of %v after %d calls: %v", ops, n, err)
			}
			if !hit {
				t.Logf("%v: %d calls", ops, n)
				break
			}
		}
	}
}

func noSpaceFrom(cfg Config, ops []vfs.Op, n int) (hit bool, err error) {
	ctx := context.Background()
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	s, err := Open(ctx, cfg, faulty, quiet, nil)
	if err != nil {
		return false, err
	}
	if err := s.fillReserve(); err != nil {
		return false, err
	}
	var rules []*vfs.Active
	for _, op := range ops {
		rules = append(rules, faulty.Add(vfs.Rule{Op: op, Err: syscall.ENOSPC, After: n}))
	}
	p := newPromises()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.workload(s)
	}()
	// What waits for space gets it after a while.
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		default:
			hits := 0
			for _, r := range rules {
				if hits += r.Hits(); hits > 40 {
					r.Remove()
				}
			}
			s.look()
			time.Sleep(100 * time.Microsecond) // which leaves the processor to the workload
		}
	}
	for _, r := range rules {
		hit = hit || r.Hits() > 0
		r.Remove()
	}
	s.look()
	select {
	case err := <-s.Fatal():
		return hit, fmt.Errorf("the store has stopped: %w", err)
	default:
	}
	var out error
	for e := range entry.EntryID(3) {
		err := add(s, 8, e)
		// What was under way when space came back may find only now that it had none: the next look puts that right.
		for until := time.Now().Add(time.Minute); codeOf(err) == bookiewire.ReadOnly && time.Now().Before(until); err = add(s, 8, e) {
			s.look()
		}
		out = errors.Join(out, err)
	}
	if out != nil {
		_ = s.Close()
		return hit, fmt.Errorf("add after space is back: %w", out)
	}
	if err := s.Close(); err != nil {
		return hit, err
	}
	mem.Crash(nil)
	if s, err = Open(ctx, cfg, mem, quiet, nil); err != nil {
		return hit, fmt.Errorf("reopen: %w", err)
	}
	if _, err = readOne(s, 8, 2); err == nil {
		err = p.check(s)
	}
	return hit, errors.Join(err, s.Close())
}

// Each read of the disk fails once, during the start, reads and compaction. A start may fail; what is answered is the
// entry or Unknown, never that there is none, and nothing is lost by it.
func TestReadErrorAtEachCall(t *testing.T) {
	t.Parallel()
	cfg := crashConfig()
	cfg.CacheBytes, cfg.IndexBytes = 1, 1
	mem := vfs.NewMem()
	s := openStore(t, cfg, mem)
	p := newPromises()
	p.workload(s)
	closeStore(t, s)
	for n := 0; ; n += sweepStep {
		at := mem.Clone()
		at.Crash(nil)
		hit, err := readErrorAt(cfg, at, p, n)
		if err != nil {
			t.Fatalf("failed read %d: %v", n, err)
		}
		if !hit {
			t.Logf("%d reads", n)
			return
		}
	}
}

func readErrorAt(cfg Config, mem *vfs.Mem, p *promises, n int) (hit bool, err error) {
	ctx := context.Background()
	faulty := vfs.NewFaulty(mem)
	rule := faulty.Add(vfs.Rule{Op: vfs.OpRead, Err: syscall.EIO, After: n, Times: 1})
	s, err := Open(ctx, cfg, faulty, quiet, nil)
	if err == nil {
		for l, entries := range p.stored {
			for e, acked := range entries {
				got, err := readOne(s, l, e)
				if err != nil && acked && !p.deleted[l] && codeOf(err) != bookiewire.Unknown {
					return true, errors.Join(fmt.Errorf("entry %d:%d: %w", l, e, err), s.Close())
				}
				if err == nil && string(got) != string(body(l, e, crashBody)) {
					return true, errors.Join(fmt.Errorf("entry %d:%d has other bytes", l, e), s.Close())
				}
			}
		}
		_ = s.DeleteLedger(ctx, 3, s.Mark(3))
		_, _ = s.CompactOnce(ctx)
		_, _ = s.CompactOnce(ctx)
		if err := s.Close(); err != nil {
			return true, err
		}
	}
	if rule.Hits() == 0 {
		return false, nil
	}
	mem.Crash(nil)
	if s, err = Open(ctx, cfg, mem, quiet, nil); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return true, err
		}
		return true, fmt.Errorf("reopen: %w", err)
	}
	p.deleted[3] = false // asked, whatever the answer was
	return true, errors.Join(p.check(s), s.Close())
}

// Each call to the disk fails once. The store stops or goes on; what was answered is there after the power cut that
// follows, and nothing is taken for lost that was not.
func TestDiskErrorAtEachCall(t *testing.T) {
	t.Parallel()
	for _, op := range []vfs.Op{
		vfs.OpCreate, vfs.OpOpen, vfs.OpRename, vfs.OpRemove, vfs.OpStat, vfs.OpSyncDir, vfs.OpWrite, vfs.OpSync,
		vfs.OpTruncate, vfs.OpAllocate,
	} {
		for n := 0; ; n += sweepStep {
			hit, err := diskErrorAt(crashConfig(), op, n)
			if err != nil {
				t.Fatalf("EIO of %v after %d calls: %v", op, n, err)
			}
			if !hit {
				t.Logf("%v: %d calls", op, n)
				break
			}
		}
	}
}

func diskErrorAt(cfg Config, op vfs.Op, n int) (hit bool, err error) {
	ctx := context.Background()
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	rule := faulty.Add(vfs.Rule{Op: op, Err: syscall.EIO, After: n, Times: 1, LoseUnsynced: true})
	p := newPromises()
	s, err := Open(ctx, cfg, faulty, quiet, nil)
	if err == nil {
		p.workload(s)
		if rule.Hits() > 0 && (op == vfs.OpSync || op == vfs.OpSyncDir) {
			if err := <-s.Fatal(); err == nil { // whoever asked for the sync
				return true, errors.New("stopped without a reason")
			}
			if _, err := readOne(s, 1, 0); codeOf(err) != bookiewire.Unknown {
				return true, errors.Join(fmt.Errorf("a store that has stopped answers %w", err), s.Close())
			}
		}
		if err := s.Close(); err != nil {
			return true, err
		}
	}
	mem.Crash(newRand(uint64(n)))
	if s, err = Open(ctx, cfg, mem, quiet, nil); err != nil {
		return true, fmt.Errorf("reopen: %w", err)
	}
	return rule.Hits() > 0, errors.Join(p.check(s), s.Close())
}
