package meta

import (
	"fmt"
	"math"
	"time"
)

// BacklogAction says what happens when a subscription's backlog exceeds its quota.
type BacklogAction uint8

// The backlog actions.
const (
	BacklogDefault BacklogAction = iota // BacklogRefuse
	BacklogRefuse                       // publishing is refused until the backlog shrinks
	BacklogEvict                        // the oldest messages of the backlog are acknowledged unread
)

// Policies of a namespace. A nil field takes the cluster's default.
type Policies struct {
	Ensemble    *int // ensemble size of new ledgers
	WriteQuorum *int
	AckQuorum   *int
	MinZones    *int

	RetentionTime  *time.Duration // acknowledged messages are kept at least this long
	RetentionBytes *int64         // acknowledged messages are kept while a topic holds at most so many bytes
	MessageTTL     *time.Duration // older messages are acknowledged unread

	BacklogBytes  *int64 // most bytes a subscription's backlog may have
	BacklogAction BacklogAction

	AutoCreateTopics          *bool
	MaxUnackedPerSubscription *int
	MaxUnackedPerConsumer     *int
}

// maxEnsemble keeps a ledger's transactions below etcd's limit of 128 operations.
const maxEnsemble = 20

// Replication returns how new ledgers are copied: the cluster's default where p is silent. It returns an
// [ErrInvalid] that says which rule the result breaks.
func (p Policies) Replication(def Replication) (Replication, error) {
	set := func(to *int, from *int) {
		if from != nil {
			*to = *from
		}
	}
	set(&def.Ensemble, p.Ensemble)
	set(&def.WriteQuorum, p.WriteQuorum)
	set(&def.AckQuorum, p.AckQuorum)
	set(&def.MinZones, p.MinZones)
	return def, def.Validate()
}

// Validate returns nil, or an [ErrInvalid] that says which rule r breaks.
func (r Replication) Validate() error {
	switch {
	case r.AckQuorum < 1:
		return fmt.Errorf("%w replication: ack quorum %d, at least 1 is needed", ErrInvalid, r.AckQuorum)
	case r.WriteQuorum < r.AckQuorum:
		return fmt.Errorf("%w replication: write quorum %d is below ack quorum %d", ErrInvalid, r.WriteQuorum, r.AckQuorum)
	case r.Ensemble < r.WriteQuorum:
		return fmt.Errorf("%w replication: ensemble %d is below write quorum %d", ErrInvalid, r.Ensemble, r.WriteQuorum)
	case r.Ensemble > maxEnsemble:
		return fmt.Errorf("%w replication: ensemble %d, at most %d are allowed", ErrInvalid, r.Ensemble, maxEnsemble)
	case r.MinZones < 0 || r.MinZones > r.AckQuorum:
		return fmt.Errorf("%w replication: %d zones, an ack quorum of %d can't span them", ErrInvalid, r.MinZones, r.AckQuorum)
	}
	return nil
}

// Validate returns nil, or an [ErrInvalid] that says what can't be. Quorums are checked against each other
// where both are set; [Policies.Replication] checks the rest.
func (p Policies) Validate() error {
	atLeast := func(name string, v *int, least int) error {
		if v != nil && (*v < least || *v > math.MaxInt32) {
			return fmt.Errorf("%w policy: %s is %d, allowed are %d to %d", ErrInvalid, name, *v, least, math.MaxInt32)
		}
		return nil
	}
	for _, err := range []error{
		atLeast("ensemble", p.Ensemble, 1),
		atLeast("write quorum", p.WriteQuorum, 1),
		atLeast("ack quorum", p.AckQuorum, 1),
		atLeast("min zones", p.MinZones, 0),
		atLeast("max unacked per subscription", p.MaxUnackedPerSubscription, 0),
		atLeast("max unacked per consumer", p.MaxUnackedPerConsumer, 0),
		notAbove("ack quorum", p.AckQuorum, "write quorum", p.WriteQuorum),
		notAbove("write quorum", p.WriteQuorum, "ensemble", p.Ensemble),
		notAbove("ack quorum", p.AckQuorum, "ensemble", p.Ensemble),
		notAbove("min zones", p.MinZones, "ack quorum", p.AckQuorum),
	} {
		if err != nil {
			return err
		}
	}
	switch {
	case p.Ensemble != nil && *p.Ensemble > maxEnsemble:
		return fmt.Errorf("%w policy: ensemble is %d, at most %d are allowed", ErrInvalid, *p.Ensemble, maxEnsemble)
	case p.RetentionTime != nil && *p.RetentionTime < 0, p.MessageTTL != nil && *p.MessageTTL < 0:
		return fmt.Errorf("%w policy: a time below 0", ErrInvalid)
	case p.RetentionBytes != nil && *p.RetentionBytes < 0, p.BacklogBytes != nil && *p.BacklogBytes < 0:
		return fmt.Errorf("%w policy: a size below 0", ErrInvalid)
	case p.BacklogAction > BacklogEvict:
		return fmt.Errorf("%w policy: backlog action %d", ErrInvalid, p.BacklogAction)
	}
	return nil
}

func notAbove(name string, v *int, limitName string, limit *int) error {
	if v != nil && limit != nil && *v > *limit {
		return fmt.Errorf("%w policy: %s %d is above %s %d", ErrInvalid, name, *v, limitName, *limit)
	}
	return nil
}
