package dispatch

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// exclusive has at most one consumer and refuses a second.
type exclusive struct {
	ordered
}

// NewExclusive makes the core of an Exclusive subscription. It delivers nothing before Loaded.
func NewExclusive(cfg Config) Core { return newExclusive(cfg, false) }

// NewReader makes the core of a non-durable reader, which starts at from: an Exclusive subscription that keeps
// no acknowledgements, so that nothing is delivered twice and nothing limits what is unacknowledged.
func NewReader(cfg Config, from, end entry.Offset) Core {
	e := newExclusive(cfg, true)
	e.Loaded(0, from, end, nil, time.Time{})
	return e
}

func newExclusive(cfg Config, noAcks bool) *exclusive {
	e := &exclusive{ordered{base: base{cfg: cfg, noAcks: noAcks}}}
	e.choose = func(all []*consumer) *consumer {
		if len(all) == 0 {
			return nil
		}
		return all[0]
	}
	return e
}

// ConsumerAdded implements [Core].
func (e *exclusive) ConsumerAdded(c Consumer, _ time.Time) error {
	if len(e.consumers) > 0 {
		return &BusyError{Current: e.consumers[0].Name}
	}
	e.add(c)
	return nil
}
