package statelog_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
	"github.com/penstock-mq/penstock/pkg/statelog"
)

// etcd is shared by all tests; each uses a cluster of its own.
var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

const (
	bundle = meta.BundleID("public/default/3")
)

var clusters atomic.Int64

// cluster is a metadata store, bookies, and the present owner of one bundle.
type cluster struct {
	t      testing.TB
	store  *meta.Store
	fake   *bookieclient.Fake
	ticker *ledger.Ticker
	ids    *chain.IDs
	owners int
	hold   chan struct{} // if set, ledgers are placed once it is closed
	placed func()        // if set, called after each look for bookies
	// lostReplies is how many more deletions of ledgers have an unknown outcome.
	lostReplies atomic.Int64
	undo        []func()

	mu         sync.Mutex
	candidates []ledger.Candidate
}

func newCluster(tb testing.TB, bookies int) *cluster {
	tb.Helper()
	f := &cluster{t: tb, fake: bookieclient.NewFake(bookieclient.FakeUUIDs(bookies)), ticker: ledger.NewTicker(5 * time.Millisecond)}
	tb.Cleanup(func() {
		f.fake.Close()
		f.ticker.Close()
	})
	f.store = meta.New(etcd.Client(), fmt.Sprintf("test-%d", clusters.Add(1)), nil)
	_, err := f.store.EnsureCluster(tb.Context())
	check(tb, err)
	f.ids = chain.NewIDs(f.store, 0)
	for _, b := range bookieclient.FakeUUIDs(bookies) {
		f.candidates = append(f.candidates, ledger.Candidate{UUID: b, Host: b.String(), FreeBytes: 1 << 40, Writable: true})
	}
	return f
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// takeover makes a new broker the owner of the bundle.
func (f *cluster) takeover() meta.Guard {
	f.t.Helper()
	lease, err := etcd.Client().Grant(f.t.Context(), 600)
	check(f.t, err)
	now, err := f.store.GetOwner(f.t.Context(), bundle)
	if err != nil && !errors.Is(err, meta.ErrNotFound) {
		f.t.Fatal(err)
	}
	expect := meta.ExpectNone()
	if now.Broker != "" {
		expect = meta.ExpectOwner(now)
	}
	f.owners++
	id := fmt.Sprintf("b%d", f.owners)
	o, err := f.store.TakeBundle(f.t.Context(), bundle, meta.BrokerInfo{ID: id, URL: "penstock://" + id + ":7650"}, lease.ID, expect)
	check(f.t, err)
	return meta.Guard{Bundle: bundle, Epoch: o.Epoch}
}

func (f *cluster) setWritable(n int, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.candidates[n].Writable = on
}

func (f *cluster) env() chain.Env {
	return chain.Env{
		Ledger: ledger.Env{
			Bookies: f.fake.From(fmt.Sprintf("owner-%d", f.owners)), Ticker: f.ticker,
			Candidates: func() []ledger.Candidate {
				if f.hold != nil {
					<-f.hold
				}
				if f.placed != nil {
					defer f.placed()
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				return append([]ledger.Candidate(nil), f.candidates...)
			},
			Config: ledger.Config{
				SuspectAfter: 50 * time.Millisecond, DelayedChange: 50 * time.Millisecond, RetryAfter: 10 * time.Millisecond,
				StallTimeout: 100 * time.Millisecond, DrainTimeout: 20 * time.Millisecond, NegativeWait: time.Millisecond, Seed: 1,
			},
		},
		Meta: deletions{f.store, &f.lostReplies}, IDs: f.ids,
	}
}

// deletions loses replies.
type deletions struct {
	chain.Metadata
	lost *atomic.Int64
}

func (d deletions) DeleteLedger(ctx context.Context, g meta.Guard, c meta.Chain, id entry.LedgerID) (meta.Chain, error) {
	after, err := d.Metadata.DeleteLedger(ctx, g, c, id)
	if err == nil && d.lost.Add(-1) >= 0 {
		err = meta.ErrUnknownOutcome
	}
	return after, err
}

// unreadable has every bookie fail to read some entries of a ledger, until readable.
func (f *cluster) unreadable(l entry.LedgerID, entries ...entry.EntryID) {
	for _, b := range bookieclient.FakeUUIDs(len(f.candidates)) {
		for _, e := range entries {
			f.fake.Corrupt(b, l, e)
			f.undo = append(f.undo, func() { f.fake.Mend(b, l, e) })
		}
	}
}

func (f *cluster) readable() {
	for _, undo := range f.undo {
		undo()
	}
	f.undo = nil
}

// eventually waits for what nothing announces.
func eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			tb.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func (f *cluster) open(guard meta.Guard, cfg statelog.Config) *statelog.Log {
	f.t.Helper()
	l, err := statelog.Open(f.t.Context(), statelog.Env{Chain: f.env()}, guard, bundle, cfg)
	check(f.t, err)
	f.t.Cleanup(l.Shutdown)
	return l
}

// put stores records and waits.
func put(tb testing.TB, l *statelog.Log, records ...statelog.Record) {
	tb.Helper()
	check(tb, <-start(tb, l, records...))
}

// start appends records; the channel tells the outcome.
func start(tb testing.TB, l *statelog.Log, records ...statelog.Record) <-chan error {
	tb.Helper()
	done := make(chan error, 1)
	check(tb, l.Append(tb.Context(), records, func(err error) { done <- err }))
	return done
}

func rec(owner string, kind uint8, key, value string) statelog.Record {
	return statelog.Record{Owner: owner, Kind: kind, Key: []byte(key), Value: []byte(value)}
}

func del(owner string, kind uint8, key string) statelog.Record {
	return statelog.Record{Owner: owner, Kind: kind, Key: []byte(key), Delete: true}
}

// state is everything live, as owner/kind/key → value.
func state(tb testing.TB, l *statelog.Log) map[string]string {
	tb.Helper()
	out := map[string]string{}
	for _, owner := range l.Owners() {
		records, err := l.Load(tb.Context(), owner)
		check(tb, err)
		maps.Copy(out, named(records))
	}
	return out
}

func named(records []statelog.Record) map[string]string {
	out := map[string]string{}
	for _, r := range records {
		out[fmt.Sprintf("%s/%d/%s", r.Owner, r.Kind, r.Key)] = string(r.Value)
	}
	return out
}

// byOwner sorts what state returns, for the owners o0 to o3.
func byOwner(all map[string]string) map[string]map[string]string {
	out := map[string]map[string]string{"o0": {}, "o1": {}, "o2": {}, "o3": {}}
	for k, v := range all {
		out[k[:2]][k] = v
	}
	return out
}
