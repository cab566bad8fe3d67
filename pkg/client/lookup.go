package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// owner is the broker that serves a bundle, and the epoch under which it does.
type owner struct {
	url    string
	bundle string
	epoch  uint64
}

const maxBrokers = 64

// directory remembers whom to ask, and the highest epoch seen of each bundle, so that an answer out of a
// stale cache cannot send the client back to an owner that was replaced.
//
// Brokers come and go under new addresses. So each lookup's answer replaces what is known of live ones, and those of
// the client's URL stay for good: a name there may resolve to others by then.
type directory struct {
	mu        sync.Mutex
	bootstrap []string // of the client's URL
	brokers   []string // met: the one that answered last first
	epochs    map[string]uint64
}

// learn notes what a broker said of ownership. It reports false for news older than what is known.
func (d *directory) learn(o owner) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o.bundle != "" {
		if d.epochs == nil {
			d.epochs = make(map[string]uint64)
		}
		if o.epoch < d.epochs[o.bundle] {
			return false
		}
		d.epochs[o.bundle] = o.epoch
	}
	if o.url != "" && !slices.Contains(d.brokers, o.url) {
		d.brokers = append(d.brokers, o.url)
		d.bound()
	}
	return true
}

// live notes which brokers are alive, as one of them says. Nothing said changes nothing.
func (d *directory) live(urls []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(urls) == 0 {
		return
	}
	d.brokers = slices.DeleteFunc(d.brokers, func(u string) bool { return !slices.Contains(urls, u) })
	for _, u := range urls {
		if _, err := brokerAddr(u); err == nil && !slices.Contains(d.brokers, u) {
			d.brokers = append(d.brokers, u)
		}
	}
	d.bound()
}

func (d *directory) bound() {
	if len(d.brokers) > maxBrokers {
		d.brokers = slices.Delete(d.brokers, maxBrokers, len(d.brokers))
	}
}

// answered moves a broker to the front.
func (d *directory) answered(url string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.brokers, url); i >= 0 {
		d.brokers = slices.Delete(d.brokers, i, i+1)
	}
	d.brokers = slices.Insert(d.brokers, 0, url)
	d.bound()
}

// candidates lists the brokers to ask: the one that answered last, those of the client's URL, the others; avoid
// last.
func (d *directory) candidates(avoid string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]string, 0, len(d.brokers)+len(d.bootstrap))
	add := func(urls []string) {
		for _, u := range urls {
			if !slices.Contains(out, u) {
				out = append(out, u)
			}
		}
	}
	add(d.brokers[:min(1, len(d.brokers))])
	add(d.bootstrap)
	add(d.brokers)
	if i := slices.Index(out, avoid); i >= 0 {
		out = append(slices.Delete(out, i, i+1), avoid)
	}
	return out
}

const (
	hedgeAfter    = 150 * time.Millisecond // silence of one broker before the next is asked as well
	lookupTimeout = 3 * time.Second        // of one broker; it may wait a second for the bundle to be taken
)

// askAny asks brokers one after the other until one answers, and the next already when one is silent for a
// moment: a stopped process must not cost its timeout. An error that another broker would repeat ends it.
func askAny[T any](ctx context.Context, c *Client, op, topic, avoid string, ask func(context.Context, *conn) (T, error)) (T, error) {
	type answer struct {
		value T
		url   string
		err   error
	}
	var zero T
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	urls := c.dir.candidates(avoid)
	answers := make(chan answer, len(urls))
	var wg sync.WaitGroup
	defer wg.Wait() // after cancel: the stragglers return at once
	defer cancel()
	start := func(url string) {
		wg.Go(func() {
			var a answer
			conn, err := c.pool.get(url)
			if err == nil {
				a.value, err = ask(ctx, conn)
			}
			a.url = url
			if err != nil {
				a.err = fromStatus(op, topic, url, err)
			}
			answers <- a
		})
	}
	hedge := time.NewTimer(hedgeAfter)
	defer hedge.Stop()
	var errs []error
	for next, waiting := 0, 0; ; {
		if next < len(urls) && waiting == 0 {
			start(urls[next])
			next, waiting = next+1, waiting+1
			hedge.Reset(hedgeAfter)
		}
		if waiting == 0 {
			return zero, unreachable(op, topic, errs)
		}
		select {
		case a := <-answers:
			waiting--
			if a.err == nil {
				c.dir.answered(a.url)
				return a.value, nil
			}
			if !asError(a.err).Retryable {
				return zero, a.err
			}
			errs = append(errs, a.err)
		case <-hedge.C:
			if next < len(urls) {
				start(urls[next])
				next, waiting = next+1, waiting+1
				hedge.Reset(hedgeAfter)
			}
		case <-ctx.Done():
			return zero, unreachable(op, topic, append(errs, causeOf(ctx)))
		}
	}
}

// unreachable is the error of asking every broker in vain: the only one's own, or all joined.
func unreachable(op, topic string, errs []error) error {
	if len(errs) == 1 {
		return fromStatus(op, topic, "", errs[0])
	}
	return &Error{Code: CodeUnavailable, Op: op, Topic: topic, Retryable: true, Err: errors.Join(errs...)}
}

// findOwner asks once around who serves a topic, the broker to avoid last.
func (c *Client) findOwner(ctx context.Context, topic, avoid string) (owner, error) {
	return c.findOwnerBeyond(ctx, topic, owner{url: avoid})
}

// findAgain is findOwner for a topic of whose former owner is known. All topics of a bundle have one owner: those that ask at the
// same time, as all do whose broker is gone, ask once.
func (c *Client) findAgain(ctx context.Context, topic, avoid string, former owner) (owner, error) {
	if former.bundle == "" {
		return c.findOwner(ctx, topic, avoid)
	}
	o, err := c.finds.do(ctx, c.life, &c.wg, owner{url: avoid, bundle: former.bundle}, func(ctx context.Context) (owner, error) {
		return c.findOwner(ctx, topic, avoid)
	})
	if err != nil {
		about := *fromStatus("look up", topic, "", err)
		about.Topic = topic // it may have been another's that was asked about
		return owner{}, &about
	}
	return o, nil
}

// findOwnerBeyond is findOwner for a topic of whose owner nothing is heard: the answer waits for a moment for the next one.
func (c *Client) findOwnerBeyond(ctx context.Context, topic string, silent owner) (owner, error) {
	return askAny(ctx, c, "look up", topic, silent.url, func(ctx context.Context, conn *conn) (owner, error) {
		r, err := conn.lookup.LookupTopic(ctx, &brokerv1.LookupTopicRequest{Topic: topic, Bundle: silent.bundle, BeyondEpoch: silent.epoch})
		if err != nil {
			return owner{}, err
		}
		o := owner{url: r.GetBrokerUrl(), bundle: r.GetBundle(), epoch: r.GetEpoch()}
		if o.url == "" {
			return owner{}, &Error{Code: CodeUnavailable, Op: "look up", Topic: topic, Broker: conn.url, Retryable: true, Err: errors.New("nobody serves it yet")}
		}
		c.dir.live(r.GetBrokers())
		if !c.dir.learn(o) {
			return owner{}, &Error{Code: CodeUnavailable, Op: "look up", Topic: topic, Broker: conn.url, Retryable: true, Err: errors.New("the answer is older than what is known")}
		}
		return o, nil
	})
}

// follow returns where a Moved message points, if it says more than to look up again.
func (c *Client) follow(m *brokerv1.Moved) owner {
	if m == nil {
		return owner{}
	}
	o := owner{url: m.GetBrokerUrl(), bundle: m.GetBundle(), epoch: m.GetEpoch()}
	if !c.dir.learn(o) {
		return owner{}
	}
	return o
}

// suspectEvery spaces lookups of one who waits for the next owner. It is about how long a broker holds the answer back.
const suspectEvery = 250 * time.Millisecond

// suspect looks for a newer owner than o, for as long as ctx lasts: o is gone, or silent and may have been replaced
// without this client's connection to it breaking. It returns the newer owner, or false when ctx ended. Whoever misses the
// same owner of the same bundle takes part in one search.
func (c *Client) suspect(ctx context.Context, topic string, o owner) (owner, bool) {
	if o.bundle == "" {
		n, err := c.search(ctx, topic, o)
		return n, err == nil
	}
	n, err := c.searches.do(ctx, c.life, &c.wg, o, func(ctx context.Context) (owner, error) { return c.search(ctx, topic, o) })
	return n, err == nil
}

// search is suspect by itself; its error is that of ctx.
func (c *Client) search(ctx context.Context, topic string, o owner) (owner, error) {
	for {
		asked := time.Now()
		if n, err := c.findOwnerBeyond(ctx, topic, o); err == nil && n.url != o.url && (n.bundle != o.bundle || n.epoch > o.epoch) {
			return n, nil
		}
		if !pause(ctx, time.Until(asked.Add(suspectEvery))) {
			return owner{}, causeOf(ctx)
		}
	}
}

// resolve returns a topic's full name and partition count, trying until ctx ends.
func (c *Client) resolve(ctx context.Context, op, topic string) (*brokerv1.GetTopicResponse, error) {
	b := newBackoff()
	var last error
	for {
		r, err := askAny(ctx, c, op, topic, "", func(ctx context.Context, conn *conn) (*brokerv1.GetTopicResponse, error) {
			return conn.lookup.GetTopic(ctx, &brokerv1.GetTopicRequest{Topic: topic, Create: true})
		})
		switch {
		case err == nil:
			return r, nil
		case c.life.Err() != nil:
			return nil, closedError(op, topic)
		case ctx.Err() != nil:
			if last == nil {
				last = err
			}
			return nil, gaveUp(op, topic, causeOf(ctx), last)
		case !asError(err).Retryable:
			return nil, err
		}
		last = err
		if !pause(ctx, b.next()) {
			return nil, gaveUp(op, topic, causeOf(ctx), last)
		}
	}
}
