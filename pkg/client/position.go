package client

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Position says where a subscription or a reader starts, or seeks to. The zero Position is [Latest].
type Position struct {
	kind      positionKind
	partition int
	position  entry.Position
	offset    entry.Offset
	time      time.Time
}

type positionKind uint8

const (
	atLatest positionKind = iota
	atEarliest
	atOffset
	atPosition
	atTime
)

// Earliest is the oldest message still stored.
func Earliest() Position { return Position{kind: atEarliest, partition: NoPartition} }

// Latest is after the newest message.
func Latest() Position { return Position{kind: atLatest, partition: NoPartition} }

// AtOffset is the message with this offset. It needs a topic without partitions, or one partition's name.
func AtOffset(o entry.Offset) Position {
	return Position{kind: atOffset, partition: NoPartition, offset: o}
}

// AtPosition is the message stored there. It needs a topic without partitions, or one partition's name.
func AtPosition(p entry.Position) Position {
	return Position{kind: atPosition, partition: NoPartition, position: p}
}

// AtTime is the first message published at or after t, in each partition.
func AtTime(t time.Time) Position { return Position{kind: atTime, partition: NoPartition, time: t} }

// At is the message with this id. In a partitioned topic it moves that message's partition only.
func At(id MessageID) Position {
	return Position{kind: atOffset, partition: id.Partition, offset: id.Offset}
}

// After is the message that follows the one with this id, in the same partition.
func After(id MessageID) Position {
	return Position{kind: atOffset, partition: id.Partition, offset: id.Offset + 1}
}

// onePartition tells whether the position means something in one partition only.
func (p Position) onePartition() bool { return p.kind == atOffset || p.kind == atPosition }

// Start converts the position for requests of the broker's API.
func (p Position) Start() *brokerv1.Start {
	switch p.kind {
	case atEarliest:
		return &brokerv1.Start{At: &brokerv1.Start_Earliest{Earliest: true}}
	case atOffset:
		return &brokerv1.Start{At: &brokerv1.Start_Offset{Offset: uint64(p.offset)}}
	case atPosition:
		return &brokerv1.Start{At: &brokerv1.Start_Position{Position: &brokerv1.Position{
			Ledger: uint64(p.position.Ledger), Entry: int64(p.position.Entry), Batch: p.position.Batch,
		}}}
	case atTime:
		return &brokerv1.Start{At: &brokerv1.Start_Time{Time: timestamppb.New(p.time)}}
	case atLatest:
	}
	return &brokerv1.Start{At: &brokerv1.Start_Latest{Latest: true}}
}
