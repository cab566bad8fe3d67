package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// subscriptions are a topic's subscriptions, loaded from the bundle's state log on first use, and its readers, of which
// nothing is stored. One goroutine tells their dispatch of new data; it exists while there is any consumer.
type subscriptions struct {
	t *servedTopic

	mu      sync.Mutex
	ended   bool
	loading chan struct{} // closed when the load under way ends; nil without one
	loaded  bool
	byName  map[string]*subscription
	// unsure are subscriptions whose deletion failed half-way: the state log says whether they are there.
	unsure  map[string]struct{}
	damaged error // of a subscription that cannot be loaded, whatever its name is
	readers map[*consumer]*dispatch.Runner

	consumers int
	stopPump  func()
}

func (s *subscriptions) init(t *servedTopic) {
	s.t, s.byName, s.readers, s.unsure = t, map[string]*subscription{}, map[*consumer]*dispatch.Runner{}, map[string]struct{}{}
}

// load reads the subscriptions from the state log, once, and those again of which it alone knows whether they are there.
func (s *subscriptions) load(ctx context.Context) error {
	for {
		s.mu.Lock()
		if s.loaded && len(s.unsure) == 0 {
			s.mu.Unlock()
			return nil
		}
		if wait := s.loading; wait != nil {
			s.mu.Unlock()
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return unavailable("load subscriptions of topic", s.t.name.String(), ctx.Err())
			}
		}
		done := make(chan struct{})
		s.loading = done
		s.mu.Unlock()

		found, damaged, err := s.read(ctx)
		s.mu.Lock()
		s.loading = nil
		close(done)
		if err == nil && s.ended {
			err = s.t.movedError() // what was read may be another cursor's by now
		}
		switch {
		case err != nil:
		case s.loaded:
			for name := range s.unsure {
				if sub, ok := found[name]; ok {
					s.byName[name] = sub
				}
			}
			clear(s.unsure)
		default:
			s.loaded, s.byName, s.damaged = true, found, damaged
		}
		s.mu.Unlock()
		return err
	}
}

func (s *subscriptions) read(ctx context.Context) (found map[string]*subscription, damaged, err error) {
	log, err := s.t.u.stateLog(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := s.t.u.settle(ctx, s.t.name.String()); err != nil {
		return nil, nil, err
	}
	live, err := log.Load(ctx, s.t.stateOwner())
	if err != nil {
		return nil, nil, fmt.Errorf("load subscriptions of topic %s: %w", s.t.name, err)
	}
	records := make([]cursor.Record, 0, len(live))
	for _, r := range live {
		records = append(records, cursor.Record{Kind: r.Kind, Key: r.Key, Value: r.Value})
	}
	groups, err := cursor.Group(records)
	if err != nil {
		return nil, nil, fmt.Errorf("load subscriptions of topic %s: %w", s.t.name, err)
	}
	found = map[string]*subscription{}
	for _, group := range groups {
		cur, err := cursor.Load(group)
		switch {
		case errors.Is(err, cursor.ErrDeleted):
			if err := appendState(ctx, log, s.t.stateRecords(cursor.Purge(group))); err != nil {
				return nil, nil, fmt.Errorf("finish deleting a subscription of topic %s: %w", s.t.name, err)
			}
		case err != nil:
			damaged = err
			s.t.u.b.log.Error("subscription is damaged and refused; other subscriptions go on, and nothing is trimmed", "topic", s.t.name, "error", err)
		default:
			found[cur.Meta().Name] = newSubscription(s.t, cur)
		}
	}
	return found, damaged, nil
}

// get returns a subscription by name, or one with CODE_NOT_FOUND.
func (s *subscriptions) get(ctx context.Context, name string) (*subscription, error) {
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub, ok := s.byName[name]; ok {
		return sub, nil
	}
	if s.damaged != nil {
		return nil, fmt.Errorf("subscription %s of topic %s: %w", name, s.t.name, s.damaged)
	}
	return nil, refuse(brokerv1.Code_CODE_NOT_FOUND, "topic %s has no subscription %s: penstock subscription list %s", s.t.name, name, s.t.name)
}

// ensure returns a subscription, creating it at start. It is durable when ensure returns.
func (s *subscriptions) ensure(ctx context.Context, name string, start *brokerv1.Start) (sub *subscription, created bool, err error) {
	if err := checkSubscription(name); err != nil {
		return nil, false, err
	}
	sub, err = s.get(ctx, name)
	var missing *refusal
	if err == nil || !errors.As(err, &missing) || missing.code != brokerv1.Code_CODE_NOT_FOUND {
		return sub, false, err
	}
	at, err := startOffset(ctx, s.t.log, start)
	if err != nil {
		return nil, false, err
	}
	cur, err := newCursor(name, at)
	if err != nil {
		return nil, false, invalid("create subscription on %s: %v", s.t.name, err)
	}
	s.mu.Lock()
	switch existing, ok := s.byName[name]; {
	case s.ended:
		s.mu.Unlock()
		return nil, false, s.t.movedError()
	case ok: // somebody else was faster
		sub = existing
	default:
		sub, created = newSubscription(s.t, cur), true
		s.byName[name] = sub
	}
	s.mu.Unlock()
	return sub, created, sub.wait(ctx, func(c *cursor.Cursor) (cursor.Ticket, error) { return c.Ticket(), nil })
}

const maxSubscriptionName = 200

func checkSubscription(name string) error {
	switch {
	case name == "":
		return invalid("a subscription needs a name")
	case len(name) > maxSubscriptionName:
		return invalid("subscription name of %d bytes, at most %d are allowed", len(name), maxSubscriptionName)
	}
	if i := strings.IndexFunc(name, func(r rune) bool { return r <= ' ' || r == '/' || r == 0x7f || r == '�' }); i >= 0 {
		return invalid("subscription name %q: character %q is not allowed", name, name[i:i+1])
	}
	return nil
}

// list returns the subscriptions by name.
func (s *subscriptions) list(ctx context.Context) ([]*subscription, error) {
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*subscription, 0, len(s.byName))
	for _, name := range slices.Sorted(maps.Keys(s.byName)) {
		out = append(out, s.byName[name])
	}
	return out, nil
}

// remove forgets a subscription for good.
func (s *subscriptions) remove(ctx context.Context, name string, force bool) error {
	sub, err := s.get(ctx, name)
	if err != nil {
		return err
	}
	sub.attaching.Lock()
	connected := len(sub.consumers)
	sub.attaching.Unlock()
	if connected > 0 && !force {
		return refuse(brokerv1.Code_CODE_REFUSED, "subscription %s of %s has %d consumers: disconnect them, or use --force", name, s.t.name, connected)
	}
	if err := sub.occupy(ctx); err != nil { // a flush that overtook the deletion would leave pages behind that nobody owns
		return err
	}
	sub.mu.Lock()
	sub.deleted = true
	records := sub.cur.Delete()
	waiting := sub.waiting
	sub.waiting = nil
	gone := sub.refusal()
	sub.mu.Unlock()
	for _, w := range waiting {
		w.done(gone)
	}
	sub.disconnect(gone)
	err = sub.write(records, (cursor.Batch{Records: records}).Split)
	sub.mu.Lock()
	sub.leave()
	sub.mu.Unlock()
	s.mu.Lock()
	delete(s.byName, name)
	if err != nil {
		s.unsure[name] = struct{}{}
	}
	s.mu.Unlock()
	return err
}

// known returns the subscriptions if they are loaded.
func (s *subscriptions) known() ([]*subscription, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.byName)), s.loaded && len(s.unsure) == 0
}

// trimFloor is the offset below which every subscription has durably acknowledged everything; the topic's end without
// subscriptions. Nothing may be trimmed on an error.
func (s *subscriptions) trimFloor(ctx context.Context) (entry.Offset, error) {
	floor := s.t.log.Next() // before the list: a subscription created meanwhile starts at or above it
	subs, err := s.list(ctx)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	damaged := s.damaged
	s.mu.Unlock()
	if damaged != nil {
		return 0, damaged
	}
	for _, sub := range subs {
		floor = min(floor, sub.trimFloor())
	}
	return floor, nil
}

// attached counts a consumer or reader, and starts the pump with the first.
func (s *subscriptions) attached() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return s.t.movedError()
	}
	s.consumers++
	if s.consumers > 1 {
		return nil
	}
	wake := make(chan struct{}, 1)
	unsubscribe := s.t.log.Subscribe(wake)
	stop := make(chan struct{})
	s.stopPump = func() { unsubscribe(); close(stop) }
	if !s.t.u.b.spawn(func() { s.pump(wake, stop) }) {
		s.consumers--
		unsubscribe()
		return s.t.movedError()
	}
	return nil
}

func (s *subscriptions) detached() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.consumers--
	if s.consumers == 0 {
		s.stopPump()
	}
}

// pump tells every dispatch how far the topic goes. A dispatch that is made meanwhile asks for itself.
func (s *subscriptions) pump(wake <-chan struct{}, stop <-chan struct{}) {
	for {
		end := s.t.log.Next()
		for _, r := range s.runners() {
			r.Notify(end)
		}
		select {
		case <-wake:
		case <-stop:
			return
		}
	}
}

func (s *subscriptions) runners() []*dispatch.Runner {
	s.mu.Lock()
	subs := slices.Collect(maps.Values(s.byName))
	out := slices.Collect(maps.Values(s.readers))
	s.mu.Unlock()
	for _, sub := range subs {
		sub.attaching.Lock()
		if sub.runner != nil {
			out = append(out, sub.runner)
		}
		sub.attaching.Unlock()
	}
	return out
}

// end lets nobody in any more and stops delivery. It returns the subscriptions.
func (s *subscriptions) end() []*subscription {
	s.mu.Lock()
	s.ended = true
	subs := slices.Collect(maps.Values(s.byName))
	readers := slices.Collect(maps.Values(s.readers))
	s.mu.Unlock()
	for _, r := range readers {
		r.Close()
	}
	for _, sub := range subs {
		sub.end()
		sub.attaching.Lock()
		runner := sub.runner
		sub.attaching.Unlock()
		if runner != nil {
			runner.Close()
		}
	}
	return subs
}

// close stops delivery and waits until what was acknowledged is durable.
func (s *subscriptions) close(ctx context.Context) { s.settle(ctx, s.end()) }

func (s *subscriptions) settle(ctx context.Context, subs []*subscription) {
	for _, sub := range subs {
		sub.settled(ctx)
	}
}

// drop stops delivery at once. Acknowledgements under way end with the state log; if the topic is opened again before,
// its subscriptions are loaded when they have ended.
func (s *subscriptions) drop() { s.end() }

// unsettled returns the subscriptions that are still being written.
func (s *subscriptions) unsettled() []*subscription {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*subscription
	for _, sub := range s.byName {
		sub.mu.Lock()
		if sub.flushing {
			out = append(out, sub)
		}
		sub.mu.Unlock()
	}
	return out
}

// source reads a topic for one dispatch.
type source struct {
	t *servedTopic
	r *topic.Reader
}

// Read returns entries from the one that holds from on.
func (s *source) Read(ctx context.Context, from, until entry.Offset, maxBytes int) ([]dispatch.Entry, entry.Offset, error) {
	if s.r == nil {
		s.r = s.t.log.NewReader(from)
	} else if s.r.Offset() != from {
		s.r.Seek(from)
	}
	read, err := s.r.Read(ctx, until, maxBytes)
	if err != nil {
		return nil, from, err //nolint:wrapcheck // it says what was read
	}
	out := make([]dispatch.Entry, len(read))
	for i := range read {
		e := &read[i]
		out[i] = dispatch.Entry{
			Offset: e.Envelope.Base, Span: e.Envelope.Span, Position: e.Position, BrokerTime: e.Envelope.BrokerTime, Frame: e.Frame,
		}
	}
	return out, s.r.Offset(), nil
}

// forgetState deletes what the state log has of the topic, once nothing of it is being written any more.
func (t *servedTopic) forgetState(ctx context.Context) error {
	log, err := t.u.stateLog(ctx)
	if err != nil {
		return err
	}
	if err := t.u.settle(ctx, t.name.String()); err != nil {
		return err
	}
	return deleteState(ctx, log, t.stateOwner())
}

func deleteState(ctx context.Context, log *statelog.Log, owner string) error {
	done := make(chan error, 1)
	if err := log.DeleteOwner(ctx, owner, func(err error) { done <- err }); err != nil {
		return err //nolint:wrapcheck // it names the owner
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
}
