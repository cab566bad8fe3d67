package brokertest_test

import (
	"errors"
	"io"
	"slices"
	"testing"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/frame"
)

// The generated client alone, with the stock protobuf codec, finds a topic, publishes, consumes and acknowledges: what any
// other language can do.
func TestThePlainGeneratedClientIsEnough(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	conn := dial(t, cluster.URL())
	where, err := brokerv1.NewLookupClient(conn).LookupTopic(t.Context(), &brokerv1.LookupTopicRequest{Topic: "orders"})
	if err != nil {
		t.Fatal(err)
	}
	if where.GetBrokerUrl() != cluster.URL() || !slices.Equal(where.GetBrokers(), []string{cluster.URL()}) || where.GetEpoch() == 0 {
		t.Fatalf("lookup answers %+v", where)
	}
	pub, answer := publishing(t, conn, &brokerv1.OpenProducer{Topic: "orders", ProducerName: "plain"})
	if answer.GetReady().GetLastSequence() != -1 {
		t.Fatalf("open answers %+v", answer)
	}
	value := []byte("one espresso")
	sent := frame.Append(nil, &frame.Header{Producer: "plain", Sequence: 7, Single: &frame.Message{Sequence: 7}}, value)
	if err := pub.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Batch{Batch: &brokerv1.Batch{FirstSequence: 7, LastSequence: 7, Frame: sent}}}); err != nil {
		t.Fatal(err)
	}
	if answer, err = pub.Recv(); err != nil || answer.GetReceipt().GetFirstSequence() != 7 || answer.GetReceipt().GetPosition() == nil {
		t.Fatalf("batch is answered %+v, %v", answer, err)
	}
	sub, first := consuming(t, conn, &brokerv1.Subscribe{Topic: "orders", Subscription: "s", Start: earliest()})
	if len(first.GetSubscribed().GetIncarnation()) == 0 {
		t.Fatalf("subscribe answers %+v", first)
	}
	if err := sub.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Permits{Permits: &brokerv1.Permits{Messages: 1}}}); err != nil {
		t.Fatal(err)
	}
	got, err := sub.Recv()
	if err != nil || len(got.GetDeliver().GetEntries()) != 1 {
		t.Fatalf("delivered %+v, %v", got, err)
	}
	entry := got.GetDeliver().GetEntries()[0]
	if !slices.Equal(entry.GetFrame(), sent) {
		t.Fatal("the frame is not what was sent")
	}
	if err := sub.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Ack{Ack: &brokerv1.Ack{
		RequestId: 3, Ranges: []*brokerv1.OffsetRange{{First: entry.GetOffset(), Last: entry.GetOffset()}},
	}}}); err != nil {
		t.Fatal(err)
	}
	if got, err = sub.Recv(); err != nil || got.GetAckDone().GetRequestId() != 3 || got.GetAckDone().GetError() != nil {
		t.Fatalf("acknowledgement is answered %+v, %v", got, err)
	}
	// Whoever is done says so, and the broker ends the stream.
	if err := pub.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := pub.Recv(); !errors.Is(err, io.EOF) {
		t.Fatalf("the producer's stream ends with %v", err)
	}
	if err := sub.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := sub.Recv(); !errors.Is(err, io.EOF) {
		t.Fatalf("the consumer's stream ends with %v", err)
	}
}
