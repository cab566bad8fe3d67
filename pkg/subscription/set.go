package subscription

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// Set is a topic's subscriptions, loaded from the bundle's state log on first use, and its readers, of which
// nothing is stored. While there is any consumer, one goroutine tells their dispatch of new data; it exists while there is some to
// tell of. A set is safe for concurrent use.
type Set struct {
	b   *Bundle
	cfg Config

	mu      sync.Mutex
	ended   bool
	loading chan struct{} // closed when the load under way ends; nil without one
	loaded  bool
	byName  map[string]*Subscription
	sorted  []*Subscription // of byName; nil: to be made
	// unsure are subscriptions whose deletion failed half-way: the state log says whether they are there.
	unsure  map[string]struct{}
	damaged error // of a subscription that cannot be loaded, whatever its name is
	// trimming is closed when the trim under way ends, which deletes nothing from below on; nil without one.
	trimming chan struct{}
	below    entry.Offset
	readers  []*Consumer

	consumers   int
	unsubscribe func() // while there are any

	pump pump
}

// NewSet returns the subscriptions of a topic that has just been opened. It must be closed or dropped, and then forgotten.
func (b *Bundle) NewSet(cfg Config) *Set {
	return &Set{b: b, cfg: cfg, byName: map[string]*Subscription{}, unsure: map[string]struct{}{}}
}

// Load reads the subscriptions from the state log, once, and those again of which it alone knows whether they are there.
func (s *Set) Load(ctx context.Context) error {
	for {
		s.mu.Lock()
		if s.loaded && len(s.unsure) == 0 {
			s.mu.Unlock()
			return nil
		}
		if wait := s.loading; wait != nil {
			s.mu.Unlock()
			if _, err := s.b.env.Sched.Wait(ctx, sched.Channels{wait}); err != nil {
				return unavailable("load subscriptions of topic", s.cfg.Name, err)
			}
			continue
		}
		done := make(chan struct{})
		s.loading = done
		s.mu.Unlock()

		found, damaged, err := s.read(ctx)
		s.mu.Lock()
		s.loading = nil
		close(done)
		switch {
		case err != nil:
		case s.ended:
			err = s.cfg.Gone() // what was read may be another cursor's by now
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
		s.sorted = nil
		s.mu.Unlock()
		return err
	}
}

func (s *Set) read(ctx context.Context) (found map[string]*Subscription, damaged, err error) {
	log, err := s.b.env.State(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := s.b.settle(ctx, &s.cfg); err != nil {
		return nil, nil, err
	}
	live, err := log.Load(ctx, s.cfg.Owner)
	if err != nil {
		return nil, nil, fmt.Errorf("load subscriptions of topic %s: %w", s.cfg.Name, err)
	}
	records := make([]cursor.Record, 0, len(live))
	for _, r := range live {
		records = append(records, cursor.Record{Kind: r.Kind, Key: r.Key, Value: r.Value})
	}
	groups, err := cursor.Group(records)
	if err != nil {
		return nil, nil, fmt.Errorf("load subscriptions of topic %s: %w", s.cfg.Name, err)
	}
	found = map[string]*Subscription{}
	byUUID := slices.SortedFunc(maps.Keys(groups), func(a, b entry.UUID) int { return slices.Compare(a[:], b[:]) })
	for _, id := range byUUID {
		group := groups[id]
		cur, err := cursor.Load(group, s.b.env.Sched.Now().UnixMilli())
		switch {
		case errors.Is(err, cursor.ErrDeleted):
			if err := s.b.append(ctx, log, recordsOf(s.cfg.Owner, cursor.Purge(group))); err != nil {
				return nil, nil, fmt.Errorf("finish deleting a subscription of topic %s: %w", s.cfg.Name, err)
			}
		case err != nil:
			damaged = err
			s.b.env.Log.Error("subscription is damaged and refused; other subscriptions go on, and nothing is trimmed", "topic", s.cfg.Name, "error", err)
		default:
			found[cur.Meta().Name] = newSubscription(s, cur)
		}
	}
	return found, damaged, nil
}

// Get returns a subscription by name, or an error with NotFound.
func (s *Set) Get(ctx context.Context, name string) (*Subscription, error) {
	sub, err := s.find(ctx, name)
	if err == nil && sub == nil {
		err = refuse(NotFound, "topic %s has no subscription %s: penstock subscription list %s", s.cfg.Name, name, s.cfg.Name)
	}
	return sub, err
}

// find returns a subscription by name; nil if there certainly is none.
func (s *Set) find(ctx context.Context, name string) (*Subscription, error) {
	if err := s.Load(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub, ok := s.byName[name]; ok {
		return sub, nil
	}
	if s.damaged != nil {
		return nil, fmt.Errorf("subscription %s of topic %s: %w", name, s.cfg.Name, s.damaged)
	}
	return nil, nil //nolint:nilnil // as it says
}

// Ensure returns a subscription, creating it at what start returns. It is durable when Ensure returns.
func (s *Set) Ensure(ctx context.Context, name string, start func(context.Context) (entry.Offset, error)) (sub *Subscription, created bool, err error) {
	if err := checkName(name); err != nil {
		return nil, false, err
	}
	if sub, err = s.find(ctx, name); err != nil {
		return nil, false, err
	}
	if sub != nil {
		return sub, false, sub.awaitMade(ctx) // who made it may wait for that still
	}
	at, err := start(ctx)
	if err != nil {
		return nil, false, err
	}
	if at, err = s.besideTrim(ctx, at); err != nil {
		return nil, false, err
	}
	cur, err := cursor.New(cursor.Meta{UUID: s.b.newUUID(), Name: name, Initial: at, Created: s.b.env.Sched.Now().UnixMilli()})
	if err != nil {
		s.mu.Unlock()
		return nil, false, refuse(Invalid, "create subscription on %s: %v", s.cfg.Name, err)
	}
	switch existing, ok := s.byName[name]; {
	case s.ended:
		s.mu.Unlock()
		return nil, false, s.cfg.Gone()
	case ok: // somebody else was faster
		sub = existing
	default:
		sub, created = newSubscription(s, cur), true
		sub.made = cur.Ticket()
		s.byName[name], s.sorted = sub, nil
	}
	s.mu.Unlock()
	return sub, created, sub.awaitMade(ctx)
}

func (b *Bundle) newUUID() entry.UUID {
	var u entry.UUID
	binary.BigEndian.PutUint64(u[:8], b.env.Sched.Uint64())
	binary.BigEndian.PutUint64(u[8:], b.env.Sched.Uint64())
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// MaxName is the longest name of a subscription, in bytes.
const MaxName = 200

func checkName(name string) error {
	switch {
	case name == "":
		return refuse(Invalid, "a subscription needs a name")
	case len(name) > MaxName:
		return refuse(Invalid, "subscription name of %d bytes, at most %d are allowed", len(name), MaxName)
	}
	if i := strings.IndexFunc(name, func(r rune) bool { return r <= ' ' || r == '/' || r == 0x7f || r == '�' }); i >= 0 {
		return refuse(Invalid, "subscription name %q: character %q is not allowed", name, name[i:i+1])
	}
	return nil
}

// List returns the subscriptions by name.
func (s *Set) List(ctx context.Context) ([]*Subscription, error) {
	if err := s.Load(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list()), nil
}

// list returns the subscriptions by name. The lock is held; the slice is the set's, and does not change.
func (s *Set) list() []*Subscription {
	if s.sorted == nil {
		s.sorted = slices.SortedFunc(maps.Values(s.byName), func(a, b *Subscription) int { return strings.Compare(a.name, b.name) })
	}
	return s.sorted
}

// Known returns the subscriptions by name if they are loaded.
func (s *Set) Known() ([]*Subscription, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list()), s.loaded && len(s.unsure) == 0
}

// Remove forgets a subscription for good. One with consumers is refused without force. Nobody is told that it is gone before
// that is durable: until then its consumers go on, and changes are to be tried again.
func (s *Set) Remove(ctx context.Context, name string, force bool) error {
	sub, err := s.Get(ctx, name)
	if err != nil {
		return err
	}
	if connected := len(sub.Consumers()); connected > 0 && !force {
		return refuse(Refused, "subscription %s of %s has %d consumers: disconnect them, or use --force", name, s.cfg.Name, connected)
	}
	if err := sub.occupy(ctx); err != nil { // a flush that overtook the deletion would leave pages behind that nobody owns
		return err
	}
	sub.mu.Lock()
	sub.deleting = true
	records := sub.cur.Delete()
	sub.mu.Unlock()
	err = sub.write(records, (cursor.Batch{Records: records}).Split)
	sub.mu.Lock()
	if err == nil {
		sub.deleted = true
	} else {
		sub.failed = err // the next owner may find it there
	}
	waiting := sub.waiting
	sub.waiting = nil
	gone := sub.refusal()
	sub.leave()
	sub.mu.Unlock()
	for _, w := range waiting {
		w.done(gone)
	}
	sub.disconnect(gone)
	s.mu.Lock()
	delete(s.byName, name)
	s.sorted = nil
	if err != nil {
		s.unsure[name] = struct{}{}
	}
	s.mu.Unlock()
	return err
}

// TrimFloor is the offset below which every subscription has durably acknowledged everything; the topic's end without
// subscriptions. Nothing may be trimmed on an error.
func (s *Set) TrimFloor(ctx context.Context) (entry.Offset, error) {
	floor := s.cfg.Topic.Next() // before the list: a subscription created meanwhile starts at or above it
	subs, err := s.List(ctx)
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

// Trim deletes what of the topic no subscription needs any more and the policy does not ask for either; the policy's floor
// is set here. It does nothing while any subscription cannot be read. Subscriptions that are moved or made meanwhile, to
// where it may delete, wait for it.
func (s *Set) Trim(ctx context.Context, policy topic.TrimPolicy) (floor entry.Offset, freed int64, err error) {
	s.mu.Lock()
	for s.trimming != nil {
		trimming := s.trimming
		s.mu.Unlock()
		if _, err := s.b.env.Sched.Wait(ctx, sched.Channels{trimming}); err != nil {
			return 0, 0, err //nolint:wrapcheck // as a context says it
		}
		s.mu.Lock()
	}
	s.trimming, s.below = make(chan struct{}), s.cfg.Topic.Next()
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		close(s.trimming)
		s.trimming = nil
	}()
	if policy.Floor, err = s.TrimFloor(ctx); err != nil {
		return 0, 0, err
	}
	s.mu.Lock()
	s.below = policy.Floor
	s.mu.Unlock()
	_, freed, err = s.cfg.Topic.Trim(ctx, policy)
	return policy.Floor, freed, err //nolint:wrapcheck // it says what was trimmed
}

// besideTrim waits until no trim is under way that might delete what lies at an offset, and returns the offset, or the
// earliest one that is still stored, with the lock held: what needs it from now on is seen by the next trim. On an error
// the lock is not held.
func (s *Set) besideTrim(ctx context.Context, at entry.Offset) (entry.Offset, error) {
	s.mu.Lock()
	for s.trimming != nil && at < s.below {
		trimming := s.trimming
		s.mu.Unlock()
		if _, err := s.b.env.Sched.Wait(ctx, sched.Channels{trimming}); err != nil {
			return 0, unavailable("wait for what is being trimmed of topic", s.cfg.Name, err)
		}
		s.mu.Lock()
	}
	return max(at, s.cfg.Topic.Earliest()), nil
}

// AttachReader lets a reader in, which is delivered everything from from on. It must be closed.
func (s *Set) AttachReader(stream Stream, from entry.Offset, who dispatch.Consumer) (*Consumer, error) {
	if err := s.attached(); err != nil {
		return nil, err
	}
	env, t := &s.b.env, s.cfg.Topic
	c := &Consumer{set: s, stream: stream}
	c.runner = dispatch.New(dispatch.NewReader(dispatch.DefaultConfig(false), from, t.Next()), dispatch.Env{
		Source: &source{t: t}, Budget: env.Reads, Metrics: env.Dispatch, Log: env.Log, Sched: env.Sched,
	})
	var err error
	if c.id, err = c.runner.AddConsumer(who, stream); err != nil {
		s.detached()
		return nil, err //nolint:wrapcheck // a fresh one has room
	}
	s.mu.Lock()
	ended := s.ended
	if !ended {
		s.readers = append(s.readers, c)
	}
	s.mu.Unlock()
	if ended {
		c.runner.Close()
		s.detached()
		return nil, s.cfg.Gone()
	}
	c.runner.Notify(t.Next())
	return c, nil
}

func (s *Set) removeReader(c *Consumer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.readers, c); i >= 0 {
		s.readers = slices.Delete(s.readers, i, i+1)
	}
}

// Connected counts consumers and readers.
func (s *Set) Connected() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.consumers
}

// attached counts a consumer or reader, and starts the pump with the first.
func (s *Set) attached() error {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return s.cfg.Gone()
	}
	defer s.mu.Unlock()
	s.consumers++
	if s.consumers > 1 {
		return nil
	}
	s.unsubscribe = s.cfg.Topic.Watch(s.more)
	return nil
}

func (s *Set) detached() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.consumers--
	if s.consumers == 0 {
		s.unsubscribe()
	}
}

// pump is what is to be told to dispatch.
type pump struct {
	mu      sync.Mutex
	running bool
	more    bool // since the goroutine has looked
	runners []*dispatch.Runner
}

// more says that the topic goes on. It is called by the topic under its lock.
func (s *Set) more() {
	s.pump.mu.Lock()
	start := !s.pump.running
	s.pump.running, s.pump.more = true, true
	s.pump.mu.Unlock()
	if start && !s.b.env.Go(s.tell) {
		s.pump.mu.Lock()
		defer s.pump.mu.Unlock()
		s.pump.running = false // the broker ends, and delivers no more
	}
}

// tell says to every dispatch how far the topic goes, until there is nothing new. A dispatch that is made meanwhile asks for
// itself.
func (s *Set) tell() {
	p := &s.pump
	for {
		p.mu.Lock()
		if !p.more {
			p.running = false
			p.mu.Unlock()
			return
		}
		p.more = false
		p.mu.Unlock()
		end := s.cfg.Topic.Next()
		p.runners = s.runners(p.runners[:0])
		for _, r := range p.runners {
			r.Notify(end)
		}
		clear(p.runners)
	}
}

func (s *Set) runners(dst []*dispatch.Runner) []*dispatch.Runner {
	s.mu.Lock()
	subs := s.list()
	for _, c := range s.readers {
		dst = append(dst, c.runner)
	}
	s.mu.Unlock()
	for _, sub := range subs {
		sub.take()
		if sub.runner != nil {
			dst = append(dst, sub.runner)
		}
		sub.attaching.Give()
	}
	return dst
}

// end lets nobody in any more and stops delivery. It returns the subscriptions.
func (s *Set) end() []*Subscription {
	s.mu.Lock()
	s.ended = true
	subs := s.list()
	readers := slices.Clone(s.readers)
	s.mu.Unlock()
	for _, r := range readers {
		r.runner.Close()
	}
	for _, sub := range subs {
		sub.end()
	}
	return subs
}

// Close stops delivery and waits, as long as ctx lasts, until what was acknowledged is durable.
func (s *Set) Close(ctx context.Context) {
	for _, sub := range s.end() {
		sub.settled(ctx)
	}
}

// Drop stops delivery at once. Acknowledgements under way end with the state log; if the topic is opened again before,
// its subscriptions are loaded when they have ended.
func (s *Set) Drop() { s.end() }

// unsettled returns the subscriptions that are still being written.
func (s *Set) unsettled() []*Subscription {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*Subscription
	for _, sub := range s.list() {
		sub.mu.Lock()
		if sub.flushing {
			out = append(out, sub)
		}
		sub.mu.Unlock()
	}
	return out
}
