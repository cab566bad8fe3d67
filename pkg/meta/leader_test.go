package meta_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

// members is an etcd of three members in this process.
type members struct {
	t   *testing.T
	all []*embed.Etcd // nil: stopped
}

func startMembers(t *testing.T) *members {
	t.Helper()
	m := &members{t: t}
	t.Cleanup(m.close)
	for {
		err := m.start()
		if err == nil {
			return m
		}
		if m.close(); !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		} // somebody took a port between its choice and its use
	}
}

func (m *members) start() error {
	const n = 3
	var ports []net.Listener
	free := func() url.URL {
		l, err := new(net.ListenConfig).Listen(m.t.Context(), "tcp", "127.0.0.1:0")
		check(m.t, err)
		ports = append(ports, l) // until all are chosen
		return url.URL{Scheme: "http", Host: l.Addr().String()}
	}
	var clients, peers []url.URL
	var names []string
	for i := range n {
		clients, peers = append(clients, free()), append(peers, free())
		names = append(names, fmt.Sprintf("m%d=%s", i, peers[i].String()))
	}
	for _, l := range ports {
		check(m.t, l.Close())
	}
	m.all = make([]*embed.Etcd, n)
	ctx, cancel := context.WithCancelCause(m.t.Context())
	defer cancel(nil)
	var wg sync.WaitGroup
	for i := range n {
		ec := embed.NewConfig()
		ec.Name, ec.Dir = fmt.Sprintf("m%d", i), m.t.TempDir()
		ec.ListenClientUrls, ec.AdvertiseClientUrls = clients[i:i+1], clients[i:i+1]
		ec.ListenPeerUrls, ec.AdvertisePeerUrls = peers[i:i+1], peers[i:i+1]
		ec.InitialCluster = strings.Join(names, ",")
		ec.TickMs, ec.ElectionMs = 20, 300
		ec.UnsafeNoFsync, ec.EnableGRPCGateway = true, false
		ec.GRPCKeepAliveMinTime = time.Second
		ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
		wg.Go(func() {
			e, err := embed.StartEtcd(ec)
			if err != nil {
				cancel(err)
				return
			}
			m.all[i] = e
			select {
			case <-e.Server.ReadyNotify():
			case <-ctx.Done():
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

func (m *members) close() {
	// A leader that closes first would try for long to hand over to one that closes, too.
	for range m.all {
		slices.SortFunc(m.all, func(a, b *embed.Etcd) int { return leads(a) - leads(b) })
		if e := m.all[0]; e != nil {
			e.Close()
		}
		m.all = m.all[1:]
	}
}

// leads is 1 for a leader, 0 for another member and for none.
func leads(e *embed.Etcd) int {
	if e != nil && e.Server.Leader() == e.Server.MemberID() {
		return 1
	}
	return 0
}

func (m *members) endpoints() []string {
	var all []string
	for _, e := range m.all {
		all = append(all, e.Clients[0].Addr().String())
	}
	return all
}

// leader waits until a member that runs leads.
func (m *members) leader() int {
	for m.t.Context().Err() == nil {
		for i, e := range m.all {
			if leads(e) == 1 {
				return i
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	m.t.Fatal("nobody leads")
	return 0
}

// hand makes another member the leader, in good order.
func (m *members) hand() {
	at := m.leader()
	to := m.all[(at+1)%len(m.all)].Server.MemberID()
	check(m.t, m.all[at].Server.MoveLeader(m.t.Context(), uint64(m.all[at].Server.MemberID()), uint64(to)))
}

// kill ends the leader without a word.
func (m *members) kill() {
	at := m.leader()
	m.all[at].Server.HardStop()
	m.all[at].Close()
	m.all[at] = nil
}

// Etcd's leader changes, in good order and by the death of the old one, under transactions, watches, a session and an
// election: no lease is lost, nothing is missed or done twice, and each transaction ends with a definite outcome.
func TestEtcdLeaderChanges(t *testing.T) {
	t.Parallel()
	m := startMembers(t)
	cli, err := embedetcd.NewClient(m.endpoints())
	check(t, err)
	defer func() { check(t, cli.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	s := meta.New(cli, "leaders", nil)
	_, err = s.EnsureCluster(ctx)
	check(t, err)
	session, err := lease.NewSession(ctx, cli, 6*time.Second, nil)
	check(t, err)
	defer func() { check(t, session.Close(context.WithoutCancel(ctx))) }()
	grant, err := session.Wait(ctx)
	check(t, err)
	owner, err := s.TakeBundle(ctx, bundle, broker("b1"), grant.ID, meta.ExpectNone())
	check(t, err)
	guard := meta.Guard{Bundle: bundle, Epoch: owner.Epoch}
	leadership, err := lease.Campaign(ctx, cli, session, s.ElectionKey("test"), "b1")
	check(t, err)
	defer func() { check(t, leadership.Resign(context.WithoutCancel(ctx))) }()
	cache := newCache(t, s)

	// Three goroutines change things all the time; each change must be done once.
	var stop atomic.Bool
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[entry.LedgerID]bool{}
	names := map[string]meta.Topic{}
	var term entry.Term
	wg.Go(func() {
		for !stop.Load() {
			id, err := s.ReserveLedgerIDs(ctx, 1)
			if err != nil || ids[id] {
				t.Errorf("reserved ledger id %d: %v", id, err)
				return
			}
			ids[id] = true
		}
	})
	wg.Go(func() {
		for i := 0; !stop.Load(); i++ {
			name := fmt.Sprintf("public/default/t%d", i)
			topic, err := s.CreateTopic(ctx, name, 0) // ErrExists would be its own
			if err != nil {
				t.Errorf("create topic: %v", err)
				return
			}
			mu.Lock()
			names[name] = topic
			mu.Unlock()
		}
	})
	c, err := s.GetChain(ctx, meta.StateChain(bundle))
	check(t, err)
	id, err := s.ReserveLedgerIDs(ctx, 1)
	check(t, err)
	_, l, err := s.OpenLedger(ctx, guard, c, meta.Ledger{ID: id, Replication: replication, Fragments: []meta.Fragment{fragment(0, 1, 2, 3)}}, nil)
	check(t, err)
	wg.Go(func() {
		for !stop.Load() {
			got, err := s.Owned(guard).StartRecovery(ctx, l.ID)
			if err != nil || got.Term <= term {
				t.Errorf("term %d after %d: %v", got.Term, term, err)
				return
			}
			term = got.Term
		}
	})

	for round, change := range []func(){m.hand, m.kill} {
		before := time.Now()
		old := m.leader()
		change()
		if now := m.leader(); now == old {
			t.Fatalf("round %d: member %d still leads", round, now)
		}
		topic, err := s.CreateTopic(ctx, fmt.Sprintf("public/default/round-%d", round), 0)
		check(t, err)
		check(t, cache.WaitRevision(ctx, topic.Rev))
		if got, ok := cache.Topic(topic.Name); !ok || got != topic {
			t.Fatalf("round %d: the cache has %+v", round, got)
		}
		for grant.Deadline().Before(before.Add(session.TTL())) { // renewed since
			select {
			case <-grant.Lost():
				t.Fatalf("round %d: the lease is lost", round)
			case <-time.After(20 * time.Millisecond):
			}
		}
		t.Logf("round %d took %v", round, time.Since(before))
	}
	stop.Store(true)
	wg.Wait()
	if session.ID() != grant.ID || leadership.Context().Err() != nil {
		t.Fatalf("lease %x became %x; leadership: %v", grant.ID, session.ID(), context.Cause(leadership.Context()))
	}
	if o, err := s.GetOwner(ctx, bundle); err != nil || o.Epoch != owner.Epoch || o.Broker != "b1" {
		t.Fatalf("owner %+v, %v", o, err)
	}
	var newest int64
	for _, topic := range names {
		newest = max(newest, topic.Rev)
	}
	check(t, cache.WaitRevision(ctx, newest))
	for name, topic := range names {
		if got, ok := cache.Topic(name); !ok || got != topic {
			t.Fatalf("the cache has %+v, created was %+v", got, topic)
		}
	}
	if cache.Resyncs() != 1 {
		t.Errorf("the cache read everything %d times", cache.Resyncs())
	}
	t.Logf("%d ids, %d topics, term %d", len(ids), len(names), term)
}
