package integration

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/integration/relay"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

func (w *town) etcdLeader() *process.Process {
	w.Helper()
	p, err := w.c.EtcdLeader(w.ctx)
	w.check(err)
	return p
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
func behindProxy(t *testing.T) (*town, *relay.Relay) {
	t.Helper()
	var line *relay.Relay
	w := prepare(t, process.Config{
		BrokerArgs: []string{"--lease-ttl", leaseTTL.String()},
		Etcd: func(name string, endpoints []string) []string {
			if name != "broker-1" {
				return nil
			}
			line = relay.New(t, endpoints[0])
			return []string{line.Addr()}
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
	zombie := w.c.Brokers[0]
	w.ownedBy(zombie, w.c.Brokers[1])
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
		line.Cut()
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
	line.Heal()
	if w.owner() != heir && !w.suspected(heir) {
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
	w.ownedBy(cut, other)
	watch := run.Watch()
	line.Cut()
	lookup := brokerv1.NewLookupClient(w.dial(other))
	w.until("the other broker serves the topic", func() bool {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		defer cancel()
		answer, err := lookup.LookupTopic(ctx, &brokerv1.LookupTopicRequest{Topic: topic})
		return err == nil && w.c.Broker(answer.GetBrokerUrl()) == other
	})
	w.more(run, 1000)
	w.Logf("publish gap of an owner cut off from etcd: %v", watch.Stop())
	line.Heal()
	w.until("the broker that was cut off serves again", func() bool { return cut.WaitReady(w.ctx) == nil })
	w.more(run, 500)
	w.finish(run)
}
