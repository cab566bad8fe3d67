package broker

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// lookPatience bounds how long a look at all topics waits for storage, to find out how old unacknowledged messages are. Beyond it that is
// told as far as it is known.
const lookPatience = 2 * time.Second

// traffic counts what went through a topic since it was opened here.
type traffic struct {
	published, publishedBytes, delivered, deliveredBytes atomic.Uint64
}

// stored counts a batch that is stored.
func (t *servedTopic) stored(messages, bytes int) {
	t.traffic.published.Add(uint64(messages))
	t.traffic.publishedBytes.Add(uint64(bytes))
	t.metrics.published.Add(float64(messages))
	t.metrics.publishedBytes.Add(float64(bytes))
}

// handed counts deliveries.
func (t *servedTopic) handed(messages, bytes int) {
	t.traffic.delivered.Add(uint64(messages))
	t.traffic.deliveredBytes.Add(uint64(bytes))
	t.metrics.delivered.Add(float64(messages))
	t.metrics.deliveredBytes.Add(float64(bytes))
}

// totals are a traffic as it was at some time.
type totals struct {
	published, publishedBytes, delivered, deliveredBytes uint64
}

func (t *traffic) totals() totals {
	return totals{t.published.Load(), t.publishedBytes.Load(), t.delivered.Load(), t.deliveredBytes.Load()}
}

// bytes is what went in and out.
func (t totals) bytes() uint64 { return t.publishedBytes + t.deliveredBytes }

// figures are what a look at the open topics found.
type figures struct {
	at     time.Time
	topics []topicFigures
}

// topicFigures are those of one topic. Rates are over the time since the look before.
type topicFigures struct {
	name, namespace      string
	stored               int64
	producers, consumers int
	totals               totals
	recent               totals        // since the look before
	over                 time.Duration // how long that was
	subscriptions        []subscriptionFigures
}

// subscriptionFigures are those of one subscription.
type subscriptionFigures struct {
	topic, name  string
	backlog      uint64
	backlogBytes int64
	age          time.Duration // of the oldest message that is not acknowledged
	unacked      uint64
	consumers    int
	reason       dispatch.Reason
}

// looked is what the look before left with a topic. It is the looking goroutine's own.
type looked struct {
	at     time.Time
	totals totals
	// floors has, by subscription, when the message at its floor was stored: while that stands still nothing is read again.
	floors map[string]floorAge
}

type floorAge struct {
	floor entry.Offset
	at    int64 // Unix milliseconds
}

// look goes over the open topics again and again.
func (b *Broker) look(ctx context.Context) {
	ticker := time.NewTicker(b.cfg.LookEvery)
	defer ticker.Stop()
	for {
		reading, cancel := context.WithTimeout(ctx, min(lookPatience, b.cfg.LookEvery))
		f := &figures{at: time.Now()}
		for _, u := range b.all() {
			for _, t := range u.opened() {
				f.topics = append(f.topics, t.figures(reading))
			}
		}
		cancel()
		b.latest.Store(f)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (t *servedTopic) figures(ctx context.Context) topicFigures {
	now := time.Now()
	f := topicFigures{
		name: t.name.String(), namespace: t.name.NamespaceName(), stored: t.log.Bytes(), producers: t.connected(), consumers: t.subs.Connected(),
		totals: t.traffic.totals(), over: now.Sub(t.opened),
	}
	f.recent = f.totals
	if before := t.looked; !before.at.IsZero() {
		f.over = now.Sub(before.at)
		f.recent = totals{
			f.totals.published - before.totals.published, f.totals.publishedBytes - before.totals.publishedBytes,
			f.totals.delivered - before.totals.delivered, f.totals.deliveredBytes - before.totals.deliveredBytes,
		}
	}
	subs, _ := t.subs.Known() // what the state log has of them is not waited for
	floors := make(map[string]floorAge, len(subs))
	for _, s := range subs {
		p := s.Progress()
		sf := subscriptionFigures{
			topic: f.name, name: s.Name(), backlog: p.Backlog, unacked: p.Status.Unacked, consumers: len(p.Status.Consumers), reason: p.Status.Reason,
		}
		if p.Backlog > 0 {
			sf.backlogBytes = t.log.BytesFrom(p.Floor)
			known := t.looked.floors[s.Name()]
			if known.at == 0 || known.floor != p.Floor {
				at, exact, ok := t.log.StoredAt(ctx, p.Floor)
				known = floorAge{at: at}
				if exact {
					known.floor = p.Floor
				}
				if !ok {
					known.at = 0
				}
			}
			if known.at != 0 {
				sf.age = max(0, now.Sub(time.UnixMilli(known.at)))
				floors[s.Name()] = known
			}
		}
		f.subscriptions = append(f.subscriptions, sf)
	}
	t.looked = looked{at: now, totals: f.totals, floors: floors}
	return f
}

// busiest returns up to n topics by the bytes that went in and out lately, then by name.
func (f *figures) busiest(n int) []*topicFigures {
	all := make([]*topicFigures, len(f.topics))
	for i := range f.topics {
		all[i] = &f.topics[i]
	}
	slices.SortFunc(all, func(a, b *topicFigures) int {
		return cmp.Or(cmp.Compare(b.recent.bytes(), a.recent.bytes()), strings.Compare(a.name, b.name))
	})
	return all[:min(n, len(all))]
}

// furthestBehind returns up to n subscriptions by the age of what they have not acknowledged, then by backlog and name; and how
// many there are.
func (f *figures) furthestBehind(n int) (first []*subscriptionFigures, all int) {
	var subs []*subscriptionFigures
	for i := range f.topics {
		for j := range f.topics[i].subscriptions {
			subs = append(subs, &f.topics[i].subscriptions[j])
		}
	}
	slices.SortFunc(subs, func(a, b *subscriptionFigures) int {
		return cmp.Or(cmp.Compare(b.age, a.age), cmp.Compare(b.backlog, a.backlog), strings.Compare(a.topic, b.topic), strings.Compare(a.name, b.name))
	})
	return subs[:min(n, len(subs))], len(subs)
}

// lag is what the subscriptions of a namespace are behind, together.
type lag struct {
	subscriptions int
	backlog       uint64
	bytes         int64
	oldest        time.Duration
}

// lags sums up by namespace, and counts subscriptions by what they wait for.
func (f *figures) lags(label func(string) string) (byNamespace map[string]lag, waiting map[dispatch.Reason]int) {
	byNamespace, waiting = map[string]lag{}, map[dispatch.Reason]int{}
	for i := range f.topics {
		t := &f.topics[i]
		name := label(t.namespace)
		l := byNamespace[name]
		for j := range t.subscriptions {
			s := &t.subscriptions[j]
			l.subscriptions++
			l.backlog += s.backlog
			l.bytes += s.backlogBytes
			l.oldest = max(l.oldest, s.age)
			waiting[s.reason]++
		}
		byNamespace[name] = l
	}
	return byNamespace, waiting
}

// bookiesOf counts the registered bookies by state.
func bookiesOf(all []meta.BookieInfo) map[string]int {
	n := map[string]int{"writable": 0, "read-only": 0, "full": 0, "draining": 0}
	for _, k := range all {
		switch {
		case k.Draining:
			n["draining"]++
		case k.State == meta.BookieReadOnly:
			n["read-only"]++
		case k.State == meta.BookieFull:
			n["full"]++
		default:
			n["writable"]++
		}
	}
	return n
}
