package integration

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// twin makes another process with the id of the town's first broker, on a port of its own.
func (w *town) twin(ttl time.Duration) (p *process.Process, addr string) {
	w.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	w.check(err)
	addr = l.Addr().String()
	w.check(l.Close())
	p, err = w.c.Add("broker", "twin", []string{
		"--broker-id", w.c.Brokers[0].Name, "--etcd", strings.Join(w.c.Endpoints(), ","), "--listen", addr, "--http", "", "--lease-ttl", ttl.String(),
	})
	w.check(err)
	return p, addr
}

// serves waits until a broker that is alone serves a topic.
func (w *town) serves(ctx context.Context, addr string) {
	w.Helper()
	k, err := client.Connect(ctx, "penstock://"+addr)
	w.check(err)
	defer func() { w.check(k.Close(context.WithoutCancel(ctx))) }()
	p, err := k.Producer(ctx, topic)
	w.check(err)
	_, err = p.Publish(ctx, &client.Message{Value: []byte("x")})
	w.check(err)
}

func (w *town) refused(p *process.Process) {
	w.Helper()
	select {
	case <-p.Exited():
	case <-w.ctx.Done():
		w.Fatalf("%s goes on", p.Name)
	}
	if log := p.LogTail(); p.ExitCode() != 5 || !strings.Contains(log, "another process is broker") || !strings.Contains(log, "stop one of the two") {
		w.Errorf("%s exits with %d:\n%s", p.Name, p.ExitCode(), log)
	}
}

// A broker's id is one process's: the second one is refused while the first lives, and does not wait for the lease of one
// that was killed.
func TestASecondBrokerOfOneID(t *testing.T) {
	t.Parallel()
	const ttl = time.Minute // longer than anything here may take
	w := settle(t, process.Config{Brokers: 1, BrokerArgs: []string{"--lease-ttl", ttl.String()}})
	w.serves(w.ctx, w.c.Brokers[0].Addr)
	p, addr := w.twin(ttl)
	w.check(p.Launch())
	w.refused(p)
	_, before := w.served(topic)
	w.serves(w.ctx, w.c.Brokers[0].Addr)
	if _, epoch := w.served(topic); epoch != before {
		t.Errorf("the topic moved from epoch %d to %d", before, epoch)
	}
	soon, cancel := context.WithTimeout(w.ctx, ttl/2)
	defer cancel()
	w.check(w.c.Brokers[0].Kill())
	w.check(w.c.Brokers[0].Start(soon)) // in place
	w.serves(soon, w.c.Brokers[0].Addr)
	w.check(w.c.Brokers[0].Kill())
	w.check(p.Launch()) // and elsewhere
	w.serves(soon, addr)
}

// One that stands still may be back: its lease decides. When it is back, and another process has its id, it ends.
func TestABrokerThatWasReplacedWhileItStoodStill(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{Brokers: 1, BrokerArgs: []string{"--lease-ttl", leaseTTL.String()}})
	first := w.c.Brokers[0]
	w.serves(w.ctx, first.Addr)
	w.check(first.Pause())
	p, addr := w.twin(leaseTTL)
	w.check(p.Launch())
	w.serves(w.ctx, addr)
	w.check(first.Resume())
	w.refused(first)
	w.serves(w.ctx, addr)
	k, err := client.Connect(w.ctx, "penstock://"+addr)
	w.check(err)
	defer func() { w.check(k.Close(context.WithoutCancel(w.ctx))) }()
	list, err := k.Admin().ListBrokers(w.ctx, &brokerv1.ListBrokersRequest{})
	w.check(err)
	if len(list.GetBrokers()) != 1 || list.GetBrokers()[0].GetUrl() != "penstock://"+addr {
		t.Errorf("brokers %v", list.GetBrokers())
	}
}
