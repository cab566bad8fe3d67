package scale

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/integration/figures"
	"github.com/penstock-mq/penstock/integration/steady"
)

const (
	idleTopicMost   = 4 << 10 // bytes, whole cluster
	makingMost      = 10 * time.Second
	throughputLeast = 0.8
	slowerMost      = 1.5
	hotMost         = 200 * time.Millisecond
	allMost         = 10 * time.Second
	idleMost        = 120 << 20
	idleCoresMost   = 0.05
	backMost        = 2 * time.Second
)

// written is the page.
func written(m *measured) *figures.Page {
	var p figures.Page
	p.Say("# Many topics")
	p.Say("Written by `make bench-scale`; `go doc ./integration/scale` says what is measured in which order. 1 etcd, %d bookies (3 copies, ack quorum 2, fsync before "+
		"each acknowledgement), %d brokers and the client share one machine: %s. Programs: %s. Settings as they are by default. [What this means for a million topics]"+
		"(../scale.md).", bookies, brokers, figures.Machine(), m.commit)
	for _, err := range m.errs {
		p.Say("**Not measured to the end:** %s", strings.ReplaceAll(err.Error(), "\n", " "))
	}
	m.targets(&p)
	m.memory(&p)
	m.publishing(&p)
	m.taking(&p)
	m.growing(&p)
	return &p
}

// row adds a row of a table of targets, unless nothing was measured.
func row(p *figures.Page, was bool, number, what, target, got string, met bool) {
	verdict := figures.Met(met)
	if !was {
		got, verdict = "", "not measured"
	}
	p.Row(number, what, target, got, verdict)
}

func (m *measured) targets(p *figures.Page) {
	n := m.cfg.topics
	p.Say("## Targets")
	p.Head("target", "what", "at most", "measured", "")
	perIdle, step := 0.0, m.last()
	if step != nil && step.idle > 0 {
		perIdle = step.cost.minus(m.grown[0].cost).per(step.idle).all().live
	}
	row(p, perIdle != 0, "14", "memory of an idle topic that exists, whole cluster (objects and stacks)", figures.Bytes(idleTopicMost),
		figures.Bytes(perIdle), perIdle <= idleTopicMost)
	row(p, m.making > 0, "15", fmt.Sprintf("making %d topics, each with a producer and a subscription", n), figures.Seconds(makingMost), figures.Seconds(m.making), m.making <= makingMost)
	if u := m.best(); u != nil {
		through, slower := u.throughput(), u.slower(0.99)
		what := fmt.Sprintf("%d topics ÷ %d at %.0f msg/s in all", n, m.cfg.few, u.rate*float64(n))
		row(p, true, "15", what+": carried", fmt.Sprintf("≥ %.1f ×", throughputLeast), fmt.Sprintf("%.2f ×", through), through >= throughputLeast)
		row(p, true, "15", what+": publish p99", fmt.Sprintf("%.1f ×", slowerMost), fmt.Sprintf("%.2f ×", slower), slower <= slowerMost)
	}
	took := m.take.all.Count() > 0
	row(p, took, "16", fmt.Sprintf("takeover of %d topics: gap of a hot topic", m.take.topics), figures.Seconds(hotMost), figures.Milliseconds(m.take.hot), m.take.hot <= hotMost)
	row(p, took, "16", "takeover: until all were published to", figures.Seconds(allMost), figures.Seconds(m.take.all.Worst()), m.take.failed == 0 && m.take.all.Worst() <= allMost)
	for _, at := range []struct {
		what string
		c    cost
	}{{"no topics", m.base}, {fmt.Sprintf("%d topics open, nobody connected", n), m.left}, {fmt.Sprintf("%d topics, none open", n), m.cold}} {
		resident := at.c.broker.rss/brokers + at.c.bookie.rss + at.c.etcd.rss
		row(p, resident > 0, "17", fmt.Sprintf("idle, %s: resident, a broker, %d bookies and etcd", at.what, bookies), figures.Bytes(idleMost), figures.Bytes(resident), resident <= idleMost)
	}
	if at := m.leftQuiet; !at.to.at.IsZero() {
		c := cores(at.from, at.to, cost.all)
		row(p, true, "17", fmt.Sprintf("idle, %d topics open, nobody connected: cores of all processes", n), fmt.Sprintf("%.2f", idleCoresMost), fmt.Sprintf("%.3f", c), c <= idleCoresMost)
	}
	var back figures.Sample
	most := 0
	for _, r := range m.back {
		back.Add(r.ready)
		most = max(most, r.scanned)
	}
	row(p, back.Count() > 0, "18", fmt.Sprintf("a bookie is ready after kill -9, %d times, up to %d unsealed segments", back.Count(), most), figures.Seconds(backMost),
		"worst "+figures.Seconds(back.Worst()), back.Worst() <= backMost)
}

func (m *measured) last() *growth {
	if len(m.grown) == 0 {
		return nil
	}
	return &m.grown[len(m.grown)-1]
}

// best is the use at the highest rate that was carried; if none was, the first.
func (m *measured) best() *use {
	var found *use
	for i := range m.uses {
		u := &m.uses[i]
		if found == nil || carried(u.many[len(u.many)-1], u.rate*float64(m.cfg.topics)) {
			found = u
		}
	}
	return found
}

// throughput is what the many carried of what the few did, the median of the rounds.
func (u *use) throughput() float64 {
	return u.median(func(many, few *steady.Result) float64 { return many.Rate() / few.Rate() })
}

// slower is a percentile of the many by that of the few, the median of the rounds.
func (u *use) slower(q float64) float64 {
	return u.median(func(many, few *steady.Result) float64 {
		return float64(many.Latencies.Percentile(q)) / float64(few.Latencies.Percentile(q))
	})
}

func (u *use) median(of func(many, few *steady.Result) float64) float64 {
	all := make([]float64, len(u.many))
	for i := range all {
		all[i] = of(u.many[i], u.few[i])
	}
	slices.Sort(all)
	return all[(len(all)-1)/2]
}

func (m *measured) memory(p *figures.Page) {
	p.Say("## Memory")
	p.Say("The whole cluster: live is objects after a garbage collection and stacks, resident is what the system counts. Bookies keep the newest entries " +
		"in caches, up to 64 MiB each, and brokers up to 128 MiB: what is in use contains them.")
	p.Head("state", "brokers live", "bookies live", "etcd live", "brokers resident", "bookies resident", "etcd resident")
	n := m.cfg.topics
	states := []struct {
		name string
		c    cost
	}{
		{"no topics", m.base},
		{fmt.Sprintf("%d topics made, a producer and a consumer on each, quiet", n), m.made},
		{"after they were published to", m.used},
		{"after the takeover, clients gone", m.left},
		{"after the brokers' restart: none is open", m.cold},
	}
	for _, s := range states {
		if s.c.at.IsZero() {
			continue
		}
		p.Row(s.name, figures.Bytes(s.c.broker.live), figures.Bytes(s.c.bookie.live), figures.Bytes(s.c.etcd.live),
			figures.Bytes(s.c.broker.rss), figures.Bytes(s.c.bookie.rss), figures.Bytes(s.c.etcd.rss))
	}
	p.Say("Per topic, above the cluster without topics:")
	p.Head("topic", "brokers live", "bookies live", "etcd live", "all resident")
	for i, name := range []string{"connected, quiet", "connected, in use", "open, nobody connected", "used before, not open"} {
		s := states[i+1]
		if s.c.at.IsZero() {
			continue
		}
		d := s.c.minus(m.base).per(n)
		p.Row(name, figures.Bytes(d.broker.live), figures.Bytes(d.bookie.live), figures.Bytes(d.etcd.live), figures.Bytes(d.all().rss))
	}
	if g := m.last(); g != nil && g.idle > 0 {
		d := g.cost.minus(m.grown[0].cost).per(g.idle)
		p.Row(fmt.Sprintf("exists, never used (%d of them)", g.idle), figures.Bytes(d.broker.live), figures.Bytes(d.bookie.live), figures.Bytes(d.etcd.live), figures.Bytes(d.all().rss))
	}
	if !m.made.at.IsZero() {
		d := m.made.minus(m.base).per(n).broker
		p.Say("Of what a connected topic takes of the brokers, %s are the stacks of %.1f goroutines.", figures.Bytes(d.stacks), d.goroutines)
	}
	if m.client > 0 {
		p.Say("The client, with all of them connected: %s resident, %s a topic.", figures.Bytes(m.client), figures.Bytes(m.client/float64(max(n, 1))))
	}
	if m.recordsUsed.keys > 0 {
		p.Say("In etcd, a topic that has a ledger takes %.1f keys and %s:", float64(m.recordsUsed.keys-m.recordsBase.keys)/float64(max(n, 1)),
			figures.Bytes(float64(m.recordsUsed.bytes-m.recordsBase.bytes)/float64(max(n, 1))))
		p.Head("records", "bytes a topic")
		for _, k := range slices.Sorted(maps.Keys(m.recordsUsed.kinds)) {
			if d := m.recordsUsed.kinds[k] - m.recordsBase.kinds[k]; d > int64(n) {
				p.Row(k, fmt.Sprintf("%.0f", float64(d)/float64(max(n, 1))))
			}
		}
	}
	if !m.quiet.to.at.IsZero() {
		q := m.quiet
		p.Say("CPU with all connected and nothing published, in cores: brokers %.3f, bookies %.3f, etcd %.3f.",
			cores(q.from, q.to, func(c cost) usage { return c.broker }), cores(q.from, q.to, func(c cost) usage { return c.bookie }), cores(q.from, q.to, func(c cost) usage { return c.etcd }))
	}
	if !m.leftQuiet.to.at.IsZero() {
		q := m.leftQuiet
		p.Say("The same with nobody connected: brokers %.3f, bookies %.3f, etcd %.3f.",
			cores(q.from, q.to, func(c cost) usage { return c.broker }), cores(q.from, q.to, func(c cost) usage { return c.bookie }), cores(q.from, q.to, func(c cost) usage { return c.etcd }))
	}
}

func (m *measured) publishing(p *figures.Page) {
	p.Say("## Publishing")
	if m.first != nil {
		p.Say("The first message of each of %d topics, which opens its ledger, all within a second: acknowledged after %s (p50), %s (p99), the last %s after the first was due.",
			m.cfg.topics, figures.Milliseconds(m.first.Latencies.Median()), figures.Milliseconds(m.first.Latencies.Percentile(0.99)), figures.Seconds(m.first.Took))
	}
	p.Say("%d topics, each with a consumer, in turns with %d at the same rate in all; messages of 512 bytes, at an even pace, the time counted from when each was due. "+
		"Rates grow until one is not carried: the client and every process have two processors between them.", m.cfg.topics, m.cfg.few)
	p.Head("msg/s in all", "topics", "carried", "p50", "p99", "worst", "failed", "cluster CPU a message")
	for i := range m.uses {
		u := &m.uses[i]
		for _, side := range []struct {
			topics int
			of     []*steady.Result
			cpu    span
		}{{m.cfg.topics, u.many, u.cpuMany}, {m.cfg.few, u.few, u.cpuFew}} {
			var all figures.Sample
			failed, acked, took := 0, 0, time.Duration(0)
			for _, r := range side.of {
				all.Merge(&r.Latencies)
				failed += r.Failed
				acked += r.Sent - r.Failed
				took += r.Took
			}
			cpu := ""
			if last := side.of[len(side.of)-1]; !side.cpu.to.at.IsZero() && last.Sent > 0 {
				cpu = fmt.Sprintf("%.0f µs", float64((side.cpu.to.all().cpu-side.cpu.from.all().cpu).Microseconds())/float64(last.Sent))
			}
			p.Row(fmt.Sprintf("%.0f", u.rate*float64(m.cfg.topics)), strconv.Itoa(side.topics), fmt.Sprintf("%.0f/s", float64(acked)/took.Seconds()),
				figures.Milliseconds(all.Median()), figures.Milliseconds(all.Percentile(0.99)), figures.Milliseconds(all.Worst()), strconv.Itoa(failed), cpu)
		}
	}
	for i := range m.uses {
		u := &m.uses[i]
		p.Say("At %.0f msg/s, %d topics ÷ %d, median of %d rounds: carried %.2f ×, p50 %.2f ×, p99 %.2f ×.",
			u.rate*float64(m.cfg.topics), m.cfg.topics, m.cfg.few, len(u.many), u.throughput(), u.slower(0.5), u.slower(0.99))
	}
}

func (m *measured) taking(p *figures.Page) {
	p.Say("## Takeover and restart")
	if m.take.all.Count() > 0 {
		p.Say("kill -9 of the broker that served %d of the topics, all of them with a producer and a consumer, and a message published to each topic at that moment:", m.take.topics)
		p.Head("", "topics", "p50", "p90", "p99", "last", "how many")
		for _, x := range []struct {
			name string
			s    *figures.Sample
		}{{"until a message is acknowledged, of the dead broker's topics", &m.take.all}, {"of the other one's", &m.take.others}} {
			p.Row(x.name, strconv.Itoa(x.s.Count()), figures.Milliseconds(x.s.Median()), figures.Milliseconds(x.s.Percentile(0.9)), figures.Milliseconds(x.s.Percentile(0.99)),
				figures.Milliseconds(x.s.Worst()), x.s.Histogram())
		}
		failure := ""
		if m.take.err != nil {
			failure = " One of them: " + strings.ReplaceAll(m.take.err.Error(), "\n", " ")
		}
		p.Say("A topic that is published to every %v stood still for %s. %d publishes failed.%s", hotEvery, figures.Milliseconds(m.take.hot), m.take.failed, failure)
	}
	for _, h := range m.handed {
		p.Say("A broker with %d open topics that nobody uses, told to stop (SIGTERM), has handed all over and ended after %s.", h.open, figures.Seconds(h.took))
	}
	if len(m.back) > 0 {
		p.Say("kill -9 of a bookie right after %s were written, and its start:", figures.Bytes(float64(m.cfg.bulk)))
		p.Head("unsealed segments", "ready after")
		for _, r := range m.back {
			p.Row(strconv.Itoa(r.scanned), figures.Seconds(r.ready))
		}
	}
}

func (m *measured) growing(p *figures.Page) {
	if len(m.grown) == 0 {
		return
	}
	p.Say("## What grows with topics that nobody uses")
	p.Say("Besides the %d topics from before, of which none is open. Looked up are topics that nobody has used; the first publish takes the opening of a producer too.", m.cfg.topics)
	p.Head("idle topics", "made in", "per second", "brokers live", "bookies live", "etcd resident", "keys", "bytes", "etcd's file", "lookup p50 / p99", "first publish p50 / worst", "a broker's start")
	before := 0
	for i := range m.grown {
		g := &m.grown[i]
		rate, start := "", ""
		if g.idle > before {
			rate = fmt.Sprintf("%.0f", float64(g.idle-before)/g.took.Seconds())
			start = figures.Milliseconds(g.restart)
		}
		before = g.idle
		p.Row(strconv.Itoa(g.idle), figures.Seconds(g.took), rate, figures.Bytes(g.cost.broker.live), figures.Bytes(g.cost.bookie.live), figures.Bytes(g.cost.etcd.rss),
			strconv.FormatInt(g.records.keys, 10), figures.Bytes(float64(g.records.bytes)), figures.Bytes(g.records.file), pair(&g.lookup, 0.99), pair(&g.first, 1), start)
	}
}

// pair is a median and another percentile.
func pair(s *figures.Sample, q float64) string {
	if s.Count() == 0 {
		return ""
	}
	return figures.Milliseconds(s.Median()) + " / " + figures.Milliseconds(s.Percentile(q))
}
