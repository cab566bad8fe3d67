package broker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/ownership"
)

// redialTimeout bounds the one connection attempt that tells a dead process from a broken stream.
const redialTimeout = 200 * time.Millisecond

// peerListener learns what pings tell of a peer, again and again as long as it is so: it may hear of a peer's suspicion
// before it hears of the peer.
type peerListener interface {
	PeerSuspected(peer meta.BrokerInfo, refused bool)
	PeerTrusted(peer meta.BrokerInfo)
	PeerDraining(peer meta.BrokerInfo)
}

// peers keeps one ping stream to each live broker, from the moment that its registration is seen. A broker that refuses
// connections is suspect at once, whether there was a stream or not, and one that is silent after silenceLimit.
type peers struct {
	self     string
	listener peerListener
	log      *slog.Logger

	mu     sync.Mutex
	closed bool
	pings  map[string]*peer // by broker id
	wait   sync.WaitGroup
}

type peer struct {
	info   meta.BrokerInfo
	cancel context.CancelFunc
	done   chan struct{} // closed when nothing more is told of it
}

func newPeers(self string, listener peerListener, log *slog.Logger) *peers {
	return &peers{self: self, listener: listener, log: log, pings: map[string]*peer{}}
}

// set makes the peers those of brokers, less this one.
func (p *peers) set(ctx context.Context, brokers []meta.BrokerInfo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	live := map[string]meta.BrokerInfo{}
	for _, b := range brokers {
		if b.ID != p.self {
			live[b.ID] = b
		}
	}
	for id, old := range p.pings {
		if b, ok := live[id]; !ok || b.Peer != old.info.Peer || !b.Started.Equal(old.info.Started) {
			old.cancel()
			<-old.done // it waits for nothing but its end
			delete(p.pings, id)
		}
	}
	for id, b := range live {
		if _, ok := p.pings[id]; ok {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		one := &peer{info: b, cancel: cancel, done: make(chan struct{})}
		p.pings[id] = one
		p.wait.Go(func() {
			defer close(one.done)
			p.watch(ctx, b)
		})
	}
}

// close ends all pings and waits for them.
func (p *peers) close() {
	p.mu.Lock()
	p.closed = true
	for _, peer := range p.pings {
		peer.cancel()
	}
	p.mu.Unlock()
	p.wait.Wait()
}

// watch judges one peer until ctx ends. It never waits for the peer: whoever does that (converse) tells it what comes.
func (p *peers) watch(ctx context.Context, b meta.BrokerInfo) {
	start := time.Now()
	var pulse pulse
	pongs := make(chan *brokerv1.PingResponse, 1)
	refusals := make(chan error, 1)
	p.wait.Go(func() { p.converse(ctx, b, pongs, refusals) })
	ticker := time.NewTicker(pingEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case pong := <-pongs:
			if pulse.heard(time.Since(start)) {
				p.log.Info("peer answers", "peer", b.ID)
				p.listener.PeerTrusted(b)
			}
			if pong.GetDraining() {
				p.listener.PeerDraining(b)
			}
		case err := <-refusals:
			if pulse.refused() {
				p.log.Warn("peer is suspect", "peer", b.ID, "why", "it refuses connections", "error", err)
			}
			p.listener.PeerSuspected(b, true)
		case <-ticker.C:
			if pulse.look(time.Since(start)) {
				p.log.Warn("peer is suspect", "peer", b.ID, "why", "pings are not answered")
			}
			if pulse.suspect {
				p.listener.PeerSuspected(b, false)
			}
		}
	}
}

// converse keeps a ping stream to a peer, and after each that broke, or could not be had, finds out whether anybody
// listens there.
func (p *peers) converse(ctx context.Context, b meta.BrokerInfo, pongs chan<- *brokerv1.PingResponse, refusals chan<- error) {
	conn, err := grpc.NewClient("passthrough:///"+b.Peer,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: pingEvery, Multiplier: 1.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}))
	if err != nil {
		p.log.Error("peer has an address that cannot be dialled", "peer", b.ID, "address", b.Peer, "error", err)
		return
	}
	defer conn.Close()
	for ctx.Err() == nil {
		err := p.ping(ctx, conn, pongs)
		if ctx.Err() == nil && refused(ctx, b.Peer) {
			select {
			case refusals <- err:
			case <-ctx.Done():
			}
		}
		sleep(ctx, pingEvery)
	}
}

// ping pings a peer until the stream breaks, and returns why.
func (p *peers) ping(ctx context.Context, conn *grpc.ClientConn, pongs chan<- *brokerv1.PingResponse) error {
	ctx, cancel := context.WithCancel(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel()
	stream, err := brokerv1.NewPubSubClient(conn).Ping(ctx)
	if err != nil {
		return err
	}
	sending.Go(func() {
		for seq := uint64(1); ; seq++ {
			if stream.Send(&brokerv1.PingRequest{From: p.self, Seq: seq}) != nil || !sleep(ctx, pingEvery) {
				return // the receiver learns why
			}
		}
	})
	for {
		pong, err := stream.Recv()
		if err != nil {
			return err
		}
		select {
		case pongs <- pong:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// refused reports whether nobody listens at address.
func refused(ctx context.Context, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, redialTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	conn.Close()
	return false
}

// presenceTimeout is how long a process that may have our id has for its word.
const presenceTimeout = time.Second

// presence asks the address of a registration under our own id who answers there.
func presence(ctx context.Context, self, registered meta.BrokerInfo) ownership.Presence {
	if registered.Peer == self.Peer {
		return ownership.PresenceGone // the port is this process's now
	}
	ctx, cancel := context.WithTimeout(ctx, presenceTimeout)
	defer cancel()
	if refused(ctx, registered.Peer) {
		return ownership.PresenceGone
	}
	conn, err := grpc.NewClient("passthrough:///"+registered.Peer, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return ownership.PresenceUnknown
	}
	defer conn.Close()
	stream, err := brokerv1.NewPubSubClient(conn).Ping(ctx)
	if err != nil {
		return ownership.PresenceUnknown
	}
	if err := stream.Send(&brokerv1.PingRequest{From: self.ID, Seq: 1}); err != nil {
		return ownership.PresenceUnknown
	}
	pong, err := stream.Recv()
	switch {
	case err != nil, pong.GetFrom() == self.ID && pong.GetDraining(): // it is ending
		return ownership.PresenceUnknown
	case pong.GetFrom() != self.ID:
		return ownership.PresenceGone // another broker has the port
	}
	return ownership.PresenceAlive
}

// pinged is the answering side of a ping stream.
type pinged struct {
	self   string
	stream brokerv1.PubSub_PingServer

	mu   sync.Mutex
	over bool // the stream's handler has returned: nothing may be sent
}

func (p *pinged) answer(seq uint64, draining bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return io.EOF
	}
	return p.stream.Send(&brokerv1.PingResponse{From: p.self, Seq: seq, Draining: draining})
}

func (p *pinged) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
}

// serve answers a peer's pings until it goes.
func (p *pinged) serve(draining func() bool) error {
	for {
		ping, err := p.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := p.answer(ping.GetSeq(), draining()); err != nil {
			return err
		}
	}
}
