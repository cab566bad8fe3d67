package jetstreamdriver

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/bench"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute

// connect starts servers and opens a driver to them.
func connect(t *testing.T, servers int) (context.Context, *Driver, *process.Group) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	programs, err := filepath.Abs("../../../bin")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(programs, "nats-server")); err != nil {
		t.Fatalf("%v: run `make bin/nats-server` first", err)
	}
	g, err := StartServers(ctx, ServersConfig{Programs: programs, Dir: t.TempDir(), Servers: servers, SyncAlways: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	d, err := Open(ctx, URLs(g), servers, "sync=always")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close(context.WithoutCancel(ctx)) })
	return ctx, d, g
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// outcomes gathers what became of messages.
type outcomes struct {
	mu    sync.Mutex
	order []uint64
	errs  []error
}

func (o *outcomes) done(m *bench.Message, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		o.errs = append(o.errs, err)
		return
	}
	o.order = append(o.order, number(m.Value))
}

func (o *outcomes) count() (good, bad int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.order), len(o.errs)
}

func message(n uint64) *bench.Message {
	return &bench.Message{Value: binary.BigEndian.AppendUint64(nil, n)}
}

func number(value []byte) uint64 { return binary.BigEndian.Uint64(value) }

// consume returns the numbers of so many messages, each once, in the order of their first delivery.
func consume(ctx context.Context, t *testing.T, c bench.Consumer, n int) (got []uint64) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	seen := make(map[uint64]bool)
	check(t, c.Consume(ctx, func(value []byte) {
		if v := number(value); !seen[v] {
			seen[v] = true
			got = append(got, v)
		}
		if len(got) == n {
			cancel()
		}
	}))
	if len(got) < n {
		t.Fatalf("%d messages of %d came", len(got), n)
	}
	return got
}

func upTo(n uint64) (all []uint64) {
	for i := range n {
		all = append(all, i)
	}
	return all
}

// Every message has one outcome, and is consumed, in order: published one by one, and by fast ingest in several batches
// that end because nothing comes for a while.
func TestPublishAndConsume(t *testing.T) {
	t.Parallel()
	ctx, d, _ := connect(t, 3)
	const n = 2500
	for topic, batching := range map[string]bench.Batching{
		"single":  {},
		"ingest":  {Messages: 100},
		"trickle": {Messages: 1000, Delay: time.Millisecond},
	} {
		t.Run(topic, func(t *testing.T) {
			t.Parallel()
			check(t, d.CreateTopic(ctx, topic, 1))
			c, err := d.Subscribe(ctx, topic, bench.ConsumerConfig{Subscription: "s"})
			check(t, err)
			var o outcomes
			free := make(chan struct{}, 300)
			p, err := d.OpenProducer(ctx, topic, bench.ProducerConfig{Batching: batching, InFlight: cap(free), Size: 8, Done: func(m *bench.Message, err error) {
				o.done(m, err)
				<-free
			}})
			check(t, err)
			for i := range uint64(n) {
				free <- struct{}{}
				p.Publish(ctx, message(i))
				for topic == "trickle" && i%1000 == 0 { // each has its outcome before the next, as of a synchronous publisher
					if good, bad := o.count(); uint64(good) > i || bad > 0 {
						break
					}
					<-time.After(time.Millisecond)
				}
			}
			check(t, p.Close(ctx))
			if !slices.Equal(o.order, upTo(n)) || len(o.errs) > 0 {
				t.Fatalf("%d outcomes of %d, %v", len(o.order), n, o.errs)
			}
			if got := consume(ctx, t, c, n); !slices.Equal(got, upTo(n)) {
				t.Error("consumed in another order")
			}
			check(t, c.Close(ctx))
			check(t, d.DeleteTopic(ctx, topic))
		})
	}
}

// What was acknowledged is not delivered to the next consumer, which gets what came since; also where consumers share.
func TestSubscriptions(t *testing.T) {
	t.Parallel()
	ctx, d, _ := connect(t, 1)
	check(t, d.CreateTopic(ctx, "t", 1))
	var o outcomes
	p, err := d.OpenProducer(ctx, "t", bench.ProducerConfig{InFlight: 100, Done: o.done})
	check(t, err)
	publish := func(from, to uint64) {
		for i := from; i < to; i++ {
			p.Publish(ctx, message(i))
		}
	}
	configs := []bench.ConsumerConfig{{Subscription: "alone"}, {Subscription: "shared", Shared: true}}
	read := func(from, to uint64) {
		for _, cfg := range configs {
			c, err := d.Subscribe(ctx, "t", cfg)
			check(t, err)
			if got := consume(ctx, t, c, int(to-from)); !slices.Equal(got, upTo(to)[from:]) {
				t.Errorf("%s: %v, want %d to %d", cfg.Subscription, got, from, to)
			}
			check(t, c.Close(ctx))
		}
	}
	publish(0, 5)
	read(0, 5)
	for _, cfg := range configs {
		js, err := d.any.js.Consumer(ctx, "t", cfg.Subscription)
		check(t, err)
		for {
			info, err := js.Info(ctx)
			check(t, err)
			if info.AckFloor.Stream == 5 && info.NumAckPending == 0 {
				break
			}
			if !cfg.Shared { // single acknowledgements are not answered, these are
				t.Fatalf("acknowledged to %d, %d not", info.AckFloor.Stream, info.NumAckPending)
			}
			<-time.After(time.Millisecond)
		}
	}
	publish(5, 20)
	read(5, 20)
	check(t, p.Close(ctx))
	if len(o.errs) > 0 {
		t.Error(o.errs)
	}
}

// What JetStream does not have is refused, and what it has not is told of.
func TestRefusals(t *testing.T) {
	t.Parallel()
	ctx, d, _ := connect(t, 1)
	if err := d.CreateTopic(ctx, "many", 2); !errors.Is(err, bench.ErrUnsupported) {
		t.Error(err)
	}
	check(t, d.CreateTopic(ctx, "t", 1))
	if _, err := d.OpenProducer(ctx, "t", bench.ProducerConfig{Ack: bench.AckNone}); !errors.Is(err, bench.ErrUnsupported) {
		t.Error(err)
	}
	if _, err := d.OpenProducer(ctx, "none", bench.ProducerConfig{}); err == nil {
		t.Error("a producer of a stream that is not there")
	}
	if _, err := d.Subscribe(ctx, "none", bench.ConsumerConfig{Subscription: "s"}); err == nil {
		t.Error("a consumer of a stream that is not there")
	}
	if _, err := Open(ctx, nil, 1, ""); err == nil {
		t.Error("connected to nothing")
	}
}

// Each message has one outcome also when its stream is gone, or its context ends while nobody answers.
func TestFailures(t *testing.T) {
	t.Parallel()
	ctx, d, servers := connect(t, 1)
	check(t, d.CreateTopic(ctx, "t", 1))
	kinds := []bench.Batching{{}, {Messages: 100, Delay: time.Hour}}
	const n = 10
	var open []bench.Producer
	results := make([]outcomes, len(kinds))
	for i, batching := range kinds {
		p, err := d.OpenProducer(ctx, "t", bench.ProducerConfig{Batching: batching, InFlight: n, Done: results[i].done})
		check(t, err)
		open = append(open, p)
	}
	for _, batching := range kinds {
		var o outcomes
		p, err := d.OpenProducer(ctx, "t", bench.ProducerConfig{Batching: batching, InFlight: n, Done: o.done})
		check(t, err)
		check(t, d.DeleteTopic(ctx, "t"))
		for i := range uint64(n) {
			p.Publish(ctx, message(i))
		}
		_ = p.Close(ctx) // tells what failed, or nothing
		if good, bad := o.count(); good != 0 || bad != n {
			t.Errorf("batching %v, without a stream: %d published, %d failed", batching, good, bad)
		}
		check(t, d.CreateTopic(ctx, "t", 1))
	}
	check(t, servers.Processes[0].Pause())
	for i, p := range open {
		ended, cancel := context.WithCancel(ctx)
		for n := range uint64(n) {
			p.Publish(ended, message(n))
		}
		cancel()
		_ = p.Close(ctx)
		if good, bad := results[i].count(); good != 0 || bad != n {
			t.Errorf("batching %v, without an answer: %d published, %d failed", kinds[i], good, bad)
		}
	}
	p, err := openAsync(d.any, "t", bench.ProducerConfig{InFlight: n, Done: func(*bench.Message, error) {}})
	check(t, err)
	p.Publish(ctx, message(0))
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if err := p.Close(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("closed with a message that nobody answered: %v", err)
	}
}

// The server's answers about a batch: how far it is stored, how it ends, what broke it.
func TestIngestAnswers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		answers   []string
		good, bad int
		ended     bool
	}{
		{"progress", []string{`{"type":"ack","seq":0,"msgs":5}`, `{"type":"ack","seq":2,"msgs":5}`, `{"type":"ack","seq":1,"msgs":5}`}, 2, 0, false},
		{"end", []string{`{"type":"ack","seq":2,"msgs":5}`, `{"stream":"t","seq":90,"batch":"b","count":6}`}, 6, 0, true},
		{"early end", []string{`{"stream":"t","seq":90,"batch":"b","count":4}`}, 4, 2, true},
		{"gap", []string{`{"type":"ack","seq":1,"msgs":5}`, `{"type":"gap","last_seq":3,"seq":5}`}, 1, 5, false},
		{"error", []string{`{"type":"err","seq":3,"error":{"code":400,"err_code":1,"description":"no"}}`}, 0, 6, false},
		{"refused", []string{`{"stream":"t","seq":0,"error":{"code":400,"err_code":1,"description":"no"}}`}, 0, 6, false},
		{"nobody", []string{``}, 0, 6, false},
		{"nonsense", []string{`{`}, 0, 6, false},
	} {
		var o outcomes
		p := &ingest{prefix: "inbox.b.5.fail.", done: o.done}
		p.told = sync.NewCond(&p.mu)
		for i := range uint64(6) {
			p.sent++
			p.pending = append(p.pending, message(i))
		}
		p.answered(&nats.Msg{Subject: "inbox.a.5.fail.6.2.$FI", Data: []byte(`{"type":"ack","seq":6,"msgs":5}`)}) // of an earlier batch
		for _, text := range c.answers {
			p.answered(&nats.Msg{Subject: "inbox.b.5.fail.6.1.$FI", Data: []byte(text)})
		}
		if good, bad := o.count(); good != c.good || bad != c.bad || (p.prefix == "") != c.ended {
			t.Errorf("%s: %d published, %d failed, ended %v; want %d, %d, %v", c.name, good, bad, p.prefix == "", c.good, c.bad, c.ended)
		}
		if !slices.Equal(o.order, upTo(uint64(c.good))) {
			t.Errorf("%s: order %v", c.name, o.order)
		}
	}
}
