package client

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
)

// Message is what an application publishes. The client reads it until its receipt is done; change nothing
// before.
type Message struct {
	// Value is the message's body.
	Value []byte
	// Key routes the message to a partition; messages of one key keep their order. Empty is none.
	Key string
	// OrderingKey orders messages when that is not the key's work. Empty is none.
	OrderingKey string
	// Properties are the application's own.
	Properties map[string]string
	// EventTime is the application's; zero is none. Kept to the millisecond.
	EventTime time.Time
	// SequenceID, when not 0, numbers the message instead of the producer. It must grow from message to
	// message of one partition. With deduplication, an application that derives it from its source can
	// publish again after a crash and have each message stored once. What is below the highest id stored counts as
	// stored: a message that failed for certain must be published again before any with a higher id, or never under its own.
	SequenceID uint64
}

// size is what the message is charged against back-pressure and a batch's limit, in bytes.
func (m *Message) size() int { return len(m.Value) + m.overhead() }

// overhead estimates the bytes of metadata, from above.
func (m *Message) overhead() int {
	n := 48 + len(m.Key)*4/3 + len(m.OrderingKey)
	for k, v := range m.Properties {
		n += len(k) + len(v) + 12
	}
	return n
}

// onFrame converts the message for the encoder, without copying the value.
func (m *Message) onFrame(sequence uint64) frame.Message {
	f := frame.Message{Sequence: sequence, Value: m.Value}
	if m.Key != "" {
		f.Key = []byte(m.Key)
	}
	if m.OrderingKey != "" {
		f.OrderingKey = []byte(m.OrderingKey)
	}
	if !m.EventTime.IsZero() {
		f.EventTime = m.EventTime.UnixMilli()
	}
	if len(m.Properties) > 0 {
		f.Properties = make([]frame.Property, 0, len(m.Properties))
		for _, name := range slices.Sorted(maps.Keys(m.Properties)) {
			f.Properties = append(f.Properties, frame.Property{Name: name, Value: m.Properties[name]})
		}
	}
	return f
}

// fromFrame is the way back. Value aliases f's.
func fromFrame(f *frame.Message) Message {
	m := Message{Value: f.Value, Key: string(f.Key), OrderingKey: string(f.OrderingKey), SequenceID: f.Sequence}
	if f.EventTime != 0 {
		m.EventTime = time.UnixMilli(f.EventTime)
	}
	if len(f.Properties) > 0 {
		m.Properties = make(map[string]string, len(f.Properties))
		for _, p := range f.Properties {
			m.Properties[p.Name] = p.Value
		}
	}
	return m
}

// NoPartition is the partition of a message in a topic that has none.
const NoPartition = -1

// MessageID tells where a message stands.
type MessageID struct {
	// Partition is the index of the message's partition, or NoPartition.
	Partition int
	// Offset is the message's number within its partition, without gaps, from 0.
	Offset entry.Offset
	// Position is where it is stored. It is zero in the receipt of a message that was stored by an earlier
	// attempt, or that asked for no durability.
	Position entry.Position
}

// String formats the id for people: offset, position, and partition if there is one.
func (id MessageID) String() string {
	s := fmt.Sprintf("%d@%s", id.Offset, id.Position)
	if id.Partition != NoPartition {
		return fmt.Sprintf("%s/%d", s, id.Partition)
	}
	return s
}
