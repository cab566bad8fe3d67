package jetstreamdriver

import (
	"context"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/penstock-mq/penstock/pkg/bench"
)

// async publishes each message by itself.
type async struct {
	js      jetstream.JetStream
	subject string
	done    func(*bench.Message, error)

	mu         sync.Mutex
	pending    map[*nats.Msg]*bench.Message // without an outcome
	unfinished int                          // whose outcome has not been told
	idle       chan struct{}                // closed when there are none; nil while nobody waits
	ctx        context.Context              //nolint:containedctx // of the latest Publish: its end fails what is pending
	release    func() bool
}

func openAsync(c *connection, subject string, cfg bench.ProducerConfig) (*async, error) {
	p := &async{subject: subject, done: cfg.Done, pending: make(map[*nats.Msg]*bench.Message, cfg.InFlight)}
	js, err := jetstream.New(c.Conn,
		jetstream.WithPublishAsyncMaxPending(cfg.InFlight+1), // the engine is the brake
		jetstream.WithPublishAsyncAckHandler(func(_ jetstream.JetStream, msg *nats.Msg, _ *jetstream.PubAck) { p.finish(msg, nil) }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, msg *nats.Msg, err error) { p.finish(msg, err) }),
	)
	if err != nil {
		return nil, fmt.Errorf("publish to stream %s: %w", subject, err)
	}
	p.js = js
	return p, nil
}

// Publish implements [bench.Producer].
func (p *async) Publish(ctx context.Context, m *bench.Message) {
	msg, ok := m.Scratch.(*nats.Msg)
	if !ok {
		msg = &nats.Msg{Subject: p.subject}
		m.Scratch = msg
	}
	msg.Data = m.Value
	p.mu.Lock()
	if ctx != p.ctx {
		if p.release != nil {
			p.release()
		}
		p.ctx, p.release = ctx, context.AfterFunc(ctx, func() { p.failAll(ctx.Err()) })
	}
	p.pending[msg] = m
	p.unfinished++
	p.mu.Unlock()
	if err := ctx.Err(); err != nil {
		p.finish(msg, err)
		return
	}
	if _, err := p.js.PublishMsgAsync(msg); err != nil {
		p.finish(msg, err)
	}
}

// finish gives a message its outcome, if it has none yet.
func (p *async) finish(msg *nats.Msg, err error) {
	p.mu.Lock()
	m := p.pending[msg]
	delete(p.pending, msg)
	p.mu.Unlock()
	if m == nil {
		return
	}
	if err != nil {
		err = fmt.Errorf("publish to stream %s: %w", p.subject, err)
	}
	p.done(m, err)
	p.mu.Lock()
	p.unfinished--
	if p.unfinished == 0 && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
	p.mu.Unlock()
}

func (p *async) failAll(err error) {
	p.mu.Lock()
	var all []*nats.Msg
	for msg := range p.pending {
		all = append(all, msg)
	}
	p.mu.Unlock()
	for _, msg := range all {
		p.finish(msg, err)
	}
}

// Close implements [bench.Producer].
func (p *async) Close(ctx context.Context) error {
	p.mu.Lock()
	idle := make(chan struct{})
	if p.unfinished == 0 {
		close(idle)
	} else {
		p.idle = idle
	}
	p.mu.Unlock()
	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		p.failAll(ctx.Err())
		err = fmt.Errorf("close producer of stream %s: %w", p.subject, ctx.Err())
	}
	if p.release != nil {
		p.release()
	}
	// What the client keeps for this publisher goes with the connection. Its CleanupPublisher, called early, leaves a goroutine
	// behind that even outlives that (nats.go 1.55).
	return err
}
