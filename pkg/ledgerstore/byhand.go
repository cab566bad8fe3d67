package ledgerstore

import (
	"context"
	"log/slog"
	"slices"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// ByHand is a store without goroutines and clock, for a simulation: requests go to the [Store] as ever, and what it
// would have its goroutines do becomes a [Task], which is carried out when whoever drives the store says so. Dones are
// called inline. It is not safe for concurrent use; of the store's methods those that wait (Read with Recovery, WaitLAC,
// Close) must not be used.
type ByHand struct {
	*Store
	busy   bool    // drive is at it
	atOnce bool    // tasks are done as they come up
	fresh  []*Task // since the last call of Tasks
	open   []*Task // not done, in order
	err    error
}

// TaskKind is what a task does.
type TaskKind uint8

// The kinds of tasks.
const (
	TaskWrite TaskKind = iota
	TaskSync
	TaskCheck
	TaskPrepare
	TaskSeal
)

// String names the kind.
func (k TaskKind) String() string {
	return [...]string{"write", "sync", "check", "prepare", "seal"}[k]
}

// Task is something that the store wants done.
type Task struct {
	Kind    TaskKind
	run     func() Event
	outcome Event
	done    bool
}

// Start carries the task out; the store does not know yet. Doing it twice is doing it once.
func (t *Task) Start() {
	if t.outcome == nil {
		t.outcome = t.run()
	}
}

// OpenByHand is [Open], with nothing of it left to do.
func OpenByHand(cfg Config, fs vfs.FS) (*ByHand, error) {
	h := &ByHand{atOnce: true}
	if _, err := open(context.Background(), cfg, fs, slog.New(slog.DiscardHandler), nil, h); err != nil {
		if h.Store != nil {
			h.Abandon()
		}
		return nil, err
	}
	state, err := h.measure()
	if err != nil {
		h.Abandon()
		return nil, err
	}
	h.post(&Space{State: state})
	h.atOnce = false
	if h.err != nil {
		h.Abandon()
		return nil, h.err
	}
	return h, nil
}

func (h *ByHand) take(s *Store) {
	h.Store = s
	s.inbox.drive = h.drive
}

// drive takes in what is in the inbox. What comes up meanwhile is taken in too.
func (h *ByHand) drive() {
	if h.busy || h.core == nil {
		return
	}
	h.busy = true
	defer func() { h.busy = false }()
	for {
		events, _ := h.inbox.take(nil)
		if len(events) == 0 && h.atOnce && len(h.open) > 0 {
			events = append(events, h.finish(h.open[0]))
		}
		if len(events) == 0 {
			return
		}
		for _, ev := range events {
			h.core.Step(ev)
		}
		h.collect()
	}
}

// AtOnce runs f, which may call what waits for the store (SetLimbo, DeleteLedger, CompactOnce): tasks are done as soon as they
// come up.
func (h *ByHand) AtOnce(f func()) {
	h.atOnce = true
	h.drive()
	f()
	h.atOnce = false
}

// collect turns what the core wants into tasks, and calls the Dones.
func (h *ByHand) collect() {
	rd := h.core.Ready()
	if rd.Fatal != nil {
		h.err = rd.Fatal
		h.stop(rd.Fatal)
	}
	add := func(k TaskKind, run func() Event) {
		t := &Task{Kind: k, run: run}
		h.fresh, h.open = append(h.fresh, t), append(h.open, t)
	}
	if b := rd.Append; b != nil {
		add(TaskWrite, func() Event { return h.write(b) })
	}
	for _, b := range rd.Syncs {
		add(TaskSync, func() Event { return &Synced{Batch: b, Err: b.Segment.handle.writer.Sync()} })
	}
	for _, c := range rd.Checks {
		add(TaskCheck, func() Event { return h.answer(c) })
	}
	if rd.Prepare || rd.Reserve {
		add(TaskPrepare, func() Event { return h.prepared(rd.Reserve) })
	}
	for _, seg := range rd.Seals {
		add(TaskSeal, func() Event { return &Sealed{Segment: seg, Err: h.seal(seg)} })
	}
	h.setState(h.core.State())
	h.outbox.push(rd.Replies...)
	h.deliver()
}

// deliver calls the Dones.
func (h *ByHand) deliver() {
	h.outbox.mu.Lock()
	replies := h.outbox.replies
	h.outbox.replies = nil
	h.outbox.mu.Unlock()
	for _, r := range replies {
		r.Do()
	}
}

// Tasks returns the tasks that have come up since the last call.
func (h *ByHand) Tasks() []*Task {
	h.deliver() // refusals that never reached the core
	fresh := h.fresh
	h.fresh = nil
	return fresh
}

// Do carries the task out, unless that was done, and tells the store.
func (h *ByHand) Do(t *Task) {
	if !t.done {
		h.post(h.finish(t))
	}
}

// finish carries a task out and returns what became of it.
func (h *ByHand) finish(t *Task) Event {
	t.Start()
	t.done = true
	h.open = slices.DeleteFunc(h.open, func(o *Task) bool { return o == t })
	return t.outcome
}

// Look reads the disk's usage, as the store does once a second.
func (h *ByHand) Look() { h.look() }

// PendingBytes are the bytes of bodies accepted and not yet durable.
func (h *ByHand) PendingBytes() int64 { return h.core.PendingBytes() }

// Failed is why the store has stopped; nil while it has not.
func (h *ByHand) Failed() error { return h.err }

// Abandon lets go of the directory as the end of the process would: nothing is written or synced.
func (h *ByHand) Abandon() {
	h.cancel()
	for _, seg := range h.segments.list() {
		seg.handle.close()
	}
	_ = h.lock.Close() // its file system may be without power
}
