package scale

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/integration/steady"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// config is how much is measured.
type config struct {
	topics, idle int
	few          int           // topics that the same is published on, for comparison
	rates        []float64     // messages a second of each topic, ascending
	rounds       int           // of publishing at each rate, on many topics and on few in turns
	long         time.Duration // of publishing at once
	rest         time.Duration // before memory is looked at
	quiet        time.Duration // for which CPU is looked at
	bulk         int           // bytes written before a bookie is killed
	bulkRounds   int
	creating     time.Duration // bounds one step of idle topics
	samples      int           // of topics looked up or opened
}

// fully is what `make bench-scale` measures.
func fully(topics, idle int) config {
	return config{
		topics: topics, idle: idle, few: 10, rates: []float64{0.1, 0.2, 0.5, 1}, rounds: 5, long: 4 * time.Second, rest: 2 * time.Second,
		quiet: 8 * time.Second, bulk: 1 << 30, bulkRounds: 2, creating: 4 * time.Minute, samples: 200,
	}
}

// briefly is a measurement that only has to work.
func briefly() config {
	return config{
		topics: 20, idle: 40, few: 2, rates: []float64{5}, rounds: 1, long: 200 * time.Millisecond, rest: 0,
		quiet: 100 * time.Millisecond, bulk: 1 << 20, bulkRounds: 1, creating: time.Minute, samples: 5,
	}
}

// measured is everything that came out.
type measured struct {
	cfg    config
	commit string

	base, made, used, left, cold cost // memory
	recordsBase, recordsUsed     records
	making                       time.Duration
	first                        *steady.Result // a message on each, as fast as it goes
	client                       float64        // resident bytes of this program, with all connected
	quiet, leftQuiet             span
	uses                         []use
	take                         takeover
	handed                       []handover
	back                         []restart
	grown                        []growth
	// errs are steps that could not be taken.
	errs []error
}

// span is a time for which CPU was looked at.
type span struct{ from, to cost }

// use is publishing at one rate.
type use struct {
	rate            float64 // of each of the many topics
	many, few       []*steady.Result
	cpuMany, cpuFew span // of the last round
}

// takeover is what became of topics when their broker died.
type takeover struct {
	topics int
	hot    time.Duration // gap of a topic that is published to all the time
	all    figures.Sample
	others figures.Sample // of topics that the other broker serves
	failed int
	err    error // of one that failed
}

// handover is a broker's that is told to stop.
type handover struct {
	open int // topics
	took time.Duration
}

// restart is one of a bookie.
type restart struct {
	ready   time.Duration
	scanned int // segments that were not sealed
}

// growth is what there is with so many idle topics.
type growth struct {
	idle    int
	took    time.Duration
	cost    cost
	records records
	lookup  figures.Sample // of topics that nobody has used
	first   figures.Sample // from the producer's opening to the first acknowledgement, of such topics
	restart time.Duration  // of a broker
}

// run takes all steps, as far as it gets.
func (s *site) run() {
	for _, step := range []struct {
		name string
		do   func() error
	}{{"base", s.baseline}, {"make", s.crowd}, {"idle", s.grow}, {"back", s.bookieBack}} {
		began := time.Now()
		if err := step.do(); err != nil {
			s.out.errs = append(s.out.errs, fmt.Errorf("%s: %w", step.name, err))
			s.told("%s failed: %v", step.name, err)
		}
		s.told("%s took %v", step.name, time.Since(began).Round(time.Millisecond))
	}
}

func (s *site) baseline() (err error) {
	ctx, cancel := s.limited(patience)
	defer cancel()
	// One topic has the brokers connect to bookies and open what all others share.
	t, err := open(ctx, s.client, "first", 1)
	if err != nil {
		return err
	}
	if err := t.close(ctx); err != nil {
		return err
	}
	if s.out.base, err = s.cost(); err != nil {
		return err
	}
	s.out.recordsBase, err = recordsOf(ctx, s.c, s.etcd)
	return err
}

// crowd makes the topics, uses them, kills their broker, and lets them go.
func (s *site) crowd() (err error) {
	ctx, cancel := s.limited(2 * patience)
	defer cancel()
	began := time.Now()
	many, err := open(ctx, s.client, "many", s.cfg.topics)
	if err != nil {
		return err
	}
	s.out.making = time.Since(began)
	s.told("%d topics made in %v", s.cfg.topics, s.out.making)
	defer func() {
		ctx, cancel := s.limited(2 * patience)
		defer cancel()
		err = errors.Join(err, many.close(ctx))
		if err == nil {
			if s.out.left, err = s.cost(); err == nil {
				s.out.leftQuiet, err = s.idleCPU()
			}
		}
	}()
	if s.out.made, err = s.cost(); err != nil {
		return err
	}
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	if s.out.client, err = parseStatus(string(text)); err != nil {
		return err
	}
	if s.out.quiet, err = s.idleCPU(); err != nil {
		return err
	}
	few, err := open(ctx, s.client, "few", s.cfg.few)
	if err != nil {
		return err
	}
	err = s.publish(many, few)
	if err = errors.Join(err, few.close(s.ctx)); err != nil {
		return err
	}
	if s.out.used, err = s.cost(); err != nil {
		return err
	}
	if s.out.recordsUsed, err = recordsOf(ctx, s.c, s.etcd); err != nil {
		return err
	}
	return s.takeover(many)
}

// carried tells whether a rate was kept up.
func carried(r *steady.Result, offered float64) bool {
	return r.Failed == 0 && r.Rate() >= 0.95*offered
}

// publish publishes on many topics and on few, in turns, at growing rates, until one is not carried by the many.
func (s *site) publish(many, few *topics) error {
	// The first message of a topic opens its ledger.
	var err error
	if s.out.first, err = s.firsts(many); err != nil {
		return err
	}
	if _, err := s.firsts(few); err != nil {
		return err
	}
	sentMany, sentFew := int64(len(many.names)), int64(len(few.names))
	for _, rate := range s.cfg.rates {
		u := use{rate: rate}
		offered := rate * float64(s.cfg.topics)
		for range s.cfg.rounds {
			var err error
			if u.cpuMany.from, err = cpuNow(s.c); err != nil {
				return err
			}
			m, err := s.steadily(many, offered)
			if err != nil {
				return err
			}
			if u.cpuMany.to, err = cpuNow(s.c); err != nil {
				return err
			}
			u.cpuFew.from = u.cpuMany.to
			f, err := s.steadily(few, offered)
			if err != nil {
				return err
			}
			if u.cpuFew.to, err = cpuNow(s.c); err != nil {
				return err
			}
			u.many, u.few = append(u.many, m), append(u.few, f)
			sentMany, sentFew = sentMany+int64(m.Sent-m.Failed), sentFew+int64(f.Sent-f.Failed)
			s.told("%v msg/s on %d topics: %.0f/s, p50 %v, p99 %v, %d failed; on %d: %.0f/s, p50 %v, p99 %v, %d failed", offered, s.cfg.topics,
				m.Rate(), m.Latencies.Median(), m.Latencies.Percentile(0.99), m.Failed, s.cfg.few, f.Rate(), f.Latencies.Median(), f.Latencies.Percentile(0.99), f.Failed)
			if !carried(m, offered) {
				break
			}
		}
		s.out.uses = append(s.out.uses, u)
		if !carried(u.many[len(u.many)-1], offered) {
			break
		}
	}
	ctx, cancel := s.limited(patience)
	defer cancel()
	return errors.Join(many.drained(ctx, sentMany), few.drained(ctx, sentFew))
}

// firsts publishes one message to each topic, all at once.
func (s *site) firsts(t *topics) (*steady.Result, error) {
	ctx, cancel := s.limited(patience)
	defer cancel()
	r, err := steady.Publish(ctx, t.producers, steady.Config{Rate: float64(len(t.names)), For: time.Second, Size: 512, Patience: patience})
	if r.Failed > 0 {
		err = errors.Join(err, fmt.Errorf("%d first publishes failed: %w", r.Failed, r.Example))
	}
	s.told("the first message of %d topics: all after %v", len(t.names), r.Took)
	return r, err
}

func (s *site) steadily(t *topics, rate float64) (*steady.Result, error) {
	ctx, cancel := s.limited(patience)
	defer cancel()
	return steady.Publish(ctx, t.producers, steady.Config{Rate: rate, For: s.cfg.long, Size: 512, Patience: patience / 6})
}

// takeover kills the broker that serves more of the topics, while one of those is published to all the time and just when a message
// is published to each of them.
func (s *site) takeover(t *topics) error {
	ctx, cancel := s.limited(patience)
	defer cancel()
	owners, err := s.owners(ctx, t.names)
	if err != nil {
		return err
	}
	victim := s.c.Brokers[0]
	for p, of := range owners {
		if len(of) > len(owners[victim]) {
			victim = p
		}
	}
	theirs := owners[victim]
	s.out.take.topics = len(theirs)
	hot := hotTopic{producer: t.producers[theirs[0]]}
	var running sync.WaitGroup
	stop := make(chan struct{})
	running.Go(func() { hot.publish(ctx, stop) })
	if err := s.hold(time.Second); err != nil {
		return err
	}
	hot.watch()
	began := time.Now()
	if err := victim.Kill(); err != nil {
		return err
	}
	var mu sync.Mutex
	var publishing sync.WaitGroup
	for p, of := range owners {
		for _, i := range of {
			publishing.Go(func() {
				_, err := t.producers[i].Publish(ctx, &client.Message{Value: make([]byte, 512)})
				took := time.Since(began)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err != nil:
					s.out.take.failed++
					s.out.take.err = err
				case p == victim:
					s.out.take.all.Add(took)
				default:
					s.out.take.others.Add(took)
				}
			})
		}
	}
	publishing.Wait()
	s.out.take.hot = hot.stop()
	close(stop)
	running.Wait()
	s.told("takeover of %d topics: hot %v, p50 %v, all %v, %d failed", s.out.take.topics, s.out.take.hot, s.out.take.all.Median(), s.out.take.all.Worst(), s.out.take.failed)
	return victim.Start(ctx)
}

// hotTopic is a topic that is published to every few milliseconds, whether or not it answers.
type hotTopic struct {
	producer *client.Producer
	mu       sync.Mutex
	acks     workload.Stretches
	stretch  *workload.Stretch
}

const hotEvery = 2 * time.Millisecond

func (h *hotTopic) publish(ctx context.Context, stop <-chan struct{}) {
	var settle sync.WaitGroup
	defer settle.Wait()
	for {
		select {
		case <-stop:
			return
		case <-ctx.Done():
			return
		case <-time.After(hotEvery):
		}
		settle.Go(func() {
			if _, err := h.producer.Publish(ctx, &client.Message{Value: make([]byte, 512)}); err == nil {
				h.mu.Lock()
				defer h.mu.Unlock()
				h.acks.Event(time.Now())
			}
		})
	}
}

func (h *hotTopic) watch() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stretch = h.acks.Watch(time.Now())
}

// stop returns the longest time without an acknowledgement.
func (h *hotTopic) stop() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.acks.Stop(h.stretch, time.Now()) - hotEvery
}

// bookieBack kills bookies that are being written to, one after the other, and measures until they serve again.
func (s *site) bookieBack() error {
	const size = 1024
	ctx, cancel := s.limited(patience)
	defer cancel()
	var producers []*client.Producer
	for i := range 4 {
		p, err := s.client.Producer(ctx, fmt.Sprintf("bulk-%d", i))
		if err != nil {
			return err
		}
		producers = append(producers, p)
	}
	for round := range s.cfg.bulkRounds {
		victim := s.c.Bookies[round%len(s.c.Bookies)]
		var writing sync.WaitGroup
		failed := make(chan error, len(producers))
		for _, p := range producers {
			writing.Go(func() {
				value := make([]byte, size)
				for range s.cfg.bulk / size / len(producers) {
					p.PublishAsync(ctx, &client.Message{Value: value})
				}
				if err := p.Flush(ctx); err != nil {
					failed <- err
				}
			})
		}
		writing.Wait()
		select {
		case err := <-failed:
			return err
		default:
		}
		r, err := restarted(ctx, victim)
		if err != nil {
			return err
		}
		s.told("%s is back after %v, %d segments scanned", victim.Name, r.ready, r.scanned)
		s.out.back = append(s.out.back, r)
	}
	var err error
	for _, p := range producers {
		err = errors.Join(err, p.Close(ctx))
	}
	return err
}

// restarted kills a bookie and starts it again.
func restarted(ctx context.Context, p *process.Process) (out restart, err error) {
	info, err := os.Stat(p.Log)
	if err != nil {
		return out, err
	}
	if err := p.Kill(); err != nil {
		return out, err
	}
	began := time.Now()
	if err := p.Start(ctx); err != nil {
		return out, err
	}
	out.ready = time.Since(began)
	text, err := os.ReadFile(p.Log)
	if err == nil {
		out.scanned = scannedIn(string(text[info.Size():]))
	}
	return out, err
}

var scannedSign = regexp.MustCompile(`msg="store recovered".* scanned=(\d+)`)

// scannedIn reads from a bookie's log how many segments it had to read, -1 if it does not say.
func scannedIn(log string) int {
	if m := scannedSign.FindStringSubmatch(log); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			return n
		}
	}
	return -1
}

// grow makes idle topics in steps. The brokers are started anew first, so that none is open.
func (s *site) grow() error {
	ctx, cancel := s.limited(patience)
	defer cancel()
	for _, p := range s.c.Brokers {
		open, err := p.Metric(ctx, "penstock_broker_topics")
		if err != nil {
			return err
		}
		began := time.Now()
		if err := p.Terminate(ctx); err != nil {
			return err
		}
		s.out.handed = append(s.out.handed, handover{int(open), time.Since(began)})
		s.told("%s has handed %.0f topics over after %v", p.Name, open, time.Since(began))
		if err := p.Start(ctx); err != nil {
			return err
		}
	}
	var err error
	if s.out.cold, err = s.cost(); err != nil {
		return err
	}
	made := 0
	for _, n := range []int{0, s.cfg.idle / 10, s.cfg.idle / 4, s.cfg.idle / 2, s.cfg.idle} {
		began := time.Now()
		creating, cancel := s.limited(s.cfg.creating)
		made, err = create(creating, s.client, made, n)
		cancel()
		g := growth{idle: made, took: time.Since(began)}
		if err = errors.Join(err, s.look(&g)); err != nil {
			return err
		}
		s.out.grown = append(s.out.grown, g)
		s.told("%d idle topics after another %v: broker %v, etcd %v", made, g.took, figures.Bytes(g.cost.broker.live), figures.Bytes(g.cost.etcd.rss))
		if made < n {
			return fmt.Errorf("%d of %d idle topics were made in %v", made, n, s.cfg.creating)
		}
	}
	return nil
}

// look fills in what there is with so many idle topics.
func (s *site) look(g *growth) (err error) {
	if g.cost, err = s.cost(); err != nil {
		return err
	}
	ctx, cancel := s.limited(patience)
	defer cancel()
	if g.records, err = recordsOf(ctx, s.c, s.etcd); err != nil || g.idle == 0 {
		return err
	}
	if err := s.lookups(ctx, g); err != nil {
		return err
	}
	for range min(s.cfg.samples, g.idle) / 5 {
		name := fmt.Sprintf("public/default/idle-%d", s.rng.IntN(g.idle))
		began := time.Now()
		p, err := s.client.Producer(ctx, name)
		if err != nil {
			return err
		}
		if _, err = p.Publish(ctx, &client.Message{Value: []byte("first")}); err != nil {
			return errors.Join(err, p.Close(ctx))
		}
		g.first.Add(time.Since(began))
		if err := p.Close(ctx); err != nil {
			return err
		}
	}
	victim := s.c.Brokers[1]
	if err := victim.Kill(); err != nil {
		return err
	}
	began := time.Now()
	if err := victim.Start(ctx); err != nil {
		return err
	}
	g.restart = time.Since(began)
	return nil
}

func (s *site) lookups(ctx context.Context, g *growth) error {
	conn, err := grpc.NewClient(s.c.Brokers[0].Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", s.c.Brokers[0].Name, err)
	}
	defer conn.Close()
	for i := range s.cfg.samples + 1 {
		began := time.Now()
		_, err := brokerv1.NewLookupClient(conn).LookupTopic(ctx, &brokerv1.LookupTopicRequest{Topic: fmt.Sprintf("idle-%d", s.rng.IntN(g.idle))})
		if err != nil {
			return fmt.Errorf("look an idle topic up: %w", err)
		}
		if i > 0 { // the first one connects
			g.lookup.Add(time.Since(began))
		}
	}
	return nil
}
