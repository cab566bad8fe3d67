package topic

import (
	"context"
	"errors"
	"fmt"
	"sort"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// locate returns the position of the entry that holds offset, or of where the first after it is or will be.
func (t *Topic) locate(ctx context.Context, offset entry.Offset) (entry.Position, error) {
	if e, ok := t.cached.holding(offset, t.Next()); ok {
		return e.pos, nil
	}
	for {
		runs := filled(t.c.Runs())
		i := sort.Search(len(runs), func(i int) bool { return runs[i].End > offset })
		if i == len(runs) {
			// At or beyond the end: where the chain goes on.
			if i == 0 {
				return entry.Position{}, nil
			}
			last := runs[i-1]
			at, err := t.c.LastEntry(ctx, last.Ledger)
			if errors.Is(err, chain.ErrTrimmed) {
				continue
			}
			if err != nil {
				return entry.Position{}, fmt.Errorf("locate offset %d: %w", offset, err)
			}
			return entry.Position{Ledger: last.Ledger, Entry: at + 1}, nil
		}
		run := runs[i]
		if offset <= run.First {
			return entry.Position{Ledger: run.Ledger}, nil
		}
		at, _, err := t.search(ctx, run, func(e *frame.Envelope) bool { return e.Base+entry.Offset(e.Span) > offset })
		if errors.Is(err, chain.ErrTrimmed) {
			continue
		}
		if err != nil {
			return entry.Position{}, fmt.Errorf("locate offset %d: %w", offset, err)
		}
		return at, nil
	}
}

// filled drops runs without messages.
func filled(runs []meta.Run) []meta.Run {
	out := runs[:0]
	for _, r := range runs {
		if r.End > r.First {
			out = append(out, r)
		}
	}
	return out
}

// search returns the first entry of a run for which found holds, and its envelope; found must hold for all after it.
// The position after the last entry and a zero envelope if it holds for none.
func (t *Topic) search(ctx context.Context, run meta.Run, found func(*frame.Envelope) bool) (entry.Position, frame.Envelope, error) {
	last, err := t.c.LastEntry(ctx, run.Ledger)
	if err != nil {
		return entry.Position{}, frame.Envelope{}, err //nolint:wrapcheck // the caller does
	}
	var hit frame.Envelope
	lo, hi := entry.EntryID(0), last+1
	for lo < hi {
		mid := lo + (hi-lo)/2
		e, err := t.envelope(ctx, entry.Position{Ledger: run.Ledger, Entry: mid})
		if err != nil {
			return entry.Position{}, frame.Envelope{}, err
		}
		if found(&e) {
			hi, hit = mid, e
		} else {
			lo = mid + 1
		}
	}
	return entry.Position{Ledger: run.Ledger, Entry: lo}, hit, nil
}

// envelope reads the envelope of one entry. Its Producer is not kept.
func (t *Topic) envelope(ctx context.Context, at entry.Position) (frame.Envelope, error) {
	got, _, err := t.c.Read(ctx, at, 1)
	if err != nil {
		return frame.Envelope{}, err //nolint:wrapcheck // the caller does
	}
	if len(got) == 0 || got[0].Position != at {
		return frame.Envelope{}, fmt.Errorf("entry %v: %w", at, chain.ErrTrimmed)
	}
	e, err := parse(at, got[0].Body)
	if err != nil {
		return frame.Envelope{}, err
	}
	e.Envelope.Producer = nil
	return e.Envelope, nil
}

// OffsetAt returns the offset of the first message that the broker stored at or after a time, Unix milliseconds;
// Next's if there is none yet.
func (t *Topic) OffsetAt(ctx context.Context, millis int64) (entry.Offset, error) {
	for {
		end := t.Next()
		runs := filled(t.c.Runs())
		i := sort.Search(len(runs), func(i int) bool { return runs[i].MaxTime >= millis })
		if i == len(runs) {
			return end, nil
		}
		_, e, err := t.search(ctx, runs[i], func(e *frame.Envelope) bool { return e.BrokerTime >= millis })
		if errors.Is(err, chain.ErrTrimmed) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("find offset at %d ms: %w", millis, err)
		}
		if e.Span == 0 {
			return runs[i].End, nil
		}
		return e.Base, nil
	}
}

// OffsetOf returns the offset of the message at a position. A position before the first entry gives the earliest
// offset, one that is not stored yet, or was never, that of the first message after it.
func (t *Topic) OffsetOf(ctx context.Context, p entry.Position) (entry.Offset, error) {
	for {
		runs := filled(t.c.Runs())
		i := sort.Search(len(runs), func(i int) bool { return runs[i].Ledger >= p.Ledger })
		if i == len(runs) {
			return t.Next(), nil
		}
		if runs[i].Ledger > p.Ledger || p.Entry < 0 {
			return runs[i].First, nil
		}
		last, err := t.c.LastEntry(ctx, p.Ledger)
		if err == nil && p.Entry > last {
			if i+1 < len(runs) {
				return runs[i+1].First, nil
			}
			return runs[i].End, nil
		}
		var e frame.Envelope
		if err == nil {
			e, err = t.envelope(ctx, entry.Position{Ledger: p.Ledger, Entry: p.Entry})
		}
		if errors.Is(err, chain.ErrTrimmed) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("find offset of %v: %w", p, err)
		}
		return e.Base + entry.Offset(min(max(p.Batch, 0), int32(e.Span-1))), nil
	}
}

// PositionOf returns the position of a message. An offset before the earliest gives the earliest message's, one
// at or after the end, where the next entry is expected.
func (t *Topic) PositionOf(ctx context.Context, offset entry.Offset) (entry.Position, error) {
	at, err := t.locate(ctx, offset)
	if err != nil || offset >= t.Next() || offset < t.Earliest() {
		return at, err
	}
	e, err := t.envelope(ctx, at)
	if err != nil {
		return at, fmt.Errorf("find position of offset %d: %w", offset, err)
	}
	if offset > e.Base {
		at.Batch = int32(offset - e.Base)
	}
	return at, nil
}

// StoredAt returns when the broker stored the message at an offset, Unix milliseconds; of one that is trimmed, when the
// earliest was stored. If storage does not tell, because ctx ends or bookies are away, it is no later than what is
// returned, and exact is false. ok is false if there is no such message yet.
func (t *Topic) StoredAt(ctx context.Context, offset entry.Offset) (millis int64, exact, ok bool) {
	if offset >= t.Next() {
		return 0, false, false
	}
	if c, ok := t.cached.holding(offset, t.Next()); ok {
		if e, err := parse(c.pos, c.body); err == nil {
			return e.Envelope.BrokerTime, true, true
		}
	}
	at, err := t.locate(ctx, offset)
	if err == nil {
		var e frame.Envelope
		if e, err = t.envelope(ctx, at); err == nil {
			return e.BrokerTime, true, true
		}
	}
	runs := filled(t.c.Runs())
	i := sort.Search(len(runs), func(i int) bool { return runs[i].End > offset })
	if i == len(runs) {
		return 0, false, false // trimmed meanwhile
	}
	return runs[i].MaxTime, false, true
}
