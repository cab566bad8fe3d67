package statelog_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/chain/chaintest"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
	"github.com/penstock-mq/penstock/pkg/statelog"
)

// etcd is shared by all tests; each uses a cluster of its own.
var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

const bundle = chaintest.Bundle

var (
	check      = chaintest.Check
	eventually = chaintest.Eventually
)

// cluster has a metadata store that loses replies.
type cluster struct {
	*chaintest.Cluster
	t       testing.TB
	bookies int
	// lostReplies is how many more deletions of ledgers have an unknown outcome.
	lostReplies atomic.Int64
	undo        []func()
}

func newCluster(tb testing.TB, bookies int) *cluster {
	tb.Helper()
	f := &cluster{Cluster: chaintest.New(tb, etcd.Client(), bookies), t: tb, bookies: bookies}
	f.Meta = deletions{f.Store, &f.lostReplies}
	return f
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
	for _, b := range bookieclient.FakeUUIDs(f.bookies) {
		for _, e := range entries {
			f.Fake.Corrupt(b, l, e)
			f.undo = append(f.undo, func() { f.Fake.Mend(b, l, e) })
		}
	}
}

func (f *cluster) readable() {
	for _, undo := range f.undo {
		undo()
	}
	f.undo = nil
}

func (f *cluster) open(guard meta.Guard, cfg statelog.Config) *statelog.Log {
	f.t.Helper()
	l, err := statelog.Open(f.t.Context(), statelog.Env{Chain: f.Env()}, guard, bundle, cfg)
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
