package dispatch

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// ConsumerID names a connected consumer; a runner never reuses one.
type ConsumerID uint64

// Consumer is what a core knows of a consumer when it comes.
type Consumer struct {
	ID       ConsumerID
	Name     string
	Priority int32 // of Failover: the lowest is active, then by name
}

// Entry is a stored entry. Frame is shared and must not be changed.
type Entry struct {
	Offset     entry.Offset // of its first message
	Span       uint32       // offsets it takes, ≥ 1
	Position   entry.Position
	BrokerTime int64 // Unix milliseconds
	Frame      []byte
}

// Range returns the offsets of the entry.
func (e *Entry) Range() cursor.Range {
	return cursor.Range{First: e.Offset, End: e.Offset + entry.Offset(e.Span)}
}

// Delivery is an entry on its way to a consumer, whole.
type Delivery struct {
	Entry
	// Redelivered is how often it, or a part of it, was delivered before.
	Redelivered uint32
	// Skip are the offsets in it that are not meant for the consumer, in order: acknowledged, in somebody
	// else's hands, or before the start.
	Skip []cursor.Range
}

// ReadEntry is an entry that was read, with what of it is not acknowledged: nil stands for all of it.
// Entries of which nothing is missing are left out by the reader.
type ReadEntry struct {
	Entry
	Missing []cursor.Range
}

// ReadRequest asks for entries from the one that holds From on, or the first after it if that is gone, up
// to but not including the first that starts at or after Until. At least one, then no more than MaxBytes of
// frames.
type ReadRequest struct {
	ID          uint64
	From, Until entry.Offset
	MaxBytes    int
	Redelivery  bool
}

// ReadResult answers a ReadRequest. Next is where reading goes on: everything in [From, Next) that is in no
// entry is acknowledged or no longer stored.
type ReadResult struct {
	ID      uint64
	Entries []ReadEntry
	Next    entry.Offset
}

// Retry tells that Range is to be delivered again, for the cursor to remember.
type Retry struct {
	Range     cursor.Range
	Count     uint32 // deliveries so far
	NotBefore time.Time
	Reason    cursor.RetryReason
}

// ForCursor returns the retry as the cursor remembers it.
func (r Retry) ForCursor() cursor.Retry {
	return cursor.Retry{Count: r.Count, NotBefore: max(r.NotBefore.UnixMilli(), 0), Reason: r.Reason}
}

// FromCursor returns what a cursor remembers, for [Core.Loaded].
func FromCursor(m *cursor.RangeMap[cursor.Retry]) []Retry {
	out := make([]Retry, 0, m.Len())
	for r, retry := range m.All() {
		out = append(out, Retry{Range: r, Count: retry.Count, NotBefore: time.UnixMilli(retry.NotBefore), Reason: retry.Reason})
	}
	return out
}

// ActionKind says what Next wants done.
type ActionKind uint8

// The kinds of action.
const (
	ActionWait ActionKind = iota
	ActionRead
	ActionSend
	ActionActivate
	ActionDeactivate
	ActionRetries
)

// Action is the next thing to do. Its slices are the core's, valid until the next call of Next.
type Action struct {
	Kind       ActionKind
	Consumer   ConsumerID // Send, Activate, Deactivate
	Deliveries []Delivery // Send
	Read       ReadRequest
	Retries    []Retry
	Generation cursor.Generation // Retries: under which they were delivered
	Reason     Reason            // Wait
	Until      time.Time         // Wait: when to ask again though nothing happened; zero is never
}

// Reason names what a subscription waits for.
type Reason string

// The reasons to wait. ReasonNone is work to do.
const (
	ReasonNone                Reason = "none"
	ReasonNoConsumers         Reason = "no-consumers"
	ReasonAckStateLoading     Reason = "ack-state-loading"
	ReasonReading             Reason = "reading"
	ReasonReadFailed          Reason = "read-failed"
	ReasonReadMemory          Reason = "read-memory"
	ReasonNoPermits           Reason = "no-permits"
	ReasonUnackedConsumer     Reason = "unacked-limit-consumer"
	ReasonUnackedSubscription Reason = "unacked-limit-subscription"
	ReasonRedeliveryDelay     Reason = "redelivery-delay"
	ReasonDelayedLimit        Reason = "delayed-limit"
	ReasonNoData              Reason = "no-data"
)

// Reasons lists them all.
var Reasons = []Reason{
	ReasonNone, ReasonNoConsumers, ReasonAckStateLoading, ReasonReading, ReasonReadFailed, ReasonReadMemory, ReasonNoPermits,
	ReasonUnackedConsumer, ReasonUnackedSubscription, ReasonRedeliveryDelay, ReasonDelayedLimit, ReasonNoData,
}

// Status is a subscription's dispatch as it stands.
type Status struct {
	Reason     Reason
	Detail     string       // for people: numbers, and what to do
	Next       entry.Offset // the next offset to be read for the first time
	End        entry.Offset // the topic's end, as far as known here
	Unacked    uint64       // messages delivered, neither acknowledged nor given back
	Redelivery uint64       // messages waiting to be delivered again now
	Delayed    uint64       // messages waiting for their redelivery's time
	Buffered   int          // bytes of frames read and not sent
	Consumers  []ConsumerStatus
}

// ConsumerStatus is one consumer's part.
type ConsumerStatus struct {
	Consumer
	Permits int64
	Unacked uint64
	Active  bool // it may be delivered to
}

// BusyError refuses a consumer of an Exclusive subscription that has one.
type BusyError struct {
	Current string // name of the one it has
}

// Error says who is in the way and what to do.
func (e *BusyError) Error() string {
	return fmt.Sprintf("exclusive subscription has a consumer already (%q): disconnect it, or use Failover or Shared", e.Current)
}

// ErrNoProgress is the failure of a read that returned neither entries nor a place to go on from.
var ErrNoProgress = errors.New("nothing was read though the topic goes on")

// Config of a core. Limits of 0 are no limits.
type Config struct {
	MaxUnackedPerConsumer     uint64
	MaxUnackedPerSubscription uint64
	ReadBytes                 int           // most bytes of frames read at once
	MaxDelayed                int           // delayed ranges beyond which nothing new is delivered
	RetryMin, RetryMax        time.Duration // between failing reads
}

// DefaultConfig returns the defaults: the unacknowledged messages of Shared subscriptions are limited, those of
// ordered ones are not, since a consumer that acknowledges cumulatively may do so late.
func DefaultConfig(shared bool) Config {
	c := Config{ReadBytes: 1 << 20, MaxDelayed: 100_000, RetryMin: 20 * time.Millisecond, RetryMax: 5 * time.Second}
	if shared {
		c.MaxUnackedPerConsumer, c.MaxUnackedPerSubscription = 50_000, 200_000
	}
	return c
}

// Core decides for one subscription. It is not safe for concurrent use. Time comes in as an argument.
//
// A subscription that is moved is moved in the cursor first, and then here; meanwhile others tell of what they did before
// or after it, and two moves may come here in the wrong order. So whatever depends on where the cursor was carries the
// cursor's generation: what belongs to another one is left out.
type Core interface {
	// Loaded says that the acknowledgement state is known: the cursor's generation and floor, where the topic ends, and
	// what is remembered of redeliveries.
	Loaded(g cursor.Generation, from, end entry.Offset, retries []Retry, now time.Time)
	// ConsumerAdded lets a consumer in, or refuses it, with a [*BusyError].
	ConsumerAdded(c Consumer, now time.Time) error
	// ConsumerRemoved takes one out. What it did not acknowledge is delivered again.
	ConsumerRemoved(id ConsumerID, now time.Time)
	// Permits allows n more messages to a consumer.
	Permits(id ConsumerID, n uint32)
	// Withdraw takes back what a consumer has not used of its permits, and returns how many those are.
	Withdraw(id ConsumerID) uint64
	// DataAvailable says that the topic goes on until end.
	DataAvailable(end entry.Offset)
	// Acked says that ranges were acknowledged in the cursor's generation g; id is by whom, 0 if by none of the consumers.
	Acked(g cursor.Generation, id ConsumerID, ranges ...cursor.Range)
	// Nacked gives back what of ranges the consumer holds. Not to be delivered before notBefore.
	Nacked(id ConsumerID, notBefore, now time.Time, ranges ...cursor.Range)
	// EntriesRead answers the read in flight; another one's answer is ignored.
	EntriesRead(r ReadResult, now time.Time)
	// ReadFailed ends the read in flight; it is tried again after a growing pause.
	ReadFailed(id uint64, err error, now time.Time)
	// SeekDone says that the cursor was moved, which began generation g. Nothing of before counts any more. A move that a
	// later one overtook is none.
	SeekDone(g cursor.Generation, to entry.Offset)
	// Next says what to do. It changes state: what it returns must be done.
	Next(now time.Time) Action
	// Status tells how it stands. It changes nothing.
	Status(now time.Time) Status
	// InFlight returns the id of the read in flight, 0 if there is none.
	InFlight() uint64
	// Buffered returns the bytes of frames held.
	Buffered() int
}
