package ledgerstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	testCluster = entry.UUID{1}
	testStorage = entry.StorageUUID{2}
)

// small makes every mechanism run within a few kilobytes. Nothing happens behind the test's back.
func small() Config {
	return Config{
		Dir: "/data", Cluster: testCluster, Storage: testStorage, Fresh: true, SegmentSize: 32 << 10, Spares: 1,
		CacheBytes: 16 << 10, CompactBytesPerSecond: -1, Trash: -1,
	}
}

var quiet = slog.New(slog.DiscardHandler)

func openStore(tb testing.TB, cfg Config, fs vfs.FS) *Store {
	tb.Helper()
	s, err := Open(tb.Context(), cfg, fs, quiet, nil)
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	tb.Cleanup(func() { closeStore(tb, s) })
	return s
}

func closeStore(tb testing.TB, s *Store) {
	tb.Helper()
	if err := s.Close(); err != nil && !errors.Is(err, vfs.ErrPowerCut) {
		tb.Errorf("close: %v", err)
	}
}

func reopen(tb testing.TB, s *Store) *Store {
	tb.Helper()
	closeStore(tb, s)
	return openStore(tb, s.cfg, s.fs.(*strictFS).FS)
}

// body is the one value that an entry has.
func body(l entry.LedgerID, e entry.EntryID, size int) []byte {
	b := fmt.Appendf(nil, "%d:%d:", l, e)
	return append(b, bytes.Repeat([]byte{byte(e)}, max(size-len(b), 0))...)
}

type addOption func(*Add)

func recoveryAdd(term entry.Term) addOption {
	return func(a *Add) { a.Recovery, a.Term = true, term }
}

func urgent(a *Add) { a.Urgent = true }

func withBody(b []byte) addOption { return func(a *Add) { a.Body = b } }

func withLAC(lac entry.EntryID) addOption { return func(a *Add) { a.LAC = lac } }

func withGeneration(g uint64) addOption { return func(a *Add) { a.Generation = g } }

func newAdd(s *Store, l entry.LedgerID, e entry.EntryID, done func(error), opts ...addOption) *Add {
	a := &Add{Done: done, Add: bookiewire.Add{Ledger: l, Entry: e, LAC: e - 1, Nonce: 7, Body: body(l, e, 100)}}
	_, a.Generation = s.Admission(l)
	for _, o := range opts {
		o(a)
	}
	a.Checksum = entry.Checksum(l, e, a.Body)
	return a
}

// add stores one entry and waits.
func add(s *Store, l entry.LedgerID, e entry.EntryID, opts ...addOption) error {
	out := make(chan error, 1)
	s.Add(newAdd(s, l, e, func(err error) { out <- err }, opts...))
	return <-out
}

func fence(s *Store, l entry.LedgerID, term entry.Term) (bookiewire.FenceReply, error) {
	type outcome struct {
		reply bookiewire.FenceReply
		err   error
	}
	out := make(chan outcome, 1)
	s.Fence(bookiewire.Fence{Ledger: l, Term: term}, func(r bookiewire.FenceReply, err error) { out <- outcome{r, err} })
	o := <-out
	return o.reply, o.err
}

func writeLAC(s *Store, l entry.LedgerID, lac entry.EntryID) error {
	out := make(chan error, 1)
	s.WriteLAC(bookiewire.WriteLAC{Ledger: l, LAC: lac}, func(err error) { out <- err })
	return <-out
}

func readOne(s *Store, l entry.LedgerID, e entry.EntryID) ([]byte, error) {
	r, err := s.Read(context.Background(), bookiewire.Read{Ledger: l, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	if err != nil {
		return nil, err
	}
	return r.Entries[0].Body, nil
}

func recoveryRead(s *Store, l entry.LedgerID, e entry.EntryID, term entry.Term) error {
	_, err := s.Read(context.Background(), bookiewire.Read{
		Ledger: l, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1, Recovery: true, Term: term,
	})
	return err
}

func codeOf(err error) bookiewire.Code {
	if err == nil {
		return bookiewire.OK
	}
	var e *bookiewire.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return bookiewire.Disconnected
}

func wantCode(tb testing.TB, err error, want bookiewire.Code) {
	tb.Helper()
	if got := codeOf(err); got != want {
		tb.Fatalf("answer is %v (%v), want %v", got, err, want)
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func wantEntry(tb testing.TB, s *Store, l entry.LedgerID, e entry.EntryID, want []byte) {
	tb.Helper()
	got, err := readOne(s, l, e)
	if err != nil {
		tb.Fatalf("read %d:%d: %v", l, e, err)
	}
	if !bytes.Equal(got, want) {
		tb.Fatalf("entry %d:%d is %q, want %q", l, e, got, want)
	}
}

// fill adds entries [from, to) of a ledger and waits for all.
func fill(tb testing.TB, s *Store, l entry.LedgerID, from, to entry.EntryID, size int) {
	tb.Helper()
	var wg sync.WaitGroup
	errs := make(chan error, to-from)
	for e := from; e < to; e++ {
		wg.Add(1)
		s.Add(newAdd(s, l, e, func(err error) {
			if err != nil {
				errs <- err
			}
			wg.Done()
		}, withBody(body(l, e, size))))
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		tb.Fatalf("fill ledger %d: %v", l, err)
	}
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

// waitSealed waits until nothing but the active segment and the one prepared after it is unsealed.
func waitSealed(s *Store) {
	empty := int64(4096) // a segment without a batch
	for {
		var unsealed []*Segment
		for _, seg := range s.segments.list() {
			if !seg.sealed.Load() {
				unsealed = append(unsealed, seg)
			}
		}
		// The next segment may not be there yet: then the last of two has something in it.
		if n := len(unsealed); n == 1 || n == 2 && unsealed[1].size.Load() == empty {
			return
		}
		// Each request takes the store's loop round once.
		_ = writeLAC(s, 1<<40, 0)
	}
}

var errDisk = &fsError{}

type fsError struct{}

func (*fsError) Error() string { return "input/output error" }

func asError(err error, target **bookiewire.Error) bool { return errors.As(err, target) }

// benchRecords makes a batch of 1,000 entries over 100 ledgers.
func benchRecords(from entry.EntryID, payload []byte) []segment.Record {
	recs := make([]segment.Record, 1000)
	for i := range recs {
		l, e := entry.LedgerID(2+i%100), from+entry.EntryID(i)
		recs[i] = segment.Record{Kind: segment.KindEntry, Ledger: l, Entry: e, LAC: e - 1, Body: payload, Checksum: entry.Checksum(l, e, payload)}
	}
	return recs
}
