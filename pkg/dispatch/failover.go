package dispatch

import (
	"cmp"
	"slices"
	"time"
)

// failover has one active consumer, the first by priority, then by name; the others stand by. When another
// becomes active, what the last one did not acknowledge is delivered to it first, in order.
type failover struct {
	ordered
}

// NewFailover makes the core of a Failover subscription. It delivers nothing before Loaded.
func NewFailover(cfg Config) Core {
	f := &failover{ordered{base: base{cfg: cfg}, tell: true}}
	f.choose = func(all []*consumer) *consumer {
		if len(all) == 0 {
			return nil
		}
		return slices.MinFunc(all, func(a, b *consumer) int {
			return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
		})
	}
	return f
}

// ConsumerAdded implements [Core].
func (f *failover) ConsumerAdded(c Consumer, _ time.Time) error {
	f.add(c)
	return nil
}
