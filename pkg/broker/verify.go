package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

const (
	verifyWindow   = 4096             // entries whose checksums are held at a time
	verifyEntries  = 512              // of one read
	verifyBytes    = 4 << 20          // likewise
	verifyProblems = 100              // of one ledger that are reported
	verifyAttempts = 3                // of a ledger whose copies move meanwhile
	verifyPatience = 10 * time.Second // with one read
)

// VerifyLedgers reads every copy of every entry, ledger by ledger.
func (a *admin) VerifyLedgers(req *brokerv1.VerifyLedgersRequest, stream brokerv1.Admin_VerifyLedgersServer) error {
	ctx := stream.Context()
	ids := make([]entry.LedgerID, 0, len(req.GetLedgers()))
	for _, id := range req.GetLedgers() {
		ids = append(ids, entry.LedgerID(id))
	}
	if req.GetTopic() != "" {
		ofTopic, err := a.ledgerIDs(ctx, &brokerv1.ListLedgersRequest{Topic: req.GetTopic()})
		if err != nil {
			return statusError(err)
		}
		ids = append(ids, ofTopic...)
	}
	if len(ids) == 0 && req.GetTopic() == "" {
		return statusError(invalid("verify ledgers: name ledgers, or a topic"))
	}
	slices.Sort(ids)
	names := a.bookieNames(ctx)
	for _, id := range slices.Compact(ids) {
		report, err := a.verify(ctx, id, names)
		if errors.Is(err, meta.ErrNotFound) && req.GetTopic() != "" {
			continue // trimmed meanwhile
		}
		if err != nil {
			return statusError(err)
		}
		if err := stream.Send(report); err != nil {
			return err //nolint:wrapcheck // gRPC's own
		}
	}
	return nil
}

// verify reads every copy of a ledger, again if they moved in between.
func (a *admin) verify(ctx context.Context, id entry.LedgerID, names map[entry.StorageUUID]string) (*brokerv1.VerifyLedgersResponse, error) {
	for attempt := 1; ; attempt++ {
		l, err := a.ledger(ctx, uint64(id))
		if err != nil {
			return nil, err
		}
		v := &verification{b: a.b, l: l, names: names, report: &brokerv1.VerifyLedgersResponse{Ledger: uint64(id), State: l.State.String()}}
		if l.State == meta.LedgerDeleting {
			return v.report, nil
		}
		if err := v.run(ctx); err != nil {
			return nil, fmt.Errorf("verify ledger %d: %w", id, err)
		}
		if len(v.report.GetProblems()) == 0 || attempt == verifyAttempts {
			return v.report, nil
		}
		now, err := a.ledger(ctx, uint64(id))
		if err != nil {
			return nil, err
		}
		if now.Rev == l.Rev {
			return v.report, nil
		}
	}
}

// verification is of one ledger, as its record was when it began.
type verification struct {
	b      *Broker
	l      meta.Ledger
	names  map[entry.StorageUUID]string
	report *brokerv1.VerifyLedgersResponse

	// Of the window at hand: the good copies of each entry, and the checksum of the first of them.
	first entry.EntryID
	good  []uint32
	sums  []uint32
}

// run reads fragment by fragment, window by window, bookie by bookie. Problems are in the report; an error is ctx's end.
func (v *verification) run(ctx context.Context) error {
	last := v.last(ctx)
	v.report.Entries = uint64(last + 1)
	if last < 0 {
		return nil
	}
	v.report.Fewest = uint32(v.l.WriteQuorum)
	for i, f := range v.l.Fragments {
		end := last
		if i+1 < len(v.l.Fragments) {
			end = min(end, v.l.Fragments[i+1].First-1)
		}
		for from := f.First; from <= end; from += verifyWindow {
			to := min(end, from+verifyWindow-1)
			v.first, v.good, v.sums = from, make([]uint32, to-from+1), make([]uint32, to-from+1)
			for slot := range f.Slots {
				if err := v.readSlot(ctx, f, slot, from, to); err != nil {
					return err
				}
			}
			v.report.Fewest = min(v.report.GetFewest(), slices.Min(v.good))
		}
	}
	return nil
}

// last is the last entry to look at: of a ledger that is not closed, the last that bookies know to be confirmed.
func (v *verification) last(ctx context.Context) entry.EntryID {
	if v.l.State == meta.LedgerClosed {
		return v.l.Last
	}
	env := v.b.topicEnv.Chain.Ledger
	env.Metadata = v.b.deps.Meta
	r := ledger.NewReader(env, v.l)
	_, _ = r.Read(ctx, 0, ledger.AskLAC, 1) // for what it learns; the copies are read below
	return r.LAC()
}

// readSlot reads what the bookie in a slot should have of the entries from … to.
func (v *verification) readSlot(ctx context.Context, f meta.Fragment, slot int, from, to entry.EntryID) error {
	ensemble, stride := entry.EntryID(v.l.Ensemble), entry.EntryID(v.l.Ensemble)
	classes := v.l.WriteQuorum // the entries of a slot, by their residue
	if v.l.WriteQuorum == v.l.Ensemble {
		stride, classes = 1, 1
	}
	for c := range classes {
		start := from
		if stride > 1 { // entry e lies on the slots from e mod E on
			want := (entry.EntryID(slot-c) + ensemble) % ensemble
			start += (want - from%ensemble + ensemble) % ensemble
		}
		if err := v.readRun(ctx, f.Slots[slot].UUID, start, to, stride); err != nil {
			return err
		}
	}
	return nil
}

// readRun reads every stride-th entry from first to last of one bookie.
func (v *verification) readRun(ctx context.Context, u entry.StorageUUID, first, last, stride entry.EntryID) error {
	for e := first; e <= last; {
		left := (last-e)/stride + 1
		entries, err := v.read(ctx, u, bookiewire.Read{
			Ledger: v.l.ID, First: e, Stride: uint32(stride), MaxEntries: uint32(min(left, verifyEntries)), MaxBytes: verifyBytes,
		})
		if ctx.Err() != nil {
			return ctx.Err() //nolint:wrapcheck // as a context says it
		}
		if err != nil {
			failure := bookiewire.AsError(err)
			what, lost := "UNREACHABLE", entry.EntryID(1)
			switch failure.Code {
			case bookiewire.NoLedger:
				what, lost = "MISSING", left
			case bookiewire.NoEntry:
				what = "MISSING"
			case bookiewire.BadChecksum:
				what = "CORRUPT"
			case bookiewire.Unknown: // lost, maybe, or unreadable, and not repaired
				what = "UNKNOWN"
			default: // the next is no better
				lost = left
			}
			for range lost {
				v.note(u, e, what, err.Error())
				e += stride
			}
			continue
		}
		for _, x := range entries {
			if x.Entry != e { // the run ends
				break
			}
			v.take(u, x)
			e += stride
		}
	}
	return nil
}

// read asks one bookie, twice where it can't be reached. It returns at least one entry, or an error.
func (v *verification) read(ctx context.Context, u entry.StorageUUID, r bookiewire.Read) ([]bookiewire.ReadEntry, error) {
	type answer struct {
		reply bookiewire.ReadReply
		err   error
	}
	var got answer
	for range 2 {
		answered := make(chan answer, 1)
		attempt, cancel := context.WithTimeout(ctx, verifyPatience)
		v.b.deps.Bookies.Read(attempt, u, r, func(reply bookiewire.ReadReply, err error) { answered <- answer{reply, err} })
		got = <-answered
		cancel()
		if got.err == nil || ctx.Err() != nil {
			break
		}
		if code := bookiewire.AsError(got.err).Code; code.Negative() || code == bookiewire.Unknown || code == bookiewire.BadChecksum {
			break
		}
	}
	if got.err == nil && (len(got.reply.Entries) == 0 || got.reply.Entries[0].Entry != r.First) {
		return nil, errors.New("bookie answered without the entry that was asked for")
	}
	return got.reply.Entries, got.err
}

// take judges a copy.
func (v *verification) take(u entry.StorageUUID, x bookiewire.ReadEntry) {
	at := x.Entry - v.first
	sum := entry.Checksum(v.l.ID, x.Entry, x.Body)
	switch {
	case sum != x.Checksum:
		v.note(u, x.Entry, "CORRUPT", fmt.Sprintf("checksum %08x, want %08x", sum, x.Checksum))
	case v.good[at] > 0 && sum != v.sums[at]:
		v.note(u, x.Entry, "DIFFERENT", fmt.Sprintf("checksum %08x, another copy's %08x", sum, v.sums[at]))
	default:
		v.report.Copies++
		v.report.Good++
		v.report.Bytes += uint64(len(x.Body))
		v.good[at]++
		v.sums[at] = sum
	}
}

// note reports a copy that is not as it should be.
func (v *verification) note(u entry.StorageUUID, e entry.EntryID, what, detail string) {
	v.report.Copies++
	if len(v.report.GetProblems()) >= verifyProblems {
		return
	}
	name := v.names[u]
	if name == "" {
		name = u.String()
	}
	v.report.Problems = append(v.report.Problems, &brokerv1.CopyProblem{Entry: int64(e), Bookie: name, What: what, Detail: detail})
}
