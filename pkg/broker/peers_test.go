package broker

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
)

// told records what a listener hears.
type told chan string

func (c told) say(what string) {
	select {
	case c <- what:
	default:
	}
}

func (c told) PeerSuspected(b meta.BrokerInfo, refused bool) {
	if refused {
		c.say(b.ID + " refuses")
	} else {
		c.say(b.ID + " is silent")
	}
}
func (c told) PeerTrusted(b meta.BrokerInfo)  { c.say(b.ID + " answers") }
func (c told) PeerDraining(b meta.BrokerInfo) { c.say(b.ID + " drains") }

func (c told) await(t *testing.T, want string) {
	t.Helper()
	for {
		select {
		case got := <-c:
			if got == want {
				return
			}
			t.Logf("heard %q", got)
		case <-t.Context().Done():
			t.Fatalf("not heard: %q", want)
		}
	}
}

func watchPeer(t *testing.T, addr string) told {
	t.Helper()
	heard := make(told, 1000)
	log := slog.New(slog.DiscardHandler)
	p := &ownership.Peers{
		Self: "self", View: brokers{{ID: "self", Peer: "127.0.0.1:1"}, {ID: "peer", Peer: addr, Started: time.UnixMilli(1)}},
		Listener: heard, Pinger: pinger{self: "self", log: log}.converse, Log: log,
	}
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { p.Run(ctx) })
	t.Cleanup(func() { cancel(); run.Wait() })
	return heard
}

// brokers is a view that does not change.
type brokers []meta.BrokerInfo

func (b brokers) Brokers() []meta.BrokerInfo        { return b }
func (b brokers) Changed(meta.Kind) <-chan struct{} { return nil }

func listen(t *testing.T) net.Listener {
	t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestAPeerThatWasDeadBeforeAnyStreamIsSuspectAgainAndAgain(t *testing.T) {
	t.Parallel()
	l := listen(t)
	l.Close()
	heard := watchPeer(t, l.Addr().String())
	for range 3 { // whoever hears the first may not know the peer yet
		heard.await(t, "peer refuses")
	}
}

// A stopped process's kernel accepts connections, and nothing ever comes.
func TestAPeerThatStandsStillBeforeAnyStreamIsSuspect(t *testing.T) {
	t.Parallel()
	heard := watchPeer(t, listen(t).Addr().String())
	heard.await(t, "peer is silent")
	heard.await(t, "peer is silent")
}

type pingServer struct {
	brokerv1.UnimplementedPubSubServer
	b *Broker
}

func (s *pingServer) Ping(stream brokerv1.PubSub_PingServer) error {
	return (&pubsub{b: s.b}).Ping(stream)
}

func TestAPeerIsTrustedThenDrainsThenIsGone(t *testing.T) {
	t.Parallel()
	b := &Broker{drains: make(chan struct{}), drained: make(chan struct{})}
	b.life, b.end = context.WithCancel(t.Context())
	l := listen(t)
	server := grpc.NewServer()
	brokerv1.RegisterPubSubServer(server, &pingServer{b: b})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	heard := watchPeer(t, l.Addr().String())
	heard.await(t, "peer answers")
	close(b.drains) // draining itself stays false: pings alone would not tell
	heard.await(t, "peer drains")
	server.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	heard.await(t, "peer refuses")
	b.work.Wait()
}

// What a dying process listens with is closed after its streams, so that whoever asks at once may get a connection.
func TestAPeerIsGoneThoughItsListenerIsClosedLast(t *testing.T) {
	t.Parallel()
	seen := false
	for range 20 { // a busy machine may close it too late
		l := listen(t)
		accepted := make(chan error, 1)
		go func() {
			conn, err := l.Accept()
			if err == nil {
				conn.Close()
			}
			l.Close()
			accepted <- err
		}()
		seen = gone(t.Context(), l.Addr().String()) || seen
		if err := <-accepted; err != nil {
			t.Fatal(err)
		}
	}
	if !seen {
		t.Error("it is taken to be there still")
	}
	if gone(t.Context(), listen(t).Addr().String()) {
		t.Error("somebody listens there")
	}
}

// muteServer answers one ping of the first connection that comes, and nothing else of it: what a connection is like whose one
// direction was cut for so long that TCP's pauses have grown.
type muteServer struct {
	brokerv1.UnimplementedPubSubServer
	mu    sync.Mutex
	first string
}

func (s *muteServer) Ping(stream brokerv1.PubSub_PingServer) error {
	from, _ := peer.FromContext(stream.Context())
	s.mu.Lock()
	fresh := s.first == ""
	if fresh {
		s.first = from.Addr.String()
	}
	mute := s.first == from.Addr.String()
	s.mu.Unlock()
	for n := 0; ; n++ {
		ping, err := stream.Recv()
		if err != nil {
			return err
		}
		if mute && (n > 0 || !fresh) {
			continue
		}
		if err := stream.Send(&brokerv1.PingResponse{From: "peer", Seq: ping.GetSeq()}); err != nil {
			return err
		}
	}
}

// A peer whose connection brings nothing any more is reached by another one.
func TestAMuteConnectionToAPeerIsReplaced(t *testing.T) {
	t.Parallel()
	l := listen(t)
	server := grpc.NewServer()
	brokerv1.RegisterPubSubServer(server, &muteServer{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	heard := watchPeer(t, l.Addr().String())
	for _, what := range []string{"peer answers", "peer is silent", "peer answers"} {
		heard.await(t, what)
	}
}

func TestPresence(t *testing.T) {
	t.Parallel()
	self := meta.BrokerInfo{ID: "b1", Peer: "127.0.0.1:1"}
	ask := func(addr string, want ownership.Presence) {
		t.Helper()
		if got := presence(t.Context(), self, meta.BrokerInfo{ID: "b1", Peer: addr}); got != want {
			t.Errorf("presence %d, want %d", got, want)
		}
	}
	serve := func(id string) (*Broker, string, func()) {
		b := &Broker{drains: make(chan struct{}), drained: make(chan struct{})}
		b.cfg.Self.ID = id
		b.life, b.end = context.WithCancel(t.Context())
		l := listen(t)
		server := grpc.NewServer()
		brokerv1.RegisterPubSubServer(server, &pingServer{b: b})
		served := make(chan error, 1)
		go func() { served <- server.Serve(l) }()
		return b, l.Addr().String(), func() {
			server.Stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
			b.work.Wait()
		}
	}
	same, addr, stop := serve("b1")
	ask(addr, ownership.PresenceAlive)
	same.draining.Store(true)
	ask(addr, ownership.PresenceUnknown) // it is about to end
	stop()
	ask(addr, ownership.PresenceGone)
	_, addr, stop = serve("b2")
	ask(addr, ownership.PresenceGone) // another broker has the port
	stop()
	ask(self.Peer, ownership.PresenceGone)                    // this process has it
	ask(listen(t).Addr().String(), ownership.PresenceUnknown) // it stands still
}
