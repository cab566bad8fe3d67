package topic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Reader goes through a topic from an offset on. It holds no resources, needs no closing, and is used by one
// goroutine at a time; readers of one topic are independent.
type Reader struct {
	t    *Topic
	next entry.Offset
	// at is where next stands in the chain, if known.
	at    entry.Position
	known bool
	buf   []cachedEntry
}

// Status says why TryNext returned no entries.
type Status uint8

// The statuses.
const (
	// Ready: entries were returned.
	Ready Status = iota
	// AtEnd: there is nothing after the reader yet. A subscribed channel tells when there is.
	AtEnd
	// NeedsRead: the next entry has to be read from bookies, which Next does.
	NeedsRead
)

// NewReader returns a reader whose first entry holds from, or is the first after it.
func (t *Topic) NewReader(from entry.Offset) *Reader { return &Reader{t: t, next: from} }

// Offset returns the offset after the last entry returned.
func (r *Reader) Offset() entry.Offset { return r.next }

// Seek moves the reader to an offset.
func (r *Reader) Seek(to entry.Offset) { r.next, r.known = to, false }

// TryNext returns entries that are cached, at least one if the next one is, and at most about maxBytes beyond it. It
// never blocks. The first entry may begin before the reader's offset, if that lies within a batch.
func (r *Reader) TryNext(maxBytes int) ([]Entry, Status, error) {
	return r.try(r.t.Next(), maxBytes)
}

// Read returns what is visible and begins before until, from the cache or from bookies: at least one entry if there is
// one, and at most about maxBytes beyond it. It does not wait for more. Where the topic was trimmed past the reader,
// it goes on with the earliest entry; Offset tells where it got to.
func (r *Reader) Read(ctx context.Context, until entry.Offset, maxBytes int) ([]Entry, error) {
	out, status, err := r.try(min(until, r.t.Next()), maxBytes)
	if err != nil || status != NeedsRead {
		return out, err
	}
	if out, err = r.fetch(ctx, maxBytes); err != nil {
		return nil, err
	}
	for i := range out {
		if out[i].Envelope.Base >= until {
			if i == 0 { // nothing is left before until
				r.Seek(out[0].Envelope.Base)
			} else {
				r.Seek(out[i-1].end())
			}
			return out[:i], nil
		}
	}
	return out, nil
}

// end is the offset after the entry.
func (e *Entry) end() entry.Offset { return e.Envelope.Base + entry.Offset(e.Envelope.Span) }

// try returns cached entries that begin before end.
func (r *Reader) try(end entry.Offset, maxBytes int) ([]Entry, Status, error) {
	if r.next >= end {
		return nil, AtEnd, nil
	}
	r.buf = r.t.cached.read(r.buf[:0], r.next, end, maxBytes)
	if len(r.buf) == 0 {
		return nil, NeedsRead, nil
	}
	out := make([]Entry, len(r.buf))
	for i, c := range r.buf {
		e, err := parse(c.pos, c.body)
		if err != nil {
			return nil, Ready, err
		}
		out[i] = e
	}
	clear(r.buf)
	last := &out[len(out)-1]
	r.next = last.end()
	r.at, r.known = entry.Position{Ledger: last.Position.Ledger, Entry: last.Position.Entry + 1}, true
	return out, Ready, nil
}

// Next is TryNext, but reads from bookies what is not cached, and waits for entries if there are none yet. It ends
// with ctx, or when the topic is lost. If the topic was trimmed past the reader, it goes on with the earliest entry.
func (r *Reader) Next(ctx context.Context, maxBytes int) ([]Entry, error) {
	for {
		got, status, err := r.TryNext(maxBytes)
		switch {
		case err != nil || status == Ready:
			return got, err
		case status == NeedsRead:
			if got, err = r.fetch(ctx, maxBytes); err != nil || len(got) > 0 {
				return got, err
			}
			if err := r.pause(ctx); err != nil {
				return nil, err
			}
			continue
		}
		if err := r.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// pause waits a moment when what is visible cannot be read: the ledger is being opened, or the topic lost.
func (r *Reader) pause(ctx context.Context) error {
	passed, stop := sched.After(r.t.env.Sched, 5*time.Millisecond)
	defer stop()
	switch i, err := r.t.env.Sched.Wait(ctx, sched.Channels{passed, r.t.Lost()}); {
	case err != nil:
		return fmt.Errorf("read topic: %w", err)
	case i == 1:
		return fmt.Errorf("read topic: %w", r.t.Err())
	}
	return nil
}

// wait returns once something lies after the reader.
func (r *Reader) wait(ctx context.Context) error {
	woken := make(chan struct{}, 1)
	cancel := r.t.Subscribe(woken)
	defer cancel()
	for r.next >= r.t.Next() {
		switch i, err := r.t.env.Sched.Wait(ctx, sched.Channels{woken, r.t.Lost()}); {
		case err != nil:
			return fmt.Errorf("read topic: %w", err)
		case i == 1:
			return fmt.Errorf("read topic: %w", r.t.Err())
		}
	}
	return nil
}

// Subscribe has a token put into ch, unless it is full, whenever more is visible, and when the topic is lost. What is
// visible then is to be asked for: tokens may stand for nothing new. ch needs room for one; cancel ends it.
func (t *Topic) Subscribe(ch chan<- struct{}) (cancel func()) {
	return t.Watch(func() {
		select {
		case ch <- struct{}{}:
		default: // it has one to see yet
		}
	})
}

// watcher is somebody to be told.
type watcher struct{ tell func() }

// Watch is Subscribe for whoever has no goroutine that waits: tell is called instead, under the topic's lock. It must not block,
// nor call the topic.
func (t *Topic) Watch(tell func()) (cancel func()) {
	w := &watcher{tell: tell}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watchers = append(t.watchers, w)
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if i := slices.Index(t.watchers, w); i >= 0 {
			last := len(t.watchers) - 1
			t.watchers[i] = t.watchers[last]
			t.watchers[last] = nil
			t.watchers = t.watchers[:last]
		}
	}
}

// fetch reads from bookies, or finds nothing visible after the reader.
func (r *Reader) fetch(ctx context.Context, maxBytes int) ([]Entry, error) {
	for {
		if !r.known {
			at, err := r.t.locate(ctx, r.next)
			if err != nil {
				return nil, err
			}
			r.at, r.known = at, true
		}
		got, next, err := r.t.c.Read(ctx, r.at, maxBytes)
		if errors.Is(err, chain.ErrTrimmed) {
			r.known = false
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read topic from offset %d: %w", r.next, err)
		}
		if len(got) == 0 {
			return nil, nil
		}
		r.t.env.Metrics.readThrough(len(got))
		r.at = next
		out := make([]Entry, 0, len(got))
		for _, g := range got {
			e, err := parse(g.Position, g.Body)
			if err != nil {
				return nil, err
			}
			out = append(out, e)
		}
		last := &out[len(out)-1]
		r.next = last.end()
		return out, nil
	}
}
