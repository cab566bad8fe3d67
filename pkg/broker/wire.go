package broker

import (
	"context"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/topic"
)

func wirePosition(p entry.Position) *brokerv1.Position {
	return &brokerv1.Position{Ledger: uint64(p.Ledger), Entry: int64(p.Entry), Batch: p.Batch}
}

func ownPosition(p *brokerv1.Position) entry.Position {
	return entry.Position{Ledger: entry.LedgerID(p.GetLedger()), Entry: entry.EntryID(p.GetEntry()), Batch: p.GetBatch()}
}

// starting is where a new subscription is to begin.
func (t *servedTopic) starting(start *brokerv1.Start) func(context.Context) (entry.Offset, error) {
	return func(ctx context.Context) (entry.Offset, error) { return startOffset(ctx, t.log, start) }
}

// startOffset turns a start into an offset between the earliest stored and the end. None means the end.
func startOffset(ctx context.Context, t *topic.Topic, start *brokerv1.Start) (entry.Offset, error) {
	earliest, end := t.Earliest(), t.Next()
	var at entry.Offset
	var err error
	switch s := start.GetAt().(type) {
	case nil, *brokerv1.Start_Latest:
		at = end
	case *brokerv1.Start_Earliest:
		at = earliest
	case *brokerv1.Start_Offset:
		at = entry.Offset(s.Offset)
	case *brokerv1.Start_Position:
		at, err = t.OffsetOf(ctx, ownPosition(s.Position))
	case *brokerv1.Start_Time:
		at, err = t.OffsetAt(ctx, s.Time.AsTime().UnixMilli())
	}
	if err != nil {
		return 0, err //nolint:wrapcheck // it says what was looked for
	}
	return min(max(at, earliest), end), nil
}
