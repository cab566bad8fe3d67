package bookie

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// control serves the control interface.
type control struct {
	bookiev1.UnimplementedBookieServer
	me        Identity
	version   string
	store     *ledgerstore.Store
	collector *Collector
	scrubber  *scrubber
	log       *slog.Logger
}

// Info tells who the bookie is and how it fares.
func (c *control) Info(context.Context, *bookiev1.InfoRequest) (*bookiev1.InfoResponse, error) {
	usage := c.store.Usage()
	ledgers := uint64(0)
	c.store.Ledgers(func(ledgerstore.LedgerInfo) bool {
		ledgers++
		return true
	})
	return &bookiev1.InfoResponse{
		Id: c.me.ID, ClusterUuid: c.me.Cluster.String(), StorageUuid: c.me.Storage.String(),
		State: stateOf(c.store.State()).String(), FreeBytes: usage.Free, TotalBytes: usage.Total,
		SegmentBytes: usage.Live + usage.Dead, Ledgers: ledgers, Version: c.version,
	}, nil
}

// ListLedgers lists the ledgers stored here, by id.
func (c *control) ListLedgers(_ *bookiev1.ListLedgersRequest, stream grpc.ServerStreamingServer[bookiev1.ListLedgersResponse]) error {
	var all []ledgerstore.LedgerInfo
	c.store.Ledgers(func(l ledgerstore.LedgerInfo) bool {
		all = append(all, l)
		return true
	})
	slices.SortFunc(all, func(a, b ledgerstore.LedgerInfo) int { return cmp.Compare(a.Ledger, b.Ledger) })
	for _, l := range all {
		if err := stream.Send(&bookiev1.ListLedgersResponse{
			Id: uint64(l.Ledger), Term: uint64(l.Term), Lac: int64(l.LAC), Limbo: l.Limbo, Entries: uint64(l.Entries), Bytes: uint64(l.Bytes),
		}); err != nil {
			return err
		}
	}
	return nil
}

// CollectGarbage runs one pass now, and compacts until there is nothing to gain.
func (c *control) CollectGarbage(ctx context.Context, _ *bookiev1.CollectGarbageRequest) (*bookiev1.CollectGarbageResponse, error) {
	pass, err := c.collector.Pass(ctx)
	if err != nil {
		return nil, controlError(err)
	}
	reply := &bookiev1.CollectGarbageResponse{LedgersDeleted: uint64(pass.Deleted), Quarantined: uint64(pass.Quarantined)}
	for {
		freed, err := c.store.CompactOnce(ctx)
		if err != nil {
			return nil, controlError(err)
		}
		if freed == 0 {
			return reply, nil
		}
		reply.BytesFreed += uint64(freed)
	}
}

// EndLimbo ends the limbo of ledgers, without a repair: misses are denied again from then on.
func (c *control) EndLimbo(ctx context.Context, request *bookiev1.EndLimboRequest) (*bookiev1.EndLimboResponse, error) {
	if (len(request.GetLedgers()) > 0) == request.GetAll() {
		return nil, status.Error(codes.InvalidArgument, "name ledgers, or ask for all")
	}
	var ended []entry.LedgerID
	c.store.Ledgers(func(l ledgerstore.LedgerInfo) bool {
		if l.Limbo && (request.GetAll() || slices.Contains(request.GetLedgers(), uint64(l.Ledger))) {
			ended = append(ended, l.Ledger)
		}
		return true
	})
	slices.Sort(ended)
	if err := c.store.ClearLimbo(ctx, ended...); err != nil {
		return nil, controlError(err)
	}
	reply := &bookiev1.EndLimboResponse{}
	for _, l := range ended {
		reply.Ledgers = append(reply.Ledgers, uint64(l))
	}
	c.log.Warn("limbo was ended by hand: entries that were lost here are denied from now on", slog.Any("ledgers", ended))
	return reply, nil
}

// ListEntries tells which entries of a ledger are durable here.
func (c *control) ListEntries(_ context.Context, request *bookiev1.ListEntriesRequest) (*bookiev1.ListEntriesResponse, error) {
	if err := c.isMe(request.GetStorageUuid(), false); err != nil {
		return nil, err
	}
	listing, err := c.store.Entries(entry.LedgerID(request.GetLedger()), entry.EntryID(request.GetFirst()), entry.EntryID(request.GetLast()))
	if err != nil {
		code := codes.Unavailable
		if bookiewire.AsError(err).Code == bookiewire.BadRequest {
			code = codes.InvalidArgument
		}
		return nil, status.Errorf(code, "list entries of ledger %d: %v", request.GetLedger(), err)
	}
	return &bookiev1.ListEntriesResponse{Known: listing.Known, Limbo: listing.Limbo, Bitmap: listing.Bits}, nil
}

// isMe refuses what is meant for another bookie: one that listened here before.
func (c *control) isMe(storage string, anybody bool) error {
	if storage == c.me.Storage.String() || storage == "" && anybody {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "this is storage %s, not %s", c.me.Storage, storage)
}

// ListDamage lists what was found unreadable here.
func (c *control) ListDamage(_ context.Context, request *bookiev1.ListDamageRequest) (*bookiev1.ListDamageResponse, error) {
	if err := c.isMe(request.GetStorageUuid(), true); err != nil {
		return nil, err
	}
	found := map[entry.LedgerID]*bookiev1.LedgerDamage{}
	for _, d := range c.store.Damage() {
		out := &bookiev1.LedgerDamage{Ledger: uint64(d.Ledger)}
		for _, r := range d.Entries {
			out.Entries = append(out.Entries, &bookiev1.EntryRange{First: int64(r.First), Last: int64(r.Last)})
		}
		found[d.Ledger] = out
	}
	c.store.Ledgers(func(l ledgerstore.LedgerInfo) bool {
		if l.Limbo {
			if found[l.Ledger] == nil {
				found[l.Ledger] = &bookiev1.LedgerDamage{Ledger: uint64(l.Ledger)}
			}
			found[l.Ledger].Limbo = true
		}
		return true
	})
	reply := &bookiev1.ListDamageResponse{ScrubbedBytes: uint64(c.scrubber.bytes.Load()), Scrubs: uint64(c.scrubber.passes.Load())}
	for _, id := range slices.Sorted(maps.Keys(found)) {
		reply.Ledgers = append(reply.Ledgers, found[id])
	}
	return reply, nil
}

// Scrub reads all that is sealed now.
func (c *control) Scrub(ctx context.Context, _ *bookiev1.ScrubRequest) (*bookiev1.ScrubResponse, error) {
	sum, err := c.scrubber.now(ctx)
	if err != nil {
		return nil, controlError(err)
	}
	return &bookiev1.ScrubResponse{Segments: uint64(sum.Segments), Bytes: uint64(sum.Bytes), Damaged: uint64(sum.Damaged)}, nil
}

// controlError gives an error the status that a caller can decide by.
func controlError(err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, meta.ErrUnavailable), errors.Is(err, meta.ErrUnknownOutcome):
		code = codes.Unavailable
	}
	return status.Error(code, err.Error())
}
