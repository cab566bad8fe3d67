package topic

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// TrimPolicy says what may be deleted. Whole closed ledgers go, oldest first.
type TrimPolicy struct {
	// Floor: every durable subscription has acknowledged what lies below. Without subscriptions, Next.
	Floor entry.Offset
	// What is acknowledged is kept until it is older than RetainTime, or the topic holds more than RetainBytes,
	// whichever comes first. Zero sets no bound; both zero keep nothing. A negative one keeps for ever.
	RetainTime  time.Duration
	RetainBytes int64
	// What is older than LimitTime, or beyond LimitBytes, goes whether it is acknowledged or not. Zero: no limit.
	LimitTime  time.Duration
	LimitBytes int64
}

// victims returns how many of the runs, from the oldest on, may go. A run without messages always may.
func (p TrimPolicy) victims(runs []meta.Run, now time.Time) int {
	total := int64(0)
	for _, r := range runs {
		total += r.Bytes
	}
	n := 0
	for ; n < len(runs) && runs[n].Closed; n++ {
		r := runs[n]
		age := now.Sub(time.UnixMilli(r.MaxTime))
		switch {
		case r.End == r.First:
		case p.LimitTime > 0 && age > p.LimitTime, p.LimitBytes > 0 && total > p.LimitBytes:
		case r.End > p.Floor:
			return n
		case p.RetainTime < 0 || p.RetainBytes < 0:
			return n
		case p.RetainTime == 0 && p.RetainBytes == 0:
		case p.RetainTime > 0 && age > p.RetainTime, p.RetainBytes > 0 && total > p.RetainBytes:
		default:
			return n
		}
		total -= r.Bytes
	}
	return n
}

// Trim deletes what policy lets go, after a snapshot of the producers' sequences if those entries are not covered by
// one. It returns the earliest offset left, and the bytes freed.
func (t *Topic) Trim(ctx context.Context, policy TrimPolicy) (earliest entry.Offset, freed int64, err error) {
	runs := t.c.Runs()
	now := t.env.Sched.Now()
	n := policy.victims(runs, now)
	if n == len(runs)-1 && !runs[n].Closed {
		// A disk may be full of open ledgers, of which nothing is wanted any more.
		closed := slices.Clone(runs)
		closed[n].Closed = true
		if policy.victims(closed, now) == len(closed) {
			t.c.Retire()
		}
	}
	if n == 0 {
		return t.Earliest(), 0, nil
	}
	end := runs[n-1].End
	for i := n - 1; i >= 0 && runs[i].End == runs[i].First; i-- {
		end = runs[i].First // empty runs need no snapshot
	}
	t.mu.Lock()
	covered := t.snapped
	// Without a producer that asked for deduplication, at this owner, the first one, there is nothing to cover.
	none := t.opened == 0 && (t.dd == nil || len(t.dd.producers) == 0 && len(t.dd.forgotten) == 0)
	t.mu.Unlock()
	if t.cfg.Snapshots != nil && end > covered && runs[0].First != end && !none {
		if err := t.Snapshot(ctx); err != nil {
			return t.Earliest(), 0, fmt.Errorf("trim topic: %w", err)
		}
	}
	gone := make(map[entry.LedgerID]bool, n)
	for _, r := range runs[:n] {
		gone[r.Ledger] = true
	}
	deleted, err := t.c.Trim(ctx, func(r meta.Run) bool { return gone[r.Ledger] })
	for _, r := range deleted {
		freed += r.Bytes
	}
	t.env.Metrics.trimmed(freed)
	if err != nil {
		return t.Earliest(), freed, fmt.Errorf("trim topic: %w", err)
	}
	return t.Earliest(), freed, nil
}

// Bytes returns the bytes stored, each entry counted once.
func (t *Topic) Bytes() int64 {
	total := int64(0)
	for _, r := range t.c.Runs() {
		total += r.Bytes
	}
	return total
}

// BytesFrom returns the bytes from an offset on: the backlog of a subscription. Within a ledger it assumes messages
// of equal size.
func (t *Topic) BytesFrom(from entry.Offset) int64 {
	total := int64(0)
	for _, r := range t.c.Runs() {
		switch {
		case r.First >= from:
			total += r.Bytes
		case r.End > from:
			total += int64(float64(r.Bytes) * float64(r.End-from) / float64(r.End-r.First))
		}
	}
	return total
}

// OffsetKeeping returns the lowest offset from which on at most bytes are stored: where a backlog quota evicts to. It
// makes the same assumption.
func (t *Topic) OffsetKeeping(bytes int64) entry.Offset {
	runs := t.c.Runs()
	offset := t.Next()
	for i := len(runs) - 1; i >= 0; i-- {
		r := runs[i]
		if r.Bytes <= bytes {
			bytes -= r.Bytes
			offset = min(offset, r.First)
			continue
		}
		if r.End > r.First {
			keep := entry.Offset(float64(r.End-r.First) * float64(bytes) / float64(r.Bytes))
			return r.End - keep
		}
		return offset
	}
	return offset
}
