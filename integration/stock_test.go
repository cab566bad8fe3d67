package integration

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// The generated client with gRPC's own protobuf codec is all that another language has: it finds a topic, publishes,
// consumes, acknowledges and administers.
func TestStockClient(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{Brokers: 1})
	conn := w.dial(w.c.Brokers[0])
	found, err := brokerv1.NewLookupClient(conn).GetTopic(w.ctx, &brokerv1.GetTopicRequest{Topic: "stock", Create: true})
	w.check(err)
	if found.GetTopic() != "public/default/stock" || found.GetPartitions() != 0 {
		t.Fatalf("%v", found)
	}
	at, err := brokerv1.NewLookupClient(conn).LookupTopic(w.ctx, &brokerv1.LookupTopicRequest{Topic: "stock"})
	w.check(err)
	if w.c.Broker(at.GetBrokerUrl()) != w.c.Brokers[0] || at.GetEpoch() == 0 || at.GetBundle() == "" {
		t.Fatalf("%v", at)
	}

	publish, err := brokerv1.NewPubSubClient(conn).Publish(w.ctx)
	w.check(err)
	w.check(publish.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Open{
		Open: &brokerv1.OpenProducer{Topic: "stock", ProducerName: "p", Dedup: true},
	}}))
	opened, err := publish.Recv()
	w.check(err)
	if r := opened.GetReady(); r.GetProducerName() != "p" || r.GetLastSequence() != -1 || r.GetEpoch() != at.GetEpoch() {
		t.Fatalf("%v", opened)
	}
	send := func(first, last uint64, b []byte) *brokerv1.PublishResponse {
		t.Helper()
		w.check(publish.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Batch{
			Batch: &brokerv1.Batch{FirstSequence: first, LastSequence: last, Frame: b},
		}}))
		answer, err := publish.Recv()
		w.check(err)
		return answer
	}
	one := frameOf("p", 0, []byte("one"))
	if r := send(0, 0, one).GetReceipt(); r == nil || r.GetOffset() != 0 || r.GetPosition() == nil {
		t.Fatalf("%v", r)
	}
	var payload []byte
	for i, v := range []string{"two", "three"} {
		payload = frame.AppendMessage(payload, &frame.Message{Sequence: uint64(1 + i), Value: []byte(v)})
	}
	batch := frame.Append(nil, &frame.Header{Producer: "p", Sequence: 1, PublishTime: 1, UncompressedSize: len(payload), Count: 2}, payload)
	if r := send(1, 2, batch).GetReceipt(); r == nil || r.GetOffset() != 1 {
		t.Fatalf("%v", r)
	}
	if r := send(1, 2, batch).GetReceipt(); !r.GetDuplicate() {
		t.Fatalf("stored again: %v", r)
	}
	damaged := bytes.Clone(batch)
	damaged[len(damaged)-1] ^= 1
	if e := send(3, 4, damaged).GetFailed().GetError(); e.GetCode() != brokerv1.Code_CODE_INVALID || e.GetMessage() == "" || e.GetRetryable() {
		t.Fatalf("damaged: %v", e)
	}
	w.check(publish.CloseSend())

	consume, err := brokerv1.NewPubSubClient(conn).Consume(w.ctx)
	w.check(err)
	w.check(consume.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Subscribe{Subscribe: &brokerv1.Subscribe{
		Topic: "stock", Subscription: "s", Start: &brokerv1.Start{At: &brokerv1.Start_Earliest{Earliest: true}},
	}}}))
	subscribed, err := consume.Recv()
	w.check(err)
	if subscribed.GetSubscribed() == nil {
		t.Fatalf("%v", subscribed)
	}
	w.check(consume.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Permits{Permits: &brokerv1.Permits{Messages: 10}}}))
	var frames [][]byte
	for len(frames) < 2 {
		answer, err := consume.Recv()
		w.check(err)
		for _, e := range answer.GetDeliver().GetEntries() {
			frames = append(frames, e.GetFrame())
		}
	}
	if !bytes.Equal(frames[0], one) || !bytes.Equal(frames[1], batch) {
		t.Fatal("the frames are not what was sent")
	}
	last := uint64(2)
	w.check(consume.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Ack{Ack: &brokerv1.Ack{RequestId: 9, Cumulative: &last}}}))
	answer, err := consume.Recv()
	w.check(err)
	if d := answer.GetAckDone(); d.GetRequestId() != 9 || d.GetError() != nil {
		t.Fatalf("%v", answer)
	}
	w.check(consume.CloseSend())

	admin := brokerv1.NewAdminClient(conn)
	s, err := admin.DescribeSubscription(w.ctx, &brokerv1.DescribeSubscriptionRequest{Topic: "stock", Subscription: "s"})
	w.check(err)
	if s.GetSubscription().GetAckFloor() != 3 || s.GetSubscription().GetBacklog() != 0 {
		t.Fatalf("%v", s)
	}
	_, err = admin.DescribeTopic(w.ctx, &brokerv1.DescribeTopicRequest{Topic: "stokc"})
	if status.Code(err) != codes.NotFound {
		t.Fatalf("%v", err)
	}
}
