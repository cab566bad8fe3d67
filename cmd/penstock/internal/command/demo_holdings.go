package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// holdings is what the bookies hold of the topic's closed ledgers, as they tell themselves.
type holdings struct {
	closed map[uint64]*brokerv1.Ledger
	held   map[holding]heldBytes
}

type holding struct {
	ledger uint64
	bookie string
}

type heldBytes struct{ entries, bytes uint64 }

// holdings asks metadata for the topic's closed ledgers, and every bookie that runs for what it holds of them.
func (d *demo) holdings(ctx context.Context) (holdings, error) {
	h := holdings{closed: make(map[uint64]*brokerv1.Ledger), held: make(map[holding]heldBytes)}
	all, err := d.client.Admin().ListLedgers(ctx, &brokerv1.ListLedgersRequest{Topic: demoTopic})
	if err != nil {
		return h, err
	}
	for _, l := range all.GetLedgers() {
		if l.GetState() == "CLOSED" {
			h.closed[l.GetId()] = l
		}
	}
	for _, b := range d.cluster.Bookies {
		if b.Running() {
			if err := h.ask(ctx, b); err != nil {
				return h, err
			}
		}
	}
	return h, nil
}

func (h holdings) ask(ctx context.Context, b *process.Process) (failed error) {
	conn, err := grpc.NewClient(b.Control, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("ask %s for its ledgers: %w", b.Name, err)
	}
	defer func() {
		if err := conn.Close(); err != nil && failed == nil {
			failed = fmt.Errorf("ask %s for its ledgers: %w", b.Name, err)
		}
	}()
	stream, err := bookiev1.NewBookieClient(conn).ListLedgers(ctx, &bookiev1.ListLedgersRequest{})
	for err == nil {
		var l *bookiev1.ListLedgersResponse
		if l, err = stream.Recv(); err == nil && h.closed[l.GetId()] != nil {
			h.held[holding{l.GetId(), b.Name}] = heldBytes{l.GetEntries(), l.GetBytes()}
		}
	}
	if !errors.Is(err, io.EOF) {
		return fmt.Errorf("ask %s for its ledgers: %w", b.Name, err)
	}
	return nil
}

// settledHoldings waits until every copy of the closed ledgers has arrived: the third one may come after the ledger was
// closed, and is none that a failover made.
func (d *demo) settledHoldings(ctx context.Context) (holdings, error) {
	for until := time.Now().Add(demoSnapshotWait); ; {
		h, err := d.holdings(ctx)
		if err != nil || h.arrived() || time.Now().After(until) {
			return h, err
		}
		select {
		case <-ctx.Done():
			return h, ctx.Err()
		case <-time.After(demoPoll):
		}
	}
}

// arrived tells whether each bookie holds every entry of its fragments. Each entry goes to each slot here.
func (h holdings) arrived() bool {
	for id, l := range h.closed {
		want := make(map[string]uint64)
		for i, f := range l.GetFragments() {
			end := l.GetLastEntry() + 1
			if i+1 < len(l.GetFragments()) {
				end = l.GetFragments()[i+1].GetFirstEntry()
			}
			for _, s := range f.GetSlots() {
				want[s.GetBookie()] += uint64(max(0, end-f.GetFirstEntry()))
			}
		}
		for bookie, entries := range want {
			if h.held[holding{id, bookie}].entries < entries {
				return false
			}
		}
	}
	return true
}

func (h holdings) bytes() (n uint64) {
	for _, b := range h.held {
		n += b.bytes
	}
	return n
}

// copied is by how much the bookies hold more, later, of the ledgers that were closed before.
func (h holdings) copied(later holdings) (n uint64) {
	for where, now := range later.held {
		if before := h.held[where].bytes; h.closed[where.ledger] != nil && now.bytes > before {
			n += now.bytes - before
		}
	}
	return n
}

// moved returns the ledgers closed before whose fragments are others later.
func (h holdings) moved(later holdings) (ids []uint64) {
	for id, l := range h.closed {
		now := later.closed[id]
		if now == nil || !slices.EqualFunc(l.GetFragments(), now.GetFragments(), func(a, b *brokerv1.Fragment) bool { return proto.Equal(a, b) }) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// freshLedger returns the ledger that the topic is being written to, once that is one with room for some time: the loss
// of a bookie shows best where it cannot be waited out.
func (d *demo) freshLedger(ctx context.Context) (*brokerv1.Ledger, error) {
	for {
		t, err := d.client.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: demoTopic})
		if err != nil {
			return nil, err
		}
		if n := len(t.GetLedgers()); n > 0 {
			if run := t.GetLedgers()[n-1]; run.GetState() == "OPEN" && (run.GetBytes() < demoRollMiB<<20/8 || d.published()) {
				l, err := d.client.Admin().DescribeLedger(ctx, &brokerv1.DescribeLedgerRequest{Id: run.GetLedger()})
				if err != nil {
					return nil, err
				}
				if len(l.GetLedger().GetFragments()) > 0 {
					return l.GetLedger(), nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(demoPoll):
		}
	}
}
