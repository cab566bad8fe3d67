package topic

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// replayBytes is how much is read at a time to rebuild producers' sequences.
const replayBytes = 1 << 20

// alone waits until nobody has the slot any more, and takes it; or returns without it once done holds. Whoever has it
// calls leave.
func (t *Topic) alone(ctx context.Context, slot *chan struct{}, done func() bool) (took bool, err error) {
	for {
		t.mu.Lock()
		running := *slot
		finished := done()
		if running == nil && !finished {
			*slot = make(chan struct{})
		}
		t.mu.Unlock()
		if finished || running == nil {
			return !finished, nil
		}
		if _, err := t.env.Sched.Wait(ctx, sched.Channels{running}); err != nil {
			return false, err //nolint:wrapcheck // the caller does
		}
	}
}

// leave frees a slot. mu is held.
func leave(slot *chan struct{}) {
	close(*slot)
	*slot = nil
}

// loadDedup rebuilds what is known of producers: the last snapshot, then the entries after it up to where this owner
// began. Entries of this owner need no replay: a producer with deduplication is let in after the load, so its
// entries are counted as they are confirmed. One load runs at a time; others wait for it.
func (t *Topic) loadDedup(ctx context.Context) error {
	took, err := t.alone(ctx, &t.loading, func() bool { return t.dd != nil })
	if err != nil {
		return fmt.Errorf("load producers' sequences: %w", err)
	}
	if !took {
		return nil
	}
	dd, at, err := t.rebuild(ctx)
	t.mu.Lock()
	leave(&t.loading)
	if err == nil {
		t.dd, t.ddSince, t.snapped = dd, t.env.Sched.Now(), at
	}
	t.mu.Unlock()
	if err != nil {
		return fmt.Errorf("load producers' sequences: %w", err)
	}
	return nil
}

func (t *Topic) rebuild(ctx context.Context) (*dedup, entry.Offset, error) {
	dd := newDedup()
	var at entry.Offset
	if t.cfg.Snapshots != nil {
		records, err := t.cfg.Snapshots.Load(ctx)
		if err != nil {
			return nil, 0, fmt.Errorf("load snapshot: %w", err)
		}
		if at, err = dd.load(records); err != nil {
			return nil, 0, err
		}
	}
	r := t.NewReader(at)
	for r.Offset() < t.opened {
		entries, err := r.fetch(ctx, replayBytes)
		if err != nil {
			return nil, 0, fmt.Errorf("replay from offset %d: %w", r.Offset(), err)
		}
		if len(entries) == 0 {
			break // trimmed to its end
		}
		for i := range entries {
			if entries[i].Envelope.Base < t.opened {
				dd.replay(&entries[i].Envelope)
			}
		}
	}
	return dd, at, nil
}

// note makes a producer's incarnation known to every later owner. Those that are let in meanwhile go with it.
func (t *Topic) note(ctx context.Context, p *Producer) error {
	if p.state == nil || t.cfg.Snapshots == nil {
		return nil
	}
	took, err := t.alone(ctx, &t.saving, func() bool { return p.state.durable>>GenerationShift >= p.epoch>>GenerationShift })
	if err != nil {
		return fmt.Errorf("note the incarnation: %w", err)
	}
	if !took {
		return nil
	}
	t.mu.Lock()
	if err := t.err; err != nil {
		leave(&t.saving)
		t.mu.Unlock()
		return err
	}
	notes, records := t.dd.notes()
	t.mu.Unlock()
	err = t.cfg.Snapshots.Save(ctx, records)
	t.mu.Lock()
	defer t.mu.Unlock()
	leave(&t.saving)
	if err != nil {
		return fmt.Errorf("note the incarnation: %w: %w", ErrUnavailable, err)
	}
	t.dd.noted(notes)
	return nil
}

// Refuse lets no producer and no batch in any more, and returns once nothing is being written to the snapshot store: what
// is there may be deleted then.
func (t *Topic) Refuse(ctx context.Context) error {
	t.refuse(ErrClosed)
	if _, err := t.alone(ctx, &t.saving, func() bool { return t.saving == nil }); err != nil {
		return fmt.Errorf("close topic to producers: %w", err)
	}
	return nil
}

// SnapshotDue tells whether so much was appended since the last snapshot that another is worthwhile: the next owner
// reads what lies after it.
func (t *Topic) SnapshotDue() bool {
	if t.cfg.Snapshots == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return int64(t.visible-t.snapped) >= t.cfg.Dedup.SnapshotEntries || t.appended-t.snapBytes >= t.cfg.Dedup.SnapshotBytes
}

// snapshotWorthwhile tells whether a snapshot before closing would spare the next owner anything.
func (t *Topic) snapshotWorthwhile() bool {
	if t.cfg.Snapshots == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.dd != nil && t.visible > t.snapped && (len(t.dd.producers) > 0 || t.snapped > 0)
}

// Snapshot saves what changed of the producers' sequences, complete up to all that is visible now. It forgets
// producers that DedupConfig no longer keeps. Call it when [Topic.SnapshotDue] says so. One is saved at a time: what one
// that fails could not save, a later one must not call complete.
func (t *Topic) Snapshot(ctx context.Context) error {
	if t.cfg.Snapshots == nil {
		return errors.New("snapshot producers' sequences: there is no store")
	}
	if err := t.loadDedup(ctx); err != nil {
		return err
	}
	if _, err := t.alone(ctx, &t.saving, func() bool { return false }); err != nil {
		return fmt.Errorf("save producers' sequences: %w", err)
	}
	t.mu.Lock()
	at, bytes := t.visible, t.appended
	idle := int64(math.MinInt64)
	if since := t.env.Sched.Now().Add(-t.cfg.Dedup.IdleAfter); !since.Before(t.ddSince) {
		idle = since.UnixMilli()
	}
	t.dd.prune(idle, t.cfg.Dedup.MaxProducers)
	records := t.dd.snapshot(at)
	t.mu.Unlock()
	err := t.cfg.Snapshots.Save(ctx, records)
	t.mu.Lock()
	defer t.mu.Unlock()
	leave(&t.saving)
	if err != nil {
		t.dd.unsaved(records)
		return fmt.Errorf("save producers' sequences: %w", err)
	}
	t.env.Metrics.snapshot()
	if at > t.snapped {
		t.snapped, t.snapBytes = at, bytes
	}
	return nil
}

// parse splits a stored body.
func parse(pos entry.Position, body []byte) (Entry, error) {
	env, f, err := frame.ParseEnvelope(body)
	if err != nil {
		return Entry{}, fmt.Errorf("parse entry %v: %w", pos, err)
	}
	return Entry{Position: pos, Envelope: env, Frame: f}, nil
}
