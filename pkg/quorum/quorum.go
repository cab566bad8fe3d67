// Package quorum is the arithmetic of a replicated ledger: which slots of an ensemble get an entry, which
// sets of slots are enough to count it, which sets of answers are enough to decide that it is absent, and how
// far the prefix of counted entries reaches. It is pure: no I/O, no clock, no goroutines.
//
// The caller's loop, for a writer:
//
//	q := quorum.MustNew(quorum.Config{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}, zones)
//	t := quorum.NewTracker(q, first)
//	e := t.Append()                    // send entry e to the slots in q.WriteSet(e)
//	t.Ack(e, slot)                     // a slot has entry e on disk
//	t.Advance()                        // the confirmed prefix, unless it is frozen
//	t.Prune(from, changed, newQuorum)  // an ensemble change was acknowledged
//
// and for a recovery: q.Covers(q.WriteSet(e), negatives) decides that e is absent, and
// q.FenceCovers(answered) that no write set can acknowledge anything any more.
package quorum

import (
	"fmt"
	"math/bits"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// MaxEnsemble is the largest ensemble supported: a [Set] has a bit per slot.
const MaxEnsemble = 64

// Set is a set of slots of one ensemble: bit i is slot i.
type Set uint64

// Of returns the set of the given slots.
func Of(slots ...int) Set {
	var s Set
	for _, i := range slots {
		s |= 1 << i
	}
	return s
}

// All returns the set of the slots 0 … n-1.
func All(n int) Set {
	if n >= MaxEnsemble {
		return ^Set(0)
	}
	return 1<<n - 1
}

// Has reports whether slot i is in s.
func (s Set) Has(i int) bool { return s>>i&1 != 0 }

// Len returns the number of slots in s.
func (s Set) Len() int { return bits.OnesCount64(uint64(s)) }

// Each calls f for every slot of s, in rising order.
func (s Set) Each(f func(slot int)) {
	for ; s != 0; s &= s - 1 {
		f(bits.TrailingZeros64(uint64(s)))
	}
}

// First returns the lowest slot of s; s must not be empty.
func (s Set) First() int { return bits.TrailingZeros64(uint64(s)) }

// Config is how a ledger is copied: E ≥ Qw ≥ Qa ≥ 1, and MinZones ≤ Qa; 0 and 1 zones mean "any".
type Config struct {
	Ensemble, WriteQuorum, AckQuorum, MinZones int
}

// Validate says which rule c breaks, or nil.
func (c Config) Validate() error {
	switch {
	case c.Ensemble > MaxEnsemble:
		return fmt.Errorf("ensemble %d is above the limit of %d", c.Ensemble, MaxEnsemble)
	case c.AckQuorum < 1:
		return fmt.Errorf("ack quorum %d is below 1", c.AckQuorum)
	case c.WriteQuorum < c.AckQuorum:
		return fmt.Errorf("write quorum %d is below the ack quorum %d", c.WriteQuorum, c.AckQuorum)
	case c.Ensemble < c.WriteQuorum:
		return fmt.Errorf("ensemble %d is below the write quorum %d", c.Ensemble, c.WriteQuorum)
	case c.MinZones < 0 || c.MinZones > c.AckQuorum:
		return fmt.Errorf("minimum of %d zones is not between 0 and the ack quorum %d", c.MinZones, c.AckQuorum)
	}
	return nil
}

// Quorum answers for one ensemble: a [Config] and the zones of its slots, as recorded in the ledger's metadata
// at placement. Zones are frozen with the ensemble: if they followed a remapping of racks, what was once a
// quorum might no longer intersect what decides absence. Immutable, safe for concurrent use.
type Quorum struct {
	cfg   Config
	masks []Set // per known zone, its slots; nil when zones do not matter
}

// New returns the quorum of an ensemble whose slot i lies in zones[i]; "" is an unknown zone, which counts as
// none. zones may be nil when cfg.MinZones ≤ 1.
func New(cfg Config, zones []string) (*Quorum, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	q := &Quorum{cfg: cfg}
	if cfg.MinZones <= 1 {
		return q, nil
	}
	if len(zones) != cfg.Ensemble {
		return nil, fmt.Errorf("%d zones for an ensemble of %d", len(zones), cfg.Ensemble)
	}
	index := map[string]int{}
	for i, z := range zones {
		if z == "" {
			continue
		}
		at, ok := index[z]
		if !ok {
			at = len(q.masks)
			index[z] = at
			q.masks = append(q.masks, 0)
		}
		q.masks[at] |= 1 << i
	}
	return q, nil
}

// MustNew is [New] for what was validated before; it panics on an error.
func MustNew(cfg Config, zones []string) *Quorum {
	q, err := New(cfg, zones)
	if err != nil {
		panic("quorum: " + err.Error())
	}
	return q
}

// Config returns the configuration that q was made of.
func (q *Quorum) Config() Config { return q.cfg }

// WriteSet returns the Qw slots that hold entry e: from slot e mod E on, around the ensemble.
func (q *Quorum) WriteSet(e entry.EntryID) Set {
	return stripe(int(e%entry.EntryID(q.cfg.Ensemble)), q.cfg.Ensemble, q.cfg.WriteQuorum)
}

func stripe(start, ensemble, write int) Set {
	s := All(write) << start
	if start+write > ensemble {
		// The part beyond the last slot wraps around. start+write < 2E, and a Set of 64 slots loses the
		// shifted-out bits, so they are built anew.
		s |= All(start + write - ensemble)
	}
	return s & All(ensemble)
}

// Valid reports whether copies on the slots of s make an entry count: |s| ≥ Qa and at least MinZones zones.
// Callers pass subsets of the entry's write set.
func (q *Quorum) Valid(s Set) bool {
	if s.Len() < q.cfg.AckQuorum {
		return false
	}
	if q.cfg.MinZones <= 1 {
		return true
	}
	zones := 0
	for _, m := range q.masks {
		if s&m != 0 {
			zones++
		}
	}
	return zones >= q.cfg.MinZones
}

// Covers reports whether the slots x cover the write set w: what is left of w without x could not make an entry
// count. So if every slot of x denies having an entry, or has been fenced, it never counted, or never will.
func (q *Quorum) Covers(w, x Set) bool { return !q.Valid(w &^ x) }

// FenceCovers reports whether x covers every one of the E write sets: nothing can count any more in this
// ensemble once the slots of x are fenced.
func (q *Quorum) FenceCovers(x Set) bool {
	for i := range q.cfg.Ensemble {
		if !q.Covers(stripe(i, q.cfg.Ensemble, q.cfg.WriteQuorum), x) {
			return false
		}
	}
	return true
}

// AlwaysValid reports whether every one of the E write sets is valid without the slots in missing: entries
// can count although those slots do not answer.
func (q *Quorum) AlwaysValid(missing Set) bool {
	for i := range q.cfg.Ensemble {
		if !q.Valid(stripe(i, q.cfg.Ensemble, q.cfg.WriteQuorum) &^ missing) {
			return false
		}
	}
	return true
}
