package integration

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

func (w *town) etcdLeader() *process.Process {
	w.Helper()
	k, err := clientv3.New(clientv3.Config{Endpoints: w.c.Endpoints(), Logger: zap.NewNop()})
	w.check(err)
	defer func() { w.check(k.Close()) }()
	for _, p := range w.c.Etcds {
		status, err := k.Status(w.ctx, p.Addr)
		w.check(err)
		if status.Leader == status.Header.MemberId {
			return p
		}
	}
	w.Fatal("etcd has no leader")
	return nil
}

// dial connects the generated client, with the stock codec, to one broker.
func (w *town) dial(p *process.Process) *grpc.ClientConn {
	w.Helper()
	conn, err := grpc.NewClient(p.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	w.check(err)
	w.Cleanup(func() { _ = conn.Close() })
	return conn
}

// frameOf makes a frame of one message.
func frameOf(producer string, sequence uint64, value []byte) []byte {
	return frame.Append(nil, &frame.Header{
		Producer: producer, Sequence: sequence, PublishTime: time.Now().UnixMilli(), Single: &frame.Message{Value: value},
	}, value)
}

// leaseTTL of brokers whose lease is to end within a test.
const leaseTTL = 2 * time.Second

// behindProxy makes a town whose first broker, which serves everything, reaches etcd through a line that can be cut.
func behindProxy(t *testing.T) (*town, *proxy) {
	t.Helper()
	var line *proxy
	w := prepare(t, process.Config{
		BrokerArgs: []string{"--lease-ttl", leaseTTL.String()},
		BrokerEtcd: func(i int, endpoints []string) []string {
			if i > 0 {
				return nil
			}
			line = newProxy(t, endpoints[0])
			return []string{line.addr()}
		},
	})
	for _, p := range append(w.c.Etcds, w.c.Bookies...) {
		w.check(p.Launch())
	}
	w.check(w.c.Brokers[0].Start(w.ctx)) // alone at first, so that it owns everything
	w.connect()
	return w, line
}

// The owner is stopped for longer than its lease lasts, and goes on afterwards: what it was sent meanwhile is not
// acknowledged by it, and nothing is lost, repeated or reordered. Once it hears from etcd when it wakes; once it hears
// nothing, and only the bookies' fences tell it.
func TestFrozenOwner(t *testing.T) {
	t.Parallel()
	for name, deaf := range map[string]bool{"etcd tells": false, "only fences tell": true} {
		t.Run(name, func(t *testing.T) { frozenOwner(t, deaf) })
	}
}

func frozenOwner(t *testing.T, deaf bool) {
	t.Helper()
	w, line := behindProxy(t)
	run := w.load(nil)
	w.more(run, 1000)
	w.check(w.c.Brokers[1].Start(w.ctx))
	zombie := w.owner()
	stream, err := brokerv1.NewPubSubClient(w.dial(zombie)).Publish(w.ctx)
	w.check(err)
	w.check(stream.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Open{
		// Even what needs no disk is acknowledged only for as long as the owner's lease lasts.
		Open: &brokerv1.OpenProducer{Topic: topic, ProducerName: "late", AckLevel: brokerv1.AckLevel_ACK_LEVEL_NONE},
	}}))
	ready, err := stream.Recv()
	w.check(err)
	if ready.GetReady() == nil {
		t.Fatalf("not ready: %v", ready)
	}

	watch := run.Watch()
	w.check(zombie.Pause())
	if deaf { // from now on: later, the news would lie in its socket
		line.cut()
	}
	w.more(run, 500)
	w.Logf("publish gap after SIGSTOP of the owner: %v", watch.Stop())
	heir := w.owner()
	if heir == zombie {
		t.Fatal("a stopped broker owns the topic")
	}
	// While the owner sleeps it is sent a message, which lies in its socket when it wakes. It was never taken over by
	// a client, so it is a phantom if it is stored.
	w.check(stream.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Batch{
		Batch: &brokerv1.Batch{Frame: frameOf("late", 0, []byte("written by a zombie"))},
	}}))
	woken := time.Now().Add(leaseTTL + time.Second)
	if deaf { // fences outlive the processes that stored them
		for _, p := range w.c.Bookies {
			w.check(p.Kill())
			w.check(p.Start(w.ctx))
			w.more(run, 200)
		}
	}
	w.until("its lease has run out", func() bool { return time.Now().After(woken) })
	refused := w.fencedAdds()
	w.check(zombie.Resume())
	for {
		answer, err := stream.Recv()
		if err != nil || answer.GetMoved() != nil || answer.GetError() != nil {
			w.Logf("the zombie's answer: %v, %v", answer, err)
			break
		}
		if answer.GetReceipt() != nil {
			t.Fatalf("the zombie acknowledged a message: %v", answer)
		}
	}
	if deaf && w.fencedAdds() == refused {
		t.Error("the zombie did not try to write, so nothing has refused it")
	}
	w.more(run, 1000)
	line.heal()
	if w.owner() != heir {
		t.Error("the topic moved to a broker that only came back")
	}
	w.until("the former owner serves again", func() bool { return zombie.WaitReady(w.ctx) == nil })
	w.finish(run)
}

// fencedAdds counts the writes that bookies have refused because the ledger has a newer owner.
func (w *town) fencedAdds() (n float64) {
	w.Helper()
	for _, p := range w.c.Bookies {
		n += w.metric(p, `penstock_bookie_adds_total{code="Fenced"}`)
	}
	return n
}

// The owner is cut off from etcd and from nothing else. It goes on until it is fenced; then another serves, and it comes
// back when etcd does.
func TestOwnerCutOffFromEtcd(t *testing.T) {
	t.Parallel()
	w, line := behindProxy(t)
	cut, other := w.c.Brokers[0], w.c.Brokers[1]
	run := w.load(nil)
	w.more(run, 1000)
	w.check(other.Start(w.ctx))
	if w.owner() != cut {
		t.Fatal("the topic moved to a broker that only joined")
	}
	watch := run.Watch()
	line.cut()
	lookup := brokerv1.NewLookupClient(w.dial(other))
	w.until("the other broker serves the topic", func() bool {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		defer cancel()
		answer, err := lookup.LookupTopic(ctx, &brokerv1.LookupTopicRequest{Topic: topic})
		return err == nil && w.c.Broker(answer.GetBrokerUrl()) == other
	})
	w.more(run, 1000)
	w.Logf("publish gap of an owner cut off from etcd: %v", watch.Stop())
	line.heal()
	w.until("the broker that was cut off serves again", func() bool { return cut.WaitReady(w.ctx) == nil })
	w.more(run, 500)
	w.finish(run)
}

// proxy carries TCP connections to one address, until it is cut: then it drops what there is and refuses what comes.
type proxy struct {
	listener net.Listener
	to       string
	done     sync.WaitGroup

	mu     sync.Mutex
	broken bool
	conns  map[net.Conn]bool
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, to: to, conns: make(map[net.Conn]bool)}
	p.done.Go(p.serve)
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.done.Wait()
	})
	return p
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) serve() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.to)
		if err != nil {
			_ = in.Close()
			continue
		}
		if !p.keep(in, out) {
			continue
		}
		for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
			p.done.Go(func() {
				_, _ = io.Copy(pair[0], pair[1])
				p.drop(in, out)
			})
		}
	}
}

func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.broken {
			_ = c.Close()
			continue
		}
		p.conns[c] = true
	}
	return !p.broken
}

func (p *proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(p.conns, c)
	}
}

func (p *proxy) cut() {
	p.mu.Lock()
	p.broken = true
	var all []net.Conn
	for c := range p.conns {
		all = append(all, c)
	}
	p.mu.Unlock()
	p.drop(all...)
}

func (p *proxy) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = false
}
