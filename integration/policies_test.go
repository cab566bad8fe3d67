package integration

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// tidy makes a town whose brokers look after their topics all the time.
func tidy(t *testing.T) *town {
	t.Helper()
	return settle(t, process.Config{BrokerArgs: []string{"--housekeeping-interval", "50ms"}})
}

// namespace makes a namespace with policies, and returns the name of a topic in it.
func (w *town) namespace(name string, p *brokerv1.Policies) string {
	w.Helper()
	_, err := w.client.Admin().CreateNamespace(w.ctx, &brokerv1.CreateNamespaceRequest{Namespace: "public/" + name, Policies: p})
	w.check(err)
	return "public/" + name + "/t"
}

// publish publishes n messages of 1 KiB, and returns the first error.
func (w *town) publish(topic string, n int) error {
	w.Helper()
	p, err := w.client.Producer(w.ctx, topic)
	w.check(err)
	defer func() { _ = p.Close(w.ctx) }()
	var receipts []*client.Receipt
	for i := range n {
		receipts = append(receipts, p.PublishAsync(w.ctx, &client.Message{Value: bytes.Repeat([]byte{byte(i)}, 1024)}))
	}
	for _, r := range receipts {
		if _, e := r.Wait(w.ctx); e != nil && err == nil {
			err = e
		}
	}
	return err
}

func (w *town) subscription(topic, name string) *brokerv1.Subscription {
	w.Helper()
	d, err := w.client.Admin().DescribeSubscription(w.ctx, &brokerv1.DescribeSubscriptionRequest{Topic: topic, Subscription: name})
	w.check(err)
	return d.GetSubscription()
}

func (w *town) topic(name string) *brokerv1.DescribeTopicResponse {
	w.Helper()
	d, err := w.client.Admin().DescribeTopic(w.ctx, &brokerv1.DescribeTopicRequest{Topic: name})
	w.check(err)
	return d
}

// killOwner kills the broker that serves a topic, and starts it again once the other has taken the topic over.
func (w *town) killOwner(topic string) {
	w.Helper()
	owner := w.ownerOf(topic)
	w.check(owner.Kill())
	w.ownerOf(topic)
	w.check(owner.Start(w.ctx))
}

// Retention by size and by time let go of what they say and keep the rest, through the death of the owner.
func TestRetention(t *testing.T) {
	t.Parallel()
	w := tidy(t)
	const keep = 2 << 20
	sized := w.namespace("sized", &brokerv1.Policies{RetentionBytes: proto.Uint64(keep)})
	timed := w.namespace("timed", &brokerv1.Policies{RetentionTime: durationpb.New(2 * time.Second)})
	long := w.namespace("long", &brokerv1.Policies{RetentionTime: durationpb.New(time.Hour)})
	began := time.Now()
	for range 6 {
		for _, topic := range []string{sized, timed, long} {
			w.check(w.publish(topic, 1000))
		}
	}
	const ledgers = 3 << 20 // the open one and what is let go in steps
	w.until("what is over the size is gone", func() bool {
		return w.topic(sized).GetBytes() <= keep+ledgers
	})
	earliest := w.topic(sized).GetEarliestOffset()
	w.killOwner(sized)
	if now := w.topic(sized).GetEarliestOffset(); now < earliest {
		t.Errorf("the next owner begins at offset %d, the one before at %d", now, earliest)
	}
	w.until("what is too old is gone", func() bool { return w.topic(timed).GetEarliestOffset() > 0 })
	if age := time.Since(began); age < 2*time.Second {
		t.Errorf("what was published at most %v ago is gone", age)
	}
	w.killOwner(long)
	w.check(w.publish(long, 1))
	time.Sleep(4 * 50 * time.Millisecond) // several looks
	if d := w.topic(long); d.GetEarliestOffset() != 0 || d.GetNextOffset() != 6001 {
		t.Errorf("retention by time lets go of what is young: %d to %d", d.GetEarliestOffset(), d.GetNextOffset())
	}
}

// What nobody reads expires, and a backlog is bounded, through the death of the owner.
func TestExpiryAndBacklog(t *testing.T) {
	t.Parallel()
	w := tidy(t)
	const quota = 1 << 20
	news := w.namespace("news", &brokerv1.Policies{MessageTtl: durationpb.New(300 * time.Millisecond)})
	jobs := w.namespace("jobs", &brokerv1.Policies{BacklogBytes: proto.Uint64(quota), BacklogAction: brokerv1.BacklogAction_BACKLOG_ACTION_REFUSE})
	logs := w.namespace("logs", &brokerv1.Policies{BacklogBytes: proto.Uint64(quota), BacklogAction: brokerv1.BacklogAction_BACKLOG_ACTION_EVICT})
	for _, topic := range []string{news, jobs, logs} {
		w.check(w.publish(topic, 1))
		_, err := w.client.Admin().CreateSubscription(w.ctx, &brokerv1.CreateSubscriptionRequest{
			Topic: topic, Subscription: "s", Start: client.Earliest().Start(),
		})
		w.check(err)
	}

	w.check(w.publish(news, 100))
	w.until("what nobody read has expired", func() bool { return w.subscription(news, "s").GetBacklog() == 0 })
	w.killOwner(news)
	if n := w.subscription(news, "s").GetBacklog(); n != 0 {
		t.Errorf("%d expired messages are back with the next owner", n)
	}

	refused := func(err error) bool {
		var e *client.Error
		return errors.As(err, &e) && e.Code == client.CodeBacklogExceeded
	}
	w.until("publishing is refused", func() bool {
		err := w.publish(jobs, 200)
		if err != nil && !refused(err) {
			t.Fatalf("publish over the quota: %v", err)
		}
		return err != nil
	})
	w.killOwner(jobs)
	w.until("the next owner refuses too", func() bool { return refused(w.publish(jobs, 1)) })
	s, err := w.client.Subscribe(w.ctx, jobs, "s")
	w.check(err)
	for n := w.subscription(jobs, "s").GetBacklog(); n > 0; n-- {
		d, err := s.Receive(w.ctx)
		w.check(err)
		d.AckAsync()
	}
	w.check(s.Close(w.ctx))
	w.until("publishing goes on", func() bool { return w.publish(jobs, 1) == nil })

	w.check(w.publish(logs, 4000))
	w.until("the oldest are evicted", func() bool { return w.subscription(logs, "s").GetAckFloor() > 1000 })
	floor := w.subscription(logs, "s").GetAckFloor()
	w.killOwner(logs)
	if now := w.subscription(logs, "s").GetAckFloor(); now < floor {
		t.Errorf("evicted messages are back: floor %d after %d", now, floor)
	}
}

// A message that was given back comes again after its delay and with its count, although its owner has died meanwhile.
func TestNackAcrossFailover(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	const delay = 3 * time.Second
	p, err := w.client.Producer(w.ctx, topic, client.WithoutBatching())
	w.check(err)
	s, err := w.client.Subscribe(w.ctx, topic, "s", client.WithType(client.Shared), client.WithStart(client.Earliest()))
	w.check(err)
	for i := range 3 {
		_, err := p.Publish(w.ctx, &client.Message{Value: []byte{byte(i)}})
		w.check(err)
	}
	var given time.Time
	for i := range 3 {
		d, err := s.Receive(w.ctx)
		w.check(err)
		if i == 1 {
			given = time.Now()
			d.Nack(delay)
			continue
		}
		w.check(d.Ack(w.ctx)) // durable, with what was given back before it
	}
	w.killOwner(topic)
	_, err = p.Publish(w.ctx, &client.Message{Value: []byte{3}})
	w.check(err)
	for range 2 { // in which order depends on how long the failover has taken
		d, err := s.Receive(w.ctx)
		w.check(err)
		waited := time.Since(given)
		switch d.Value[0] {
		case 3:
		case 1:
			if d.RedeliveryCount != 1 || waited < delay-100*time.Millisecond {
				t.Errorf("given back %v ago, comes with count %d", waited, d.RedeliveryCount)
			}
		default:
			t.Errorf("message %d comes again after its acknowledgement", d.Value[0])
		}
		w.check(d.Ack(w.ctx))
	}
	w.check(s.Close(w.ctx))
	w.check(p.Close(w.ctx))
}
