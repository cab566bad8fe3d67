package brokertest_test

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/frame"
)

// dial connects the generated client, with the stock codec.
func dial(t *testing.T, url string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(url, "penstock://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// consuming opens a consumer's stream, and returns it with the broker's first answer.
func consuming(t *testing.T, conn *grpc.ClientConn, s *brokerv1.Subscribe) (brokerv1.PubSub_ConsumeClient, *brokerv1.ConsumeResponse) {
	t.Helper()
	stream, err := brokerv1.NewPubSubClient(conn).Consume(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Subscribe{Subscribe: s}}); err != nil {
		t.Fatal(err)
	}
	answer, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return stream, answer
}

// publishing opens a producer's stream, and returns it with the broker's first answer.
func publishing(t *testing.T, conn *grpc.ClientConn, o *brokerv1.OpenProducer) (brokerv1.PubSub_PublishClient, *brokerv1.PublishResponse) {
	t.Helper()
	stream, err := brokerv1.NewPubSubClient(conn).Publish(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Open{Open: o}}); err != nil {
		t.Fatal(err)
	}
	answer, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return stream, answer
}

func earliest() *brokerv1.Start { return client.Earliest().Start() }

// Every refusal says what, why, and what to do; the connection and what else is on it go on.
func TestBadRequestsAreRefused(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k := cluster.Client()
	publish(t, producer(t, k, "orders"), 0, 3)
	conn := dial(t, cluster.URL())
	long := strings.Repeat("n", 5000)
	for what, s := range map[string]*brokerv1.Subscribe{
		"unknown subscription type":  {Topic: "orders", Subscription: "s", Type: 17},
		"neither name nor reader":    {Topic: "orders"},
		"both name and reader":       {Topic: "orders", Subscription: "s", Reader: true},
		"long subscription name":     {Topic: "orders", Subscription: long},
		"bad subscription name":      {Topic: "orders", Subscription: "a b"},
		"long consumer name":         {Topic: "orders", Subscription: "s", ConsumerName: long},
		"bad topic name":             {Topic: "or ders", Subscription: "s"},
		"long topic name":            {Topic: long, Subscription: "s"},
		"empty topic name":           {Subscription: "s"},
		"partition of no such topic": {Topic: "orders-partition-7", Subscription: "s"},
		"unknown namespace":          {Topic: "public/nowhere/orders", Subscription: "s"},
		"nothing":                    nil,
	} {
		_, answer := consuming(t, conn, s)
		e := answer.GetError()
		if e == nil || e.GetMessage() == "" || e.GetRetryable() || e.GetCode() == brokerv1.Code_CODE_INTERNAL || e.GetCode() == 0 {
			t.Errorf("%s: %v", what, answer)
		}
	}
	for what, o := range map[string]*brokerv1.OpenProducer{
		"unknown ack level":    {Topic: "orders", AckLevel: 17},
		"dedup without name":   {Topic: "orders", Dedup: true},
		"long name":            {Topic: "orders", ProducerName: long},
		"bad topic name":       {Topic: "or\x00ders"},
		"unknown tenant":       {Topic: "nobody/default/orders"},
		"too many slashes":     {Topic: "a/b/c/d"},
		"partition of a whole": {Topic: "orders-partition-0"},
		"nothing":              nil,
	} {
		_, answer := publishing(t, conn, o)
		e := answer.GetError()
		if e == nil || e.GetMessage() == "" || e.GetRetryable() || e.GetCode() == brokerv1.Code_CODE_INTERNAL || e.GetCode() == 0 {
			t.Errorf("%s: %v", what, answer)
		}
	}
	// Requests that end a stream.
	last, far, top := uint64(2), uint64(3), ^uint64(0)
	for what, req := range map[string]*brokerv1.ConsumeRequest{
		"acknowledgement beyond the end":        {Kind: &brokerv1.ConsumeRequest_Ack{Ack: &brokerv1.Ack{Cumulative: &far}}},
		"acknowledgement of the highest number": {Kind: &brokerv1.ConsumeRequest_Ack{Ack: &brokerv1.Ack{Cumulative: &top}}},
		"range beyond the end":                  {Kind: &brokerv1.ConsumeRequest_Ack{Ack: &brokerv1.Ack{Ranges: []*brokerv1.OffsetRange{{First: 2, Last: 9}}}}},
		"range backwards":                       {Kind: &brokerv1.ConsumeRequest_Ack{Ack: &brokerv1.Ack{Ranges: []*brokerv1.OffsetRange{{First: 2, Last: 1}}}}},
		"nack backwards":                        {Kind: &brokerv1.ConsumeRequest_Nack{Nack: &brokerv1.Nack{Ranges: []*brokerv1.OffsetRange{{First: 2, Last: 1}}}}},
		"second subscribe":                      {Kind: &brokerv1.ConsumeRequest_Subscribe{Subscribe: &brokerv1.Subscribe{}}},
		"nothing":                               {},
	} {
		stream, answer := consuming(t, conn, &brokerv1.Subscribe{Topic: "orders", Subscription: "s" + strings.ReplaceAll(what, " ", "-"), Start: earliest()})
		if answer.GetSubscribed() == nil {
			t.Fatal(answer)
		}
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		answer, err := stream.Recv()
		if e := answer.GetError(); err != nil || e.GetMessage() == "" || e.GetRetryable() || e.GetCode() != brokerv1.Code_CODE_INVALID {
			t.Errorf("%s: %v, %v", what, answer, err)
		}
	}
	// A repeated acknowledgement of what is below the floor is fine.
	stream, _ := consuming(t, conn, &brokerv1.Subscribe{Topic: "orders", Subscription: "again", Start: earliest()})
	for i, upTo := range []uint64{last, 0, last, 1} {
		req := &brokerv1.Ack{Cumulative: &upTo, RequestId: uint64(i + 1)}
		if err := stream.Send(&brokerv1.ConsumeRequest{Kind: &brokerv1.ConsumeRequest_Ack{Ack: req}}); err != nil {
			t.Fatal(err)
		}
		answer, err := stream.Recv()
		if d := answer.GetAckDone(); err != nil || d.GetRequestId() != uint64(i+1) || d.GetError() != nil {
			t.Fatalf("%v, %v", answer, err)
		}
	}
}

// What a client says of itself is clipped, and never spoils an answer.
func TestLongClientInfo(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k := cluster.Client()
	publish(t, producer(t, k, "orders"), 0, 1)
	_, answer := consuming(t, dial(t, cluster.URL()), &brokerv1.Subscribe{
		Topic: "orders", Subscription: "s", Start: earliest(), ClientInfo: strings.Repeat("n", 255) + "ü",
	})
	if answer.GetSubscribed() == nil {
		t.Fatal(answer)
	}
	d, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
	if err != nil || len(d.GetConsumers()) != 1 || d.GetConsumers()[0].GetClientInfo() != strings.Repeat("n", 255) {
		t.Fatalf("%v, %v", d, err)
	}
}

func batchOf(seq uint64, value []byte) *brokerv1.PublishRequest {
	f := frame.Append(nil, &frame.Header{Producer: "p", Sequence: seq, PublishTime: 1, UncompressedSize: len(value)}, value)
	return &brokerv1.PublishRequest{Kind: &brokerv1.PublishRequest_Batch{Batch: &brokerv1.Batch{FirstSequence: seq, LastSequence: seq, Frame: f}}}
}

func TestOversizedMessagesAreRefused(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	conn := dial(t, cluster.URL())
	stream, answer := publishing(t, conn, &brokerv1.OpenProducer{Topic: "orders", ProducerName: "p"})
	if answer.GetReady() == nil {
		t.Fatal(answer)
	}
	if err := stream.Send(batchOf(0, make([]byte, 5<<20+1))); err != nil {
		t.Fatal(err)
	}
	answer, err := stream.Recv()
	if e := answer.GetFailed().GetError(); err != nil || e.GetCode() != brokerv1.Code_CODE_INVALID || !strings.Contains(e.GetMessage(), "5242880") || !strings.Contains(e.GetMessage(), "--max-message-kib") {
		t.Fatalf("a little too large: %v, %v", answer, err)
	}
	if err := stream.Send(batchOf(1, make([]byte, 5<<20))); err != nil {
		t.Fatal(err)
	}
	if answer, err = stream.Recv(); err != nil || answer.GetReceipt() == nil {
		t.Fatalf("as large as may be: %v, %v", answer, err)
	}
	if err := stream.Send(batchOf(2, make([]byte, 50<<20))); err != nil {
		t.Fatal(err)
	}
	if answer, err = stream.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("far too large: %v, %v", answer, err)
	}
}

// Whoever writes the protocol by hand learns what, on which topic, why, and what to do.
func TestRefusalsSayWhatToDo(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	conn := dial(t, cluster.URL())
	_, answer := publishing(t, conn, &brokerv1.OpenProducer{Topic: "orders", AckLevel: 99})
	want := `producer on "orders": unknown ack level 99: want 0 (the default, quorum), 1 (none), 2 (one), 3 (quorum), 4 (all)`
	if got := answer.GetError().GetMessage(); got != want {
		t.Errorf("unknown ack level: %q, want %q", got, want)
	}
	stream, answer := publishing(t, conn, &brokerv1.OpenProducer{Topic: "orders", ProducerName: "p"})
	if answer.GetReady() == nil {
		t.Fatal(answer)
	}
	for what, c := range map[string]struct {
		spoil func(f []byte) []byte
		want  []string
	}{
		"wrong checksum": {func(f []byte) []byte { f[len(f)-1] ^= 1; return f }, []string{"wrong checksum", "send it again"}},
		"cut short":      {func(f []byte) []byte { return f[:5] }, []string{"malformed", "docs/formats.md"}},
	} {
		req := batchOf(0, []byte("x"))
		req.GetBatch().Frame = c.spoil(req.GetBatch().GetFrame())
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		answer, err := stream.Recv()
		got := answer.GetFailed().GetError().GetMessage()
		for _, part := range append(c.want, "public/default/orders") {
			if err != nil || !strings.Contains(got, part) {
				t.Errorf("%s: %q, %v; want %q in it", what, got, err, part)
			}
		}
	}
	p := producer(t, cluster.Client(), "orders")
	_, err := p.Publish(t.Context(), &client.Message{Value: make([]byte, 5<<20+1)})
	if err == nil || !strings.Contains(err.Error(), "--max-message-kib") {
		t.Errorf("a message over the limit: %v", err)
	}
	_, err = cluster.Client().Producer(t.Context(), "x\ny")
	if err == nil || strings.Contains(err.Error(), "\n") || strings.Count(err.Error(), `"x\ny"`) == 0 {
		t.Errorf("a name with a line break: %v", err)
	}
}

// A move that takes effect moves delivery too, also when nobody waits until it is durable.
func TestASeekThatIsNotWaitedForMovesDelivery(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3))
	k := cluster.Client()
	publish(t, producer(t, k, "orders", client.WithoutBatching()), 0, 10)
	c := subscribe(t, k, "orders", "s")
	consume(t, c, 0, 10)
	cluster.StopBookie(0)
	cluster.StopBookie(1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	moved := make(chan error, 1)
	go func() {
		_, err := k.Admin().SeekSubscription(ctx, &brokerv1.SeekSubscriptionRequest{Topic: "orders", Subscription: "s", To: client.AtOffset(4).Start()})
		moved <- err
	}()
	eventually(t, func() bool {
		d, err := k.Admin().DescribeSubscription(t.Context(), &brokerv1.DescribeSubscriptionRequest{Topic: "orders", Subscription: "s"})
		if err != nil {
			t.Fatal(err)
		}
		return d.GetSubscription().GetAckFloor() == 4
	})
	cancel()
	if err := <-moved; err == nil {
		t.Fatal("moved durably by one bookie of three")
	}
	cluster.StartBookie(0)
	cluster.StartBookie(1)
	consume(t, c, 4, 10)
}
