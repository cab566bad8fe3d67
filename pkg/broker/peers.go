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

// redialTimeout bounds the connection attempts that tell a dead process from a broken stream.
const redialTimeout = 200 * time.Millisecond

// pinger is an ownership.Pinger over gRPC. After each stream that broke, or could not be had, it finds out whether
// anybody listens there.
type pinger struct {
	self string
	log  *slog.Logger
}

// dialPeer returns a connection to another broker, by the address that its registration names. The caller closes it.
func dialPeer(address string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, append(more, grpc.WithTransportCredentials(insecure.NewCredentials()))...) //nolint:wrapcheck // the caller says whom
}

func (p pinger) converse(ctx context.Context, b meta.BrokerInfo, pong func(draining bool), refusal func(error)) {
	for ctx.Err() == nil {
		conn, err := dialPeer(b.Peer, grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: ownership.PingEvery, Multiplier: 1.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}))
		if err != nil {
			p.log.Error("peer has an address that cannot be dialled", "peer", b.ID, "address", b.Peer, "error", err)
			return
		}
		for ctx.Err() == nil {
			err := p.ping(ctx, conn, pong)
			next := time.NewTimer(ownership.PingEvery)
			if gone(ctx, b.Peer) {
				refusal(err)
			}
			select {
			case <-next.C:
			case <-ctx.Done():
				next.Stop()
			}
			if errors.Is(err, errMute) {
				break
			}
		}
		conn.Close()
	}
}

// muteAfter is how long a connection to a peer may bring no answer before another is dialled. What gets lost, TCP sends again
// after pauses that double, so that a connection which was mute for long stays so for as long again; a new one is heard of within
// a second. It is longer than a peer's pauses, for whoever stands still is not served by more connections either.
const muteAfter = 2 * time.Second

var errMute = errors.New("nothing was heard from the peer")

// ping pings a peer until the stream breaks, and returns why; errMute when nothing came for muteAfter.
func (p pinger) ping(ctx context.Context, conn *grpc.ClientConn, pong func(draining bool)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel(nil)
	mute := time.AfterFunc(muteAfter, func() { cancel(errMute) })
	defer mute.Stop()
	why := func(err error) error {
		if errors.Is(context.Cause(ctx), errMute) {
			return errMute
		}
		return err
	}
	stream, err := brokerv1.NewPubSubClient(conn).Ping(ctx)
	if err != nil {
		return why(err)
	}
	sending.Go(func() {
		for seq := uint64(1); ; seq++ {
			if stream.Send(&brokerv1.PingRequest{From: p.self, Seq: seq}) != nil || !sleep(ctx, ownership.PingEvery) {
				return // the receiver learns why
			}
		}
	})
	for {
		answer, err := stream.Recv()
		if err != nil {
			return why(err)
		}
		mute.Reset(muteAfter)
		pong(answer.GetDraining())
	}
}

// gone reports whether nobody listens at an address any more. It asks again for a moment: of a process that dies, the newest
// descriptors are closed first, so that the end of a stream may be heard of while its listener still takes connections.
func gone(ctx context.Context, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, redialTimeout)
	defer cancel()
	for pause := time.Millisecond; ; pause *= 2 {
		if refused(ctx, address) {
			return true
		}
		if pause > 64*time.Millisecond || !sleep(ctx, pause) {
			return false
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
	conn, err := dialPeer(registered.Peer)
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
