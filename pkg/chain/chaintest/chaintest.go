// Package chaintest is the ground on which chains, and what stands on them, are tested: a metadata store in a real etcd,
// scripted bookies, and owners that replace one another.
//
//	f := chaintest.New(t, etcd.Client(), 3)
//	guard := f.Takeover()                                  // a new owner
//	c, err := chain.Open(ctx, f.Env(), guard, id, cfg)
//	f.Fake.Crash(bookieclient.FakeUUID(1))                 // and whatever else the script says
package chaintest

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Bundle is what is owned, and LogID a chain in it.
const (
	Bundle = meta.BundleID("public/default/3")
	LogID  = meta.ChainID("topic/00000000-0000-0000-0000-000000000001/0/data")
)

var clusters atomic.Int64

// Cluster is a metadata store, bookies, and the present owner of one bundle.
type Cluster struct {
	Store *meta.Store
	Fake  *bookieclient.Fake
	// Meta is what chains get of the store.
	Meta chain.Metadata
	// Hold, if set, holds the placing of ledgers until it is closed; Placed is called after each look for bookies.
	Hold   chan struct{}
	Placed func()

	tb     testing.TB
	etcd   *clientv3.Client
	ticker *ledger.Ticker
	ids    *chain.IDs
	owners int

	mu         sync.Mutex
	candidates []ledger.Candidate
}

// New makes a cluster of its own name in etcd, which ends with the test.
func New(tb testing.TB, etcd *clientv3.Client, bookies int) *Cluster {
	tb.Helper()
	uuids := bookieclient.FakeUUIDs(bookies)
	f := &Cluster{tb: tb, etcd: etcd, Fake: bookieclient.NewFake(uuids), ticker: ledger.NewTicker(5 * time.Millisecond)}
	tb.Cleanup(func() {
		f.Fake.Close()
		f.ticker.Close()
	})
	f.Store = meta.New(etcd, fmt.Sprintf("test-%d", clusters.Add(1)), nil)
	_, err := f.Store.EnsureCluster(tb.Context())
	Check(tb, err)
	f.Meta = f.Store
	f.ids = chain.NewIDs(f.Store, 0)
	for _, b := range uuids {
		f.candidates = append(f.candidates, ledger.Candidate{UUID: b, Host: b.String(), FreeBytes: 1 << 40, Writable: true})
	}
	return f
}

// Takeover makes a new broker the owner of the bundle. Its bookies' client is called owner-1, owner-2 and so on.
func (f *Cluster) Takeover() meta.Guard {
	f.tb.Helper()
	ctx := f.tb.Context()
	lease, err := f.etcd.Grant(ctx, 600)
	Check(f.tb, err)
	now, err := f.Store.GetOwner(ctx, Bundle)
	if err != nil && !errors.Is(err, meta.ErrNotFound) {
		f.tb.Fatal(err)
	}
	expect := meta.ExpectNone()
	if now.Broker != "" {
		expect = meta.ExpectOwner(now)
	}
	f.owners++
	id := fmt.Sprintf("b%d", f.owners)
	o, err := f.Store.TakeBundle(ctx, Bundle, meta.BrokerInfo{ID: id, URL: "penstock://" + id + ":7650"}, lease.ID, expect)
	Check(f.tb, err)
	return meta.Guard{Bundle: Bundle, Epoch: o.Epoch}
}

// SetWritable says whether a bookie takes new ledgers.
func (f *Cluster) SetWritable(n int, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.candidates[n].Writable = on
}

// SetFull makes a bookie full, registered so, or writable again.
func (f *Cluster) SetFull(n int, on bool) {
	f.mu.Lock()
	f.candidates[n].Writable, f.candidates[n].Full = !on, on
	uuid := f.candidates[n].UUID
	f.mu.Unlock()
	mode := bookieclient.ModeWritable
	if on {
		mode = bookieclient.ModeFull
	}
	f.Fake.SetMode(uuid, mode)
}

// SetDraining says whether a bookie is to be emptied.
func (f *Cluster) SetDraining(n int, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.candidates[n].Draining = on
}

// Env is the environment of the present owner's chains, with short times.
func (f *Cluster) Env() chain.Env {
	return chain.Env{
		Ledger: ledger.Env{
			Bookies: f.Fake.From(fmt.Sprintf("owner-%d", f.owners)), Ticker: f.ticker,
			Candidates: func() []ledger.Candidate {
				if f.Hold != nil {
					<-f.Hold
				}
				if f.Placed != nil {
					defer f.Placed()
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
		Meta: f.Meta, IDs: f.ids,
	}
}

// Check ends the test on an error.
func Check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// Eventually waits for what nothing announces.
func Eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			tb.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}
