package repair

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Copying names copies to make: what a slot of a settled fragment holds, for a bookie.
type Copying struct {
	// Ledger is its record; of a swap that with the intent.
	Ledger   meta.Ledger
	Fragment Stretch
	Slot     int
	To       entry.StorageUUID
	// Skip, if set, leaves out entries that To has for certain.
	Skip func(entry.EntryID) bool
}

// wants reports whether an entry is to be copied.
func (c Copying) wants(e entry.EntryID) bool {
	return has(c.Ledger.Replication, c.Slot, e) && (c.Skip == nil || !c.Skip(e))
}

// Copier makes copies. Its calls may run side by side.
type Copier struct {
	// Ledger reads and adds. It needs Bookies and Metadata.
	Ledger ledger.Env
	// Pace, if set, waits until so many bytes may be copied.
	Pace func(ctx context.Context, bytes int) error
	// Before, if set, is called before a group of copies is sent.
	Before func()
	// ReadBytes is how much is read at once; 1 MiB if 0.
	ReadBytes int
}

// Copied sums up what was copied, retries not counted.
type Copied struct{ Entries, Bytes uint64 }

// AddError says that the bookie which gets copies did not take one. Any other error of a copying is about where copies come from, or is
// that of its context.
type AddError struct {
	To    entry.StorageUUID
	Entry entry.EntryID
	Err   error
}

// Error says which copy, and why.
func (e *AddError) Error() string {
	return fmt.Sprintf("copy entry %d to storage %s: %v", e.Entry, e.To, e.Err)
}

// Unwrap returns the bookie's answer.
func (e *AddError) Unwrap() error { return e.Err }

const (
	// readBytes is how much is read at once.
	readBytes = 1 << 20
	// addAttempts is how often what a bookie does not take is sent, addPause the pause in between.
	addAttempts = 4
	addPause    = 200 * time.Millisecond
)

// Copy sends the target all that it is to have, be it there already: a bookie that is only asked whether it is may be about to delete
// it. Each entry is read from any bookie that has it, and checked. It returns nil once everything is durable there.
func (c *Copier) Copy(ctx context.Context, x Copying) (sum Copied, err error) {
	reader := ledger.NewReader(c.Ledger, x.Ledger)
	size := c.ReadBytes
	if size == 0 {
		size = readBytes
	}
	for next := x.Fragment.First; next <= x.Fragment.Last; {
		if !x.wants(next) {
			next++
			continue
		}
		last := next // of those that follow and are wanted too; of a striped fragment others lie in between
		for n := 0; last < x.Fragment.Last && last-next < 1<<16 && n < x.Ledger.Ensemble; last++ {
			if n++; x.wants(last + 1) {
				n = 0
			}
		}
		entries, err := reader.Read(ctx, next, last, size)
		if err != nil {
			return sum, err //nolint:wrapcheck // it says which entry, and what its bookies answered
		}
		if len(entries) == 0 {
			return sum, fmt.Errorf("read entry %d of ledger %d: the ledger's record has it, and it ends before", next, x.Ledger.ID)
		}
		next = entries[len(entries)-1].ID + 1
		mine, bytes := entries[:0], 0
		for _, e := range entries {
			if x.wants(e.ID) {
				mine, bytes = append(mine, e), bytes+len(e.Body)
			}
		}
		if c.Pace != nil {
			if err := c.Pace(ctx, bytes); err != nil {
				return sum, err
			}
		}
		if err := c.send(ctx, x, mine); err != nil {
			return sum, err
		}
		sum.Entries, sum.Bytes = sum.Entries+uint64(len(mine)), sum.Bytes+uint64(bytes)
	}
	return sum, nil
}

// send sends copies, all at once, and waits until the target has them on its disk. What it does not take is sent again a few times.
func (c *Copier) send(ctx context.Context, x Copying, entries []ledger.Entry) error {
	s := sched.OrReal(c.Ledger.Sched)
	for attempt := 1; len(entries) > 0; attempt++ {
		if c.Before != nil {
			c.Before()
		}
		failed, err := c.sendOnce(ctx, s, x, entries)
		if err == nil {
			return nil
		}
		if attempt == addAttempts || ctx.Err() != nil || !passing(err) {
			return err
		}
		entries = failed
		if err := sched.Sleep(ctx, s, addPause<<(attempt-1)); err != nil {
			return err //nolint:wrapcheck // as a context says it
		}
	}
	return nil
}

// passing reports whether the same may be answered otherwise in a moment.
func passing(err error) bool {
	switch bookiewire.AsError(errors.Unwrap(err)).Code { //nolint:exhaustive // the rest lasts
	case bookiewire.Unknown, bookiewire.Overloaded, bookiewire.Disconnected:
		return true
	}
	return false
}

func (c *Copier) sendOnce(ctx context.Context, s sched.Scheduler, x Copying, entries []ledger.Entry) (failed []ledger.Entry, err error) {
	l := x.Ledger
	term := l.Term
	if l.State == meta.LedgerClosed {
		// A bookie that may have lost entries fences a ledger that never was; and nobody writes to this one any more.
		term = max(term, 1)
	}
	var mu sync.Mutex
	left, done := len(entries), make(chan struct{})
	for _, e := range entries {
		add := &bookiewire.Add{
			Ledger: l.ID, Entry: e.ID, Term: term, Recovery: true, Nonce: l.Nonce, LAC: entry.NoEntry,
			Checksum: entry.Checksum(l.ID, e.ID, e.Body), Body: e.Body,
		}
		c.Ledger.Bookies.Add(x.To, add, func(answer error) {
			mu.Lock()
			defer mu.Unlock()
			if answer != nil {
				failed = append(failed, e)
				err = &AddError{To: x.To, Entry: e.ID, Err: answer}
			}
			if left--; left == 0 {
				close(done)
			}
		})
	}
	if _, ended := s.Wait(ctx, sched.Channels{done}); ended != nil {
		return nil, ended //nolint:wrapcheck // as a context says it
	}
	return failed, err
}
