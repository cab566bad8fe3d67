package jetstreamdriver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/penstock-mq/penstock/pkg/bench"
)

// ingest publishes by fast ingest: numbered messages of a batch, each stored as it comes, with one acknowledgement for
// every so many, which says up to which number all are stored. What its place in the batch is stands in a message's
// reply subject: inbox.batch.flow.fail.number.operation.$FI.
//
// A batch that is idle is ended, which brings the acknowledgement for its last messages, and the next message begins
// another one. The server forgets a batch that is idle for 10 s, so that it could not stay open anyway.
type ingest struct {
	nc      *nats.Conn
	subject string
	inbox   string
	flow    int
	done    func(*bench.Message, error)
	acks    *nats.Subscription
	stop    chan struct{} // ends the goroutine that ends idle batches
	stopped chan struct{}

	mu      sync.Mutex
	prefix  string           // of reply subjects of the open batch; "" if there is none
	sent    uint64           // the last number of the open batch
	acked   uint64           // up to here; the rest is pending
	ending  chan struct{}    // of a batch that was ended and is not confirmed yet; nil if there is none
	pending []*bench.Message // in order
	active  bool             // something was published since the last look
	failed  error            // for good
	ctx     context.Context  //nolint:containedctx // of the latest Publish: its end fails what is pending
	release func() bool
	told    *sync.Cond // outcomes were told; with mu
	telling int        // messages taken out of pending whose outcome is being told
}

// The operations.
const (
	ingestStart = iota
	ingestAppend
	_
	ingestEnd // without a message of its own
)

const (
	ingestSuffix = ".$FI"
	maxFlow      = 500 // what servers grant at most
	// ingestLinger is how long after the last message a batch is ended, where no delay is asked for. At the highest rate
	// batches do not idle, and it does not matter.
	ingestLinger = 5 * time.Millisecond
)

func openIngest(c *connection, subject string, cfg bench.ProducerConfig) (*ingest, error) {
	p := &ingest{
		nc: c.Conn, subject: subject, inbox: c.NewInbox(), done: cfg.Done,
		// With half of what may be in flight, one half is on its way while the other is being acknowledged.
		flow: max(1, min(cfg.Batching.Messages, cfg.InFlight/2, maxFlow)),
		stop: make(chan struct{}), stopped: make(chan struct{}),
	}
	p.told = sync.NewCond(&p.mu)
	var err error
	if p.acks, err = c.Subscribe(p.inbox+".>", p.answered); err != nil {
		return nil, fmt.Errorf("publish to stream %s: %w", subject, err)
	}
	linger := cfg.Batching.Delay
	if linger <= 0 {
		linger = ingestLinger
	}
	go func() {
		defer close(p.stopped)
		p.endIdle(linger)
	}()
	return p, nil
}

func (p *ingest) reply(number uint64, operation int) string {
	return p.prefix + strconv.FormatUint(number, 10) + "." + strconv.Itoa(operation) + ingestSuffix
}

// Publish implements [bench.Producer].
func (p *ingest) Publish(ctx context.Context, m *bench.Message) {
	p.mu.Lock()
	if ctx != p.ctx {
		if p.release != nil {
			p.release()
		}
		p.ctx, p.release = ctx, context.AfterFunc(ctx, func() { p.fail(ctx.Err()) })
	}
	for p.ending != nil && p.failed == nil { // its last number must not be passed
		ending := p.ending
		p.mu.Unlock()
		select {
		case <-ending:
		case <-ctx.Done():
			p.fail(ctx.Err())
		}
		p.mu.Lock()
	}
	if p.failed != nil {
		err := p.failed
		p.mu.Unlock()
		p.done(m, err)
		return
	}
	operation := ingestAppend
	if p.prefix == "" {
		operation = ingestStart
		unique := p.nc.NewInbox()
		p.prefix = fmt.Sprintf("%s.%s.%d.fail.", p.inbox, unique[strings.LastIndexByte(unique, '.')+1:], p.flow)
		p.sent, p.acked = 0, 0
	}
	p.sent++
	p.active = true
	p.pending = append(p.pending, m)
	// Under the lock, so that the end of the batch does not overtake it. It goes to a buffer.
	err := p.nc.PublishRequest(p.subject, p.reply(p.sent, operation), m.Value)
	p.mu.Unlock()
	if err != nil {
		p.fail(err)
	}
}

// endIdle ends batches that nothing is added to.
func (p *ingest) endIdle(linger time.Duration) {
	ticker := time.NewTicker(linger)
	defer ticker.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-ticker.C:
		}
		p.mu.Lock()
		idle := !p.active
		p.active = false
		var err error
		if idle {
			err = p.end()
		}
		p.mu.Unlock()
		if err != nil {
			p.fail(err)
		}
	}
}

// end ends the open batch, if there is one. The lock is held.
func (p *ingest) end() error {
	if open := p.prefix != "" && p.ending == nil && p.failed == nil; open {
		p.ending = make(chan struct{})
		return p.nc.PublishRequest(p.subject, p.reply(p.sent+1, ingestEnd), nil)
	}
	return nil
}

// answer is whatever comes from the server: progress, a gap, an error of a message, or the end of the batch, which has no
// type.
type answer struct {
	Type     string              `json:"type"`
	Sequence uint64              `json:"seq"` // of the batch, and of the stream at its end
	Last     uint64              `json:"last_seq"`
	Count    uint64              `json:"count"`
	Error    *jetstream.APIError `json:"error"`
}

func (p *ingest) answered(msg *nats.Msg) {
	var a answer
	if len(msg.Data) == 0 {
		p.fail(fmt.Errorf("no answer from a stream (%s)", msg.Header.Get("Status")))
		return
	}
	if err := json.Unmarshal(msg.Data, &a); err != nil {
		p.fail(fmt.Errorf("read answer: %w", err))
		return
	}
	p.mu.Lock()
	if p.prefix == "" || !strings.HasPrefix(msg.Subject, p.prefix) { // of an earlier batch
		p.mu.Unlock()
		return
	}
	var err error
	var stored uint64
	switch {
	case a.Error != nil:
		err = a.Error
	case a.Type == "ack":
		stored = a.Sequence
	case a.Type == "":
		if stored = a.Count; stored != p.sent {
			err = fmt.Errorf("the batch ended after %d of %d messages", stored, p.sent)
		}
		p.prefix = ""
		if p.ending != nil {
			close(p.ending)
			p.ending = nil
		}
	default:
		err = fmt.Errorf("%s between messages %d and %d of a batch", a.Type, a.Last, a.Sequence)
	}
	p.tell(stored)
	p.mu.Unlock()
	if err != nil {
		p.fail(err)
	}
}

// tell gives messages up to a number of the batch their good outcome. The lock is held, and let go meanwhile.
func (p *ingest) tell(stored uint64) {
	if stored <= p.acked {
		return
	}
	n := min(int(stored-p.acked), len(p.pending))
	p.acked = stored
	p.take(n, nil)
}

// take takes the oldest n messages out, and tells their outcome. The lock is held, and let go meanwhile. Only one goroutine,
// that of the acknowledgements, gives good outcomes, so that they are told in order.
func (p *ingest) take(n int, err error) {
	oldest := p.pending[:n:n]
	p.pending = p.pending[n:]
	p.telling += n
	p.mu.Unlock()
	for _, m := range oldest {
		p.done(m, err)
	}
	p.mu.Lock()
	p.telling -= n
	p.told.Broadcast()
}

// fail ends the producer: what a broken batch holds cannot be told.
func (p *ingest) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		p.failed = fmt.Errorf("publish to stream %s: %w", p.subject, err)
		if p.ending != nil {
			close(p.ending)
			p.ending = nil
		}
	}
	p.take(len(p.pending), p.failed)
}

// Close implements [bench.Producer].
func (p *ingest) Close(ctx context.Context) error {
	release := context.AfterFunc(ctx, func() { p.fail(ctx.Err()) })
	defer release()
	p.mu.Lock()
	if err := p.end(); err != nil {
		p.mu.Unlock()
		p.fail(err)
		p.mu.Lock()
	}
	for p.telling > 0 || len(p.pending) > 0 {
		p.told.Wait()
	}
	failed := p.failed
	if p.release != nil {
		p.release()
	}
	p.mu.Unlock()
	close(p.stop)
	<-p.stopped
	return errors.Join(failed, p.acks.Unsubscribe())
}
