package subscription

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// Env is what the subscriptions of a bundle's topics need.
type Env struct {
	// State returns the bundle's state log, waiting until it is open.
	State func(ctx context.Context) (*statelog.Log, error)
	// Life is the time that the bundle is served here: until it ends, what was taken in is written.
	Life context.Context //nolint:containedctx // as it says
	// Go runs what goes on beside a call. It reports false, and does not run it, when everything has ended.
	Go func(f func()) bool
	// Reads, if set, bounds what is read for consumers and not sent.
	Reads *budget.Budget
	// Dispatch and Log may be nil.
	Dispatch *dispatch.Metrics
	Log      *slog.Logger
	// Sched is the clock, and how others are waited for; nil: sched.Real.
	Sched sched.Scheduler
}

// Config describes a topic to its subscriptions.
type Config struct {
	// Name is what people call the topic.
	Name string
	// Owner is whose state it is in the state log. No later topic has the same.
	Owner string
	Topic *topic.Topic
	// Core makes the dispatch of a type.
	Core func(Type) dispatch.Core
	// Gone tells who comes to a topic that is not served here any more where it is.
	Gone func() error
}

// Type is how a subscription's messages are shared out.
type Type uint8

// The types. The zero value is none.
const (
	Exclusive Type = iota + 1
	Failover
	Shared
)

// String returns the type's name as people write it.
func (t Type) String() string { return [...]string{"none", "exclusive", "failover", "shared"}[t] }

// Reason classifies an [Error].
type Reason uint8

// The reasons.
const (
	// Invalid: what was asked for makes no sense.
	Invalid Reason = iota
	// NotFound: there is no such subscription.
	NotFound
	// Conflict: somebody is in the way.
	Conflict
	// Refused: not without force.
	Refused
	// Unavailable: not done in time; worth retrying.
	Unavailable
	// Moved: the subscription was moved; come again.
	Moved
)

// Error is a refusal of this package's own making.
type Error struct {
	Reason Reason
	text   string
}

// Error says what is refused, and what to do.
func (e *Error) Error() string { return e.text }

func refuse(r Reason, format string, args ...any) error {
	return &Error{Reason: r, text: fmt.Sprintf(format, args...)}
}

func unavailable(doing, what string, cause error) error {
	return refuse(Unavailable, "%s %s: not done in time (%v); try again", doing, what, cause)
}
