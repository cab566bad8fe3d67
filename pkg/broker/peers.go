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
)

// redialTimeout bounds the one connection attempt that tells a dead process from a broken stream.
const redialTimeout = 200 * time.Millisecond

// peerListener learns what pings tell of a peer.
type peerListener interface {
	PeerSuspected(id string)
	PeerTrusted(id string)
	PeerDraining(id string)
}

// peers keeps one ping stream to each live broker. A broker that resets its stream and refuses a new connection is
// suspect at once, one that is silent after silenceLimit.
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
			delete(p.pings, id)
		}
	}
	for id, b := range live {
		if _, ok := p.pings[id]; ok {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		p.pings[id] = &peer{info: b, cancel: cancel}
		p.wait.Go(func() { p.watch(ctx, b) })
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

// watch pings one peer until ctx ends.
func (p *peers) watch(ctx context.Context, b meta.BrokerInfo) {
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

	start := time.Now()
	var pulse pulse
	pongs := make(chan *brokerv1.PingResponse, 1)
	broken := make(chan error, 1)
	ticker := time.NewTicker(pingEvery)
	defer ticker.Stop()

	var stream brokerv1.PubSub_PingClient
	var endStream context.CancelFunc
	defer func() {
		if endStream != nil {
			endStream()
		}
	}()
	var seq uint64
	for {
		if stream == nil {
			stream, endStream = p.open(ctx, conn, pongs, broken)
		}
		select {
		case <-ctx.Done():
			return
		case pong := <-pongs:
			p.tell(b.ID, pulse.heard(time.Since(start)), "answers again")
			if pong.GetDraining() {
				p.listener.PeerDraining(b.ID)
			}
			continue
		case err := <-broken:
			endStream()
			stream = nil
			if refused(ctx, b.Peer) {
				p.tell(b.ID, pulse.refused(), "stream broke and a new connection was refused: "+err.Error())
			}
		case <-ticker.C:
			if stream != nil {
				seq++
				if err := stream.Send(&brokerv1.PingRequest{From: p.self, Seq: seq}); err != nil {
					continue // the receiver reports why
				}
			}
		}
		p.tell(b.ID, pulse.look(time.Since(start)), "pings are not answered")
		if stream == nil { // pace the attempts
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}
}

// open starts a ping stream whose receiver sends to pongs, and to broken once when the stream ends. A stream that
// cannot be opened counts as broken.
func (p *peers) open(ctx context.Context, conn *grpc.ClientConn, pongs chan<- *brokerv1.PingResponse, broken chan<- error) (brokerv1.PubSub_PingClient, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := brokerv1.NewPubSubClient(conn).Ping(ctx)
	if err != nil {
		broken <- err // has room: the one receiver before has been taken from it
		return nil, cancel
	}
	p.wait.Go(func() {
		for {
			pong, err := stream.Recv()
			if err != nil {
				select {
				case broken <- err:
				case <-ctx.Done():
				}
				return
			}
			select {
			case pongs <- pong:
			case <-ctx.Done():
				return
			}
		}
	})
	return stream, cancel
}

func (p *peers) tell(id string, v verdict, why string) {
	switch v {
	case suspected:
		p.log.Warn("peer is suspect", "peer", id, "why", why)
		p.listener.PeerSuspected(id)
	case trusted:
		p.log.Info("peer is trusted again", "peer", id)
		p.listener.PeerTrusted(id)
	case unchanged:
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

// servePing answers a peer's pings until it goes.
func servePing(self string, draining func() bool, stream brokerv1.PubSub_PingServer) error {
	for {
		ping, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(&brokerv1.PingResponse{From: self, Seq: ping.GetSeq(), Draining: draining()}); err != nil {
			return err
		}
	}
}
