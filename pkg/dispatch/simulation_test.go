package dispatch

import (
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// simulation drives a core with random events, one action at a time, and holds it against a naive model: which
// message is in whose hands.
type simulation struct {
	*world
	rng     *rand.Rand
	cfg     Config
	fresh   func() Core
	ordered bool
	live    []*simConsumer
	active  *simConsumer // of ordered types
	reading *ReadRequest
	stale   []ReadRequest              // abandoned, not answered yet
	delayed map[entry.Offset]time.Time // shared: given back, not yet due
	hold    time.Time                  // ordered: the longest delay asked for
	sends   int
}

type simConsumer struct {
	Consumer
	permits int64
	held    map[entry.Offset]bool
}

func (s *simulation) unacked() int {
	n := 0
	for _, c := range s.live {
		n += len(c.held)
	}
	return n
}

func (s *simulation) sim(id ConsumerID) *simConsumer {
	for _, c := range s.live {
		if c.ID == id {
			return c
		}
	}
	return nil
}

// elect is the rule of who is active, written again.
func (s *simulation) elect(failover bool) {
	if !s.ordered {
		return
	}
	var best *simConsumer
	for _, c := range s.live {
		if best == nil || failover && (c.Priority < best.Priority || c.Priority == best.Priority && c.Name < best.Name) {
			best = c
		}
	}
	if s.active != nil && best != s.active {
		clear(s.active.held)
	}
	s.active = best
}

// limited says why a consumer may get nothing, as the limits read.
func (s *simulation) limited(c *simConsumer) Reason {
	switch {
	case c.permits <= 0:
		return ReasonNoPermits
	case s.cfg.MaxUnackedPerConsumer > 0 && len(c.held) >= int(s.cfg.MaxUnackedPerConsumer):
		return ReasonUnackedConsumer
	case s.cfg.MaxUnackedPerSubscription > 0 && s.unacked() >= int(s.cfg.MaxUnackedPerSubscription):
		return ReasonUnackedSubscription
	}
	return ReasonNone
}

func (s *simulation) deliver(id ConsumerID, deliveries []Delivery) {
	c := s.sim(id)
	if c == nil {
		s.t.Fatalf("sent to consumer %d, who is gone", id)
	}
	if s.ordered && c != s.active {
		s.t.Fatalf("sent to %s, who is not active", c.Name)
	}
	if len(deliveries) == 0 {
		s.t.Fatal("sent nothing")
	}
	s.sends++
	for i := range deliveries {
		d := &deliveries[i]
		if r := s.limited(c); r != ReasonNone {
			s.t.Fatalf("sent %s to %s against %s", describeDelivery(d), c.Name, r)
		}
		skip := func(o entry.Offset) bool {
			return slices.ContainsFunc(d.Skip, func(r cursor.Range) bool { return r.Contains(o) })
		}
		n := 0
		for o := d.Offset; o < d.Range().End; o++ {
			if skip(o) {
				continue
			}
			n++
			if s.acks.Acked(o) {
				s.t.Fatalf("%s holds acknowledged %d", describeDelivery(d), o)
			}
			if o >= s.end {
				s.t.Fatalf("%d is beyond the end", o)
			}
			for _, other := range s.live {
				if other.held[o] {
					s.t.Fatalf("%d is in the hands of %s", o, other.Name)
				}
			}
			if at, ok := s.delayed[o]; ok {
				if at.After(s.now) {
					s.t.Fatalf("%d is delivered before its time", o)
				}
				delete(s.delayed, o)
			}
			if s.ordered {
				for before := s.acks.Floor(); before < o; before++ {
					if !s.acks.Acked(before) && !c.held[before] {
						s.t.Fatalf("%d is delivered before %d", o, before)
					}
				}
			}
			c.held[o] = true
		}
		if n == 0 {
			s.t.Fatalf("%s has nothing for the consumer", describeDelivery(d))
		}
		c.permits -= int64(n)
	}
}

// waiting checks that the reason is true.
func (s *simulation) waiting(a Action) {
	status := s.core.Status(s.now)
	if status.Reason != a.Reason || status.Detail == "" {
		s.t.Fatalf("it waits for %s and says %+v", a.Reason, status)
	}
	if int(status.Unacked) != s.unacked() {
		s.t.Fatalf("%d unacked, want %d", status.Unacked, s.unacked())
	}
	if s.core.Buffered() > 0 && s.reading == nil {
		s.t.Fatalf("%d bytes are held while waiting for %s", s.core.Buffered(), a.Reason)
	}
	lack := func(what string, ok bool) {
		if !ok {
			s.t.Fatalf("it waits for %s, but %s; %+v", a.Reason, what, status)
		}
	}
	if !a.Until.IsZero() {
		lack("its time has come", a.Until.After(s.now))
	}
	switch a.Reason {
	case ReasonNoConsumers:
		lack("there are some", len(s.live) == 0)
	case ReasonReading:
		lack("it does not", s.reading != nil)
	case ReasonReadFailed:
		lack("when?", !a.Until.IsZero())
	case ReasonNoPermits, ReasonUnackedConsumer, ReasonUnackedSubscription:
		for _, c := range s.live {
			if !s.ordered || c == s.active {
				lack(c.Name+" could take more", s.limited(c) != ReasonNone)
			}
		}
	case ReasonRedeliveryDelay, ReasonNoData:
		lack("when?", (a.Reason == ReasonRedeliveryDelay) == !a.Until.IsZero())
		for o := max(s.acks.Floor(), s.gone); o < s.end; o++ {
			if s.ordered && a.Reason == ReasonRedeliveryDelay {
				lack("nobody asked for it", s.hold.After(s.now))
				break
			}
			inHand := s.acks.Acked(o)
			for _, c := range s.live {
				inHand = inHand || c.held[o]
			}
			if at, ok := s.delayed[o]; ok && at.After(s.now) {
				inHand = a.Reason == ReasonRedeliveryDelay
			}
			lack(fmt.Sprintf("%d is not in anybody's hands", o), inHand)
		}
	default:
		s.t.Fatalf("it waits for %s", a.Reason)
	}
}

// step does the next thing and reports whether there was one.
func (s *simulation) step() bool {
	inFlight := s.core.InFlight()
	a := s.core.Next(s.now)
	switch a.Kind {
	case ActionRead:
		if s.core.Buffered() > 0 {
			s.t.Fatalf("%d bytes are held during a read", s.core.Buffered())
		}
		if inFlight != 0 {
			s.t.Fatal("two reads at once")
		}
		if s.reading != nil {
			s.stale = append(s.stale, *s.reading)
		}
		req := a.Read
		s.reading = &req
	case ActionSend:
		s.deliver(a.Consumer, a.Deliveries)
	case ActionRetries:
		for _, r := range a.Retries {
			if _, err := s.acks.SetRetry(s.acks.Generation(), s.end, r.Range, r.ForCursor()); err != nil {
				s.t.Fatal(err)
			}
		}
	case ActionWait:
		s.waiting(a)
		return false
	default: // what is told to consumers changes nothing here
	}
	return true
}

func (s *simulation) answer() {
	if n := len(s.stale); n > 0 && s.rng.Intn(2) == 0 {
		req := s.stale[n-1]
		s.stale = s.stale[:n-1]
		s.read(req) // nobody wants to know any more
	}
	if s.reading == nil {
		return
	}
	req := *s.reading
	s.reading = nil
	if s.rng.Intn(10) == 0 {
		s.core.ReadFailed(req.ID, errors.New("storage is away"), s.now)
		return
	}
	s.read(req)
}

func (s *simulation) ackAs(id ConsumerID, r cursor.Range) {
	s.ack(id, r)
	for _, c := range s.live {
		for o := range c.held {
			if r.Contains(o) {
				delete(c.held, o)
			}
		}
	}
	for o := range s.delayed {
		if r.Contains(o) {
			delete(s.delayed, o)
		}
	}
}

func heldBy(c *simConsumer) []entry.Offset {
	var all []entry.Offset
	for o := range c.held {
		all = append(all, o)
	}
	slices.Sort(all)
	return all
}

// restart begins anew from what the cursor remembers, as another broker would.
func (s *simulation) restart() {
	s.core = s.fresh()
	s.live, s.active, s.reading, s.stale = nil, nil, nil, nil
	clear(s.delayed)
	s.hold = time.Time{}
	for r, retry := range s.acks.Retries().All() {
		if at := time.UnixMilli(retry.NotBefore); at.After(s.now) {
			if at.After(s.hold) {
				s.hold = at
			}
			for o := r.First; o < r.End && !s.ordered; o++ {
				s.delayed[o] = at
			}
		}
	}
	s.core.Loaded(s.acks.Generation(), s.acks.Floor(), s.end, FromCursor(s.acks.Retries()), s.now)
}

// event lets something happen.
func (s *simulation) event(failover bool) {
	var c *simConsumer
	if len(s.live) > 0 {
		c = s.live[s.rng.Intn(len(s.live))]
	}
	switch n := s.rng.Intn(100); {
	case n < 15:
		s.end += entry.Offset(s.spans[0]) * entry.Offset(s.rng.Intn(4))
		s.core.DataAvailable(s.end)
	case n < 22:
		s.last++
		c := &simConsumer{
			Consumer: Consumer{ID: s.last, Name: fmt.Sprint(s.rng.Intn(5), "-", s.last), Priority: int32(s.rng.Intn(2))},
			held:     map[entry.Offset]bool{},
		}
		if err := s.core.ConsumerAdded(c.Consumer, s.now); err != nil {
			var busy *BusyError
			if !errors.As(err, &busy) || !s.ordered || failover || len(s.live) == 0 {
				s.t.Fatal(err)
			}
			return
		}
		s.live = append(s.live, c)
		s.elect(failover)
	case c == nil:
	case n < 27:
		s.core.ConsumerRemoved(c.ID, s.now)
		s.live = slices.DeleteFunc(s.live, func(x *simConsumer) bool { return x == c })
		s.elect(failover)
	case n < 29:
		if got, want := s.core.Withdraw(c.ID), uint64(max(c.permits, 0)); got != want {
			s.t.Fatalf("%d permits of %s withdrawn, want %d", got, c.Name, want)
		}
		c.permits = min(c.permits, 0)
	case n < 50:
		k := 1 + s.rng.Intn(6)
		c.permits += int64(k)
		s.core.Permits(c.ID, uint32(k))
	case n < 75:
		if held := heldBy(c); len(held) > 0 {
			o := held[s.rng.Intn(len(held))]
			s.ackAs(c.ID, cursor.Range{First: o, End: o + 1})
		}
	case n < 78 && s.ordered:
		if held := heldBy(c); len(held) > 0 {
			s.ackAs(c.ID, cursor.Range{End: held[s.rng.Intn(len(held))] + 1})
		}
	case n < 88:
		held := heldBy(c)
		if len(held) == 0 {
			return
		}
		o := held[s.rng.Intn(len(held))]
		r := cursor.Range{First: o, End: o + 1 + entry.Offset(s.rng.Intn(3))}
		at := s.now.Add(time.Duration(s.rng.Intn(4)) * time.Second)
		s.core.Nacked(c.ID, at, s.now, r)
		for _, h := range held {
			if s.ordered && h >= o {
				delete(c.held, h)
				if at.After(s.hold) {
					s.hold = at
				}
			} else if r.Contains(h) {
				delete(c.held, h)
				s.delayed[h] = at
			}
		}
	case n < 89: // expiry
		if s.end > 0 {
			s.ackAs(0, cursor.Range{End: min(s.end, s.acks.Floor()+entry.Offset(s.rng.Intn(5)))})
		}
	case n < 90: // late, of what nobody holds
		o := s.acks.Floor() + entry.Offset(s.rng.Intn(10))
		if o < s.end {
			s.ackAs(c.ID, cursor.Range{First: o, End: o + 1})
		}
	case n < 91:
		if s.rng.Intn(4) == 0 {
			to := entry.Offset(s.rng.Int63n(int64(s.end) + 1))
			s.acks.Seek(to)
			s.core.SeekDone(s.acks.Generation(), to)
			clear(s.delayed)
			s.hold = time.Time{}
			for _, c := range s.live {
				clear(c.held)
			}
		}
	case n < 92:
		if s.rng.Intn(4) == 0 {
			s.restart()
		}
	default:
		s.now = s.now.Add(time.Duration(s.rng.Intn(1500)) * time.Millisecond)
	}
}

func runSimulation(t *testing.T, seed int64, kind string) {
	t.Helper()
	rng := rand.New(rand.NewSource(seed))
	cfg := DefaultConfig(kind == "shared")
	cfg.ReadBytes = 1 + rng.Intn(6) // a frame is one byte
	if kind == "shared" || rng.Intn(2) == 0 {
		cfg.MaxUnackedPerConsumer = uint64(rng.Intn(12))
		cfg.MaxUnackedPerSubscription = uint64(rng.Intn(20))
	}
	fresh := func() Core {
		return map[string]func(Config) Core{"exclusive": NewExclusive, "failover": NewFailover, "shared": NewShared}[kind](cfg)
	}
	s := &simulation{
		world: newWorld(t, fresh(), uint32(1+rng.Intn(4))), fresh: fresh, rng: rng, cfg: cfg, ordered: kind != "shared",
		delayed: map[entry.Offset]time.Time{},
	}
	failover := kind == "failover"
	s.core.Loaded(0, 0, 0, nil, s.now)
	for range 500 {
		switch s.rng.Intn(4) {
		case 0, 1:
			s.event(failover)
		case 2:
			s.answer()
		default:
			s.step()
		}
	}
	// Heal: with a consumer, permits and acknowledgements, everything gets acknowledged.
	if len(s.live) == 0 {
		c := &simConsumer{Consumer: Consumer{ID: s.last + 1, Name: "healer"}, held: map[entry.Offset]bool{}}
		if err := s.core.ConsumerAdded(c.Consumer, s.now); err != nil {
			t.Fatal(err)
		}
		s.live = append(s.live, c)
		s.elect(failover)
	}
	for round := 0; s.acks.Floor() < s.end; round++ {
		if round > 2000 {
			t.Fatalf("stuck: %+v", s.core.Status(s.now))
		}
		for _, c := range s.live {
			c.permits += 10
			s.core.Permits(c.ID, 10)
		}
		for s.step() {
			s.answer()
		}
		s.answer()
		for _, c := range s.live {
			for _, o := range heldBy(c) {
				s.ackAs(c.ID, cursor.Range{First: o, End: o + 1})
			}
		}
		s.now = s.now.Add(time.Second)
	}
	for _, c := range s.live { // what was acknowledged unseen is passed over once there are permits
		c.permits += 1000
		s.core.Permits(c.ID, 1000)
	}
	for s.step() || s.core.Status(s.now).Reason == ReasonReadFailed {
		s.answer()
		s.now = s.now.Add(time.Second)
	}
	if status := s.core.Status(s.now); status.Reason != ReasonNoData || status.Unacked+status.Redelivery+status.Delayed > 0 {
		t.Fatalf("all is acknowledged, but %+v", status)
	}
}

func TestSimulation(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"exclusive", "failover", "shared"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			for seed := range int64(200) {
				if !t.Run(strconv.FormatInt(seed, 10), func(t *testing.T) { runSimulation(t, seed, kind) }) {
					return
				}
			}
		})
	}
}
