package meta_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

// etcd is shared by all tests; each uses a cluster of its own.
var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error {
		// The connections of etcd's members with each other outlive them for a while; nothing else here speaks HTTP/1.
		return goleak.Find(
			goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
			goleak.IgnoreAnyFunction("net/http.(*conn).serve"), goleak.IgnoreAnyFunction("net/http.(*connReader).backgroundRead"),
		)
	}))
}

var clusters atomic.Int64

func uniqueCluster() string { return fmt.Sprintf("test-%d", clusters.Add(1)) }

const bundle = meta.BundleID("public/default/3")

// fixture is a bootstrapped cluster with one bundle owned and one topic.
type fixture struct {
	*meta.Store
	t       *testing.T
	cluster string
	guard   meta.Guard
	lease   clientv3.LeaseID
	topic   meta.Topic
	chain   meta.ChainID
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t, cluster: uniqueCluster()}
	f.Store = meta.New(etcd.Client(), f.cluster, nil)
	_, err := f.EnsureCluster(t.Context())
	check(t, err)
	f.lease = newLease(t)
	owner, err := f.TakeBundle(t.Context(), bundle, broker("b1"), f.lease, meta.ExpectNone())
	check(t, err)
	f.guard = meta.Guard{Bundle: bundle, Epoch: owner.Epoch}
	f.topic, err = f.CreateTopic(t.Context(), "public/default/orders", 0)
	check(t, err)
	f.chain = meta.DataChain(f.topic.UUID, 0)
	return f
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newLease(t *testing.T) clientv3.LeaseID {
	t.Helper()
	resp, err := etcd.Client().Grant(t.Context(), 600)
	check(t, err)
	return resp.ID
}

func broker(id string) meta.BrokerInfo {
	return meta.BrokerInfo{ID: id, URL: "penstock://" + id + ":7650"}
}

// storage names bookie n's disk.
func storage(n byte) entry.StorageUUID { return entry.StorageUUID{0: n, 15: 0xee} }

func fragment(first entry.EntryID, bookies ...byte) meta.Fragment {
	f := meta.Fragment{First: first}
	for _, n := range bookies {
		f.Slots = append(f.Slots, meta.Slot{UUID: storage(n), Zone: "z" + string('0'+n%3), Host: uint32(n)})
	}
	return f
}

var replication = meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}

// newLedger is what T1 is given: three bookies, the next free id.
func (f *fixture) newLedger() meta.Ledger {
	f.t.Helper()
	id, err := f.ReserveLedgerIDs(f.t.Context(), 1)
	check(f.t, err)
	return meta.Ledger{ID: id, Replication: replication, Fragments: []meta.Fragment{fragment(0, 1, 2, 3)}}
}

// open opens a first ledger.
func (f *fixture) open() (meta.Chain, meta.Ledger) {
	f.t.Helper()
	c, err := f.GetChain(f.t.Context(), f.chain)
	check(f.t, err)
	c, l, err := f.OpenLedger(f.t.Context(), f.guard, c, f.newLedger(), nil)
	check(f.t, err)
	return c, l
}

// closing ends l after n entries of one message and 10 bytes each.
func closing(c meta.Chain, l meta.Ledger, n int64) meta.Closing {
	first := c.Runs[len(c.Runs)-1].First
	return meta.Closing{Ledger: l, Last: entry.EntryID(n - 1), Length: 10 * n, End: first + entry.Offset(n), MaxTime: 1000 + n}
}

// takeover makes another broker the owner.
func (f *fixture) takeover() meta.Guard {
	f.t.Helper()
	now, err := f.GetOwner(f.t.Context(), bundle)
	check(f.t, err)
	o, err := f.TakeBundle(f.t.Context(), bundle, broker("b2"), f.lease, meta.ExpectOwner(now))
	check(f.t, err)
	return meta.Guard{Bundle: bundle, Epoch: o.Epoch}
}

// proxy stands between a client and etcd. It can refuse connections, and lose replies while requests pass.
type proxy struct {
	t      *testing.T
	listen net.Listener
	wg     sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]bool
	refuse bool
	mute   atomic.Bool
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	check(t, err)
	p := &proxy{t: t, listen: l, conns: make(map[net.Conn]bool)}
	p.wg.Go(func() { p.accept(target) })
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

// client makes a client through the proxy that has a working connection.
func (p *proxy) client() *clientv3.Client {
	p.t.Helper()
	c, err := embedetcd.NewClient([]string{p.listen.Addr().String()})
	check(p.t, err)
	p.t.Cleanup(func() { _ = c.Close() })
	_, err = c.Get(p.t.Context(), "warm-up")
	check(p.t, err)
	return c
}

func (p *proxy) accept(target string) {
	for {
		in, err := p.listen.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refuse := p.refuse
		p.mu.Unlock()
		if refuse {
			_ = in.Close()
			continue
		}
		out, err := new(net.Dialer).DialContext(context.Background(), "tcp", target)
		if err != nil {
			_ = in.Close()
			continue
		}
		p.mu.Lock()
		if p.refuse { // since it was asked above
			p.mu.Unlock()
			_, _ = in.Close(), out.Close()
			continue
		}
		p.conns[in], p.conns[out] = true, true
		p.mu.Unlock()
		p.wg.Go(func() { p.pump(out, in, nil) })
		p.wg.Go(func() { p.pump(in, out, &p.mute) })
	}
}

func (p *proxy) pump(to, from net.Conn, mute *atomic.Bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && (mute == nil || !mute.Load()) {
			if _, err := to.Write(buf[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	_, _ = to.Close(), from.Close()
	p.mu.Lock()
	delete(p.conns, to)
	delete(p.conns, from)
	p.mu.Unlock()
}

// cut drops all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// setRefuse refuses new connections and drops the old ones, or takes new ones again.
func (p *proxy) setRefuse(on bool) {
	p.mu.Lock()
	p.refuse = on
	p.mu.Unlock()
	if on {
		p.cut()
	}
}

// loseReply runs op against etcd so that its first transaction is applied and the reply to it lost: until
// something below prefix has changed nothing comes back, then the connection breaks.
func (p *proxy) loseReply(prefix string, op func() error) error {
	p.t.Helper()
	ctx, cancel := context.WithCancel(p.t.Context())
	defer cancel()
	now, err := etcd.Client().Get(ctx, prefix)
	check(p.t, err)
	applied := etcd.Client().Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(now.Header.Revision+1))
	p.mute.Store(true)
	result := make(chan error, 1)
	p.wg.Go(func() { result <- op() })
	<-applied
	p.mute.Store(false)
	p.cut()
	return <-result
}

// short is a context that ends soon, for calls that etcd does not answer.
func short(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}
