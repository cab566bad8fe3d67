package meta

import (
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// encode marshals a record. It fails on text that is not UTF-8, which callers check before.
func encode(m proto.Message) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return string(b), nil
}

// decode unmarshals the record of key.
func decode(key string, value []byte, m proto.Message) error {
	if err := proto.Unmarshal(value, m); err != nil {
		return &CorruptRecordError{Key: key, Err: err}
	}
	return nil
}

func corrupt(key, format string, args ...any) error {
	return &CorruptRecordError{Key: key, Err: fmt.Errorf(format, args...)}
}

func decodeUUID(b []byte) (entry.UUID, error) {
	var u entry.UUID
	if len(b) != len(u) {
		return u, fmt.Errorf("a UUID of %d bytes", len(b))
	}
	copy(u[:], b)
	if u.IsZero() {
		return u, errors.New("a zero UUID")
	}
	return u, nil
}

func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromMillis(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// small narrows a count that was checked to be small.
func small(n int) uint32 { return uint32(n) }

func encodeLedger(l Ledger) (string, error) {
	m := &metav1.Ledger{
		State:       metav1.LedgerState(l.State),
		Term:        uint64(l.Term),
		Nonce:       l.Nonce,
		Ensemble:    small(l.Ensemble),
		WriteQuorum: small(l.WriteQuorum),
		AckQuorum:   small(l.AckQuorum),
		MinZones:    small(l.MinZones),
		LastOp:      l.LastOp,
	}
	for _, f := range l.Fragments {
		p := &metav1.Fragment{First: int64(f.First)}
		for _, slot := range f.Slots {
			p.Slots = append(p.Slots, &metav1.Slot{Storage: slot.UUID[:], Zone: slot.Zone, Host: slot.Host})
		}
		m.Fragments = append(m.Fragments, p)
	}
	if l.State >= LedgerClosed {
		m.Entries = uint64(l.Last + 1)
		m.Length = uint64(l.Length)
	}
	for _, i := range l.Pending {
		m.Pending = append(m.Pending, &metav1.Intent{Target: i.Target[:], Fragment: int64(i.Fragment), DeadlineMs: millis(i.Deadline)})
	}
	for _, u := range l.DeletedOn {
		m.DeletedOn = append(m.DeletedOn, u[:])
	}
	if topic, index, ok := l.Chain.data(); ok {
		m.Chain = &metav1.Ledger_Data{Data: &metav1.DataChain{Topic: topic[:], Index: index}}
	} else {
		m.Chain = &metav1.Ledger_Other{Other: string(l.Chain)}
	}
	return encode(m)
}

// decodeLedger reads a ledger's record and checks what the rest of the program relies on.
func decodeLedger(key string, id entry.LedgerID, value []byte, rev int64) (Ledger, error) {
	var m metav1.Ledger
	if err := decode(key, value, &m); err != nil {
		return Ledger{}, err
	}
	l, err := ledgerFromProto(id, &m)
	if err != nil {
		return Ledger{}, &CorruptRecordError{Key: key, Err: err}
	}
	l.Rev = rev
	return l, nil
}

func ledgerFromProto(id entry.LedgerID, m *metav1.Ledger) (Ledger, error) {
	if m.State < 0 || m.State > metav1.LedgerState(LedgerDeleting) {
		return Ledger{}, fmt.Errorf("state %d", m.State)
	}
	if m.Entries > math.MaxInt64 || m.Length > math.MaxInt64 {
		return Ledger{}, fmt.Errorf("%d entries of %d bytes", m.Entries, m.Length)
	}
	l := Ledger{
		ID:     id,
		State:  LedgerState(m.State),
		Term:   entry.Term(m.Term),
		Nonce:  m.Nonce,
		LastOp: m.LastOp,
		Last:   entry.NoEntry,
	}
	if l.State >= LedgerClosed {
		l.Last = entry.EntryID(m.Entries) - 1
		l.Length = int64(m.Length)
	}
	switch c := m.Chain.(type) {
	case *metav1.Ledger_Data:
		topic, err := decodeUUID(c.Data.GetTopic())
		if err != nil {
			return Ledger{}, fmt.Errorf("chain: %w", err)
		}
		if c.Data.GetIndex() > math.MaxInt32 {
			return Ledger{}, fmt.Errorf("chain: partition %d", c.Data.GetIndex())
		}
		l.Chain = DataChain(topic, int(c.Data.GetIndex()))
	case *metav1.Ledger_Other:
		l.Chain = ChainID(c.Other)
	}
	if err := checkChain(l.Chain); err != nil {
		return Ledger{}, err
	}
	if l.State == LedgerDeleting && len(m.Fragments) == 0 {
		return l, nil // a tombstone
	}
	for _, n := range []uint32{m.Ensemble, m.WriteQuorum, m.AckQuorum, m.MinZones} {
		if n > maxEnsemble {
			return Ledger{}, fmt.Errorf("quorum %d", n)
		}
	}
	l.Replication = Replication{Ensemble: int(m.Ensemble), WriteQuorum: int(m.WriteQuorum), AckQuorum: int(m.AckQuorum), MinZones: int(m.MinZones)}
	if err := l.Replication.Validate(); err != nil {
		return Ledger{}, err
	}
	for _, p := range m.Fragments {
		f := Fragment{First: entry.EntryID(p.First)}
		for _, slot := range p.Slots {
			u, err := decodeUUID(slot.Storage)
			if err != nil {
				return Ledger{}, fmt.Errorf("slot: %w", err)
			}
			f.Slots = append(f.Slots, Slot{UUID: u, Zone: slot.Zone, Host: slot.Host})
		}
		l.Fragments = append(l.Fragments, f)
	}
	if err := checkFragments(l.Replication, l.Fragments); err != nil {
		return Ledger{}, err
	}
	for _, p := range m.Pending {
		u, err := decodeUUID(p.Target)
		if err != nil {
			return Ledger{}, fmt.Errorf("intent: %w", err)
		}
		l.Pending = append(l.Pending, ReplicaIntent{Target: u, Fragment: entry.EntryID(p.Fragment), Deadline: fromMillis(p.DeadlineMs)})
	}
	for _, b := range m.DeletedOn {
		u, err := decodeUUID(b)
		if err != nil {
			return Ledger{}, fmt.Errorf("deleted on: %w", err)
		}
		l.DeletedOn = append(l.DeletedOn, u)
	}
	return l, nil
}

// checkFragments holds what every ledger's fragments obey: the first begins at entry 0, firsts grow, each
// has one slot per ensemble member, and no identity twice.
func checkFragments(r Replication, fragments []Fragment) error {
	if len(fragments) == 0 {
		return fmt.Errorf("%w: no fragment", ErrInvalid)
	}
	for i, f := range fragments {
		if i == 0 && f.First != 0 {
			return fmt.Errorf("%w: the first fragment begins at entry %d", ErrInvalid, f.First)
		}
		if i > 0 && f.First <= fragments[i-1].First {
			return fmt.Errorf("%w: fragment at entry %d after one at %d", ErrInvalid, f.First, fragments[i-1].First)
		}
		if len(f.Slots) != r.Ensemble {
			return fmt.Errorf("%w: fragment at entry %d has %d slots of %d", ErrInvalid, f.First, len(f.Slots), r.Ensemble)
		}
		seen := make(map[entry.StorageUUID]bool, len(f.Slots))
		for _, slot := range f.Slots {
			if slot.UUID.IsZero() || seen[slot.UUID] {
				return fmt.Errorf("%w: fragment at entry %d names %s twice or not at all", ErrInvalid, f.First, slot.UUID)
			}
			seen[slot.UUID] = true
		}
	}
	return nil
}

func runToProto(r Run) *metav1.Run {
	m := &metav1.Run{Ledger: uint64(r.Ledger), First: uint64(r.First), Closed: r.Closed}
	if r.Closed {
		m.Span, m.MaxTimeMs, m.Bytes = uint64(r.End-r.First), r.MaxTime, uint64(r.Bytes)
	}
	return m
}

func runFromProto(m *metav1.Run) (Run, error) {
	r := Run{Ledger: entry.LedgerID(m.Ledger), First: entry.Offset(m.First), Closed: m.Closed}
	if !m.Closed {
		return r, nil
	}
	if m.First+m.Span < m.First || m.Bytes > math.MaxInt64 {
		return r, fmt.Errorf("run of ledger %d: %d messages of %d bytes from offset %d", m.Ledger, m.Span, m.Bytes, m.First)
	}
	r.End, r.MaxTime, r.Bytes = entry.Offset(m.First+m.Span), m.MaxTimeMs, int64(m.Bytes)
	return r, nil
}

// checkRuns holds what every chain obeys: ledgers and offsets grow, and only the last run is open.
func checkRuns(c Chain) error {
	for i, r := range c.Runs {
		if i > 0 {
			before := c.Runs[i-1]
			if !before.Closed {
				return fmt.Errorf("ledger %d is open before the last run", before.Ledger)
			}
			if r.Ledger <= before.Ledger || r.First < before.End {
				return fmt.Errorf("run of ledger %d at offset %d after ledger %d up to %d", r.Ledger, r.First, before.Ledger, before.End)
			}
		}
		if r.Ledger > c.LastLedger {
			return fmt.Errorf("ledger %d above the last ledger %d", r.Ledger, c.LastLedger)
		}
		if r.Closed && r.End > c.NextOffset {
			return fmt.Errorf("run of ledger %d ends at offset %d above the floor %d", r.Ledger, r.End, c.NextOffset)
		}
	}
	return nil
}

func encodeEpoch(e entry.Epoch) string {
	s, err := encode(&metav1.Epoch{Epoch: uint64(e)})
	if err != nil {
		panic(fmt.Sprintf("meta: encode epoch %d: %v", e, err)) // a number always encodes
	}
	return s
}

func decodeEpoch(key string, value []byte) (entry.Epoch, error) {
	var m metav1.Epoch
	if err := decode(key, value, &m); err != nil {
		return 0, err
	}
	// Transactions compare bytes, so bytes that this program would not write must not pass for the number.
	if m.Epoch == 0 || encodeEpoch(entry.Epoch(m.Epoch)) != string(value) {
		return 0, corrupt(key, "not an epoch")
	}
	return entry.Epoch(m.Epoch), nil
}

func decodeOwner(key string, b BundleID, value []byte, rev int64) (Owner, uint64, error) {
	var m metav1.Owner
	if err := decode(key, value, &m); err != nil {
		return Owner{}, 0, err
	}
	if m.Broker == "" || m.Epoch == 0 {
		return Owner{}, 0, corrupt(key, "no broker or no epoch")
	}
	return Owner{Bundle: b, Broker: m.Broker, URL: m.Url, Epoch: entry.Epoch(m.Epoch), Rev: rev}, m.LastOp, nil
}
