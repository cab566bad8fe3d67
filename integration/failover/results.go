package failover

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/penstock-mq/penstock/integration/figures"
)

// written is the page of all results so far.
func written(results []*result, strikes int, commit string) *figures.Page {
	var p figures.Page
	p.Say("# Failover time")
	p.Say("Written by `make bench-failover`, which says what is measured in `go doc ./integration/failover`. %d etcds, %d bookies (ensembles of 3, "+
		"ack quorum 2, fsync before each acknowledgement) and %d brokers, each a process, and the client share one machine: %s. Programs: %s. "+
		"%d strikes of each kind (%d stretches of time without one), settings as they are by default, %d strikes on each topic, one after the other, %d messages of %d bytes a second with deduplication.",
		etcds, bookies, brokers, figures.Machine(), commit, strikes, min(strikes, stretches), onTopic, rate, size)
	p.Say("A gap is the longest time without an acknowledged publish (publish), or without the delivery of a new message (end to end), from the strike "+
		"until the cluster is whole again with the process back, less %v between two messages. What the machine does to a cluster that nobody touches is the "+
		"first row: no gap can be told from it that is not longer.", interval)
	var base *result
	for _, r := range results {
		if r.kind.choose == nil {
			base = r
		}
	}
	gaps(&p, results, func(r *result) *figures.Sample { return &r.publish }, "## Publish gap")
	gaps(&p, results, func(r *result) *figures.Sample { return &r.deliver }, "## End-to-end gap")
	p.Say("## Promises and targets")
	if base != nil {
		p.Say("The p99 of publishing, from when a message is due, is %s where nothing happens.", figures.Milliseconds(base.latency99))
	}
	p.Head("what happens", "strikes", "sent", "failed publishes", "lost", "stored twice", "otherwise wrong", "target", "", "seconds")
	for _, r := range results {
		d, s := r.delivered, r.stored
		met := figures.Met(base != nil && r.kind.met(r, base))
		if err := r.wrong(); err != nil {
			text, _, _ := strings.Cut(err.Error(), "\n")
			met = "FAILED: " + text
		}
		p.Row(r.kind.what, strconv.Itoa(r.publish.Count()), number(d.Sent), number(r.failed()), number(max(d.Count("lost"), s.Count("lost"))),
			number(max(d.StoredTwice, s.StoredTwice)), number(max(d.Count("reordered")+d.OtherwiseWrong(), s.Count("reordered")+s.OtherwiseWrong())),
			r.kind.target, met, fmt.Sprintf("%.0f", r.took.Seconds()))
	}
	p.Say("## Where the time goes")
	p.Say("Where another broker takes over, from the strike to the end of the longest gap, cut where something was seen: etcd's changes as they arrive here, " +
		"the processes' logs (whole milliseconds), the client. Detection ends when the heir suspects the owner, takeover when the topic's bundle has its new owner " +
		"in etcd, lookup and opening when the recovery of the topic's ledger begins there, recovery when the next ledger is open.")
	table(&p, "part", results, func(r *result) []named { return r.steps })
	p.Say("When the longest gap of publishing began, and how long those were:")
	table(&p, "began", results, func(r *result) []named { return r.moments })
	p.Say("## The worst of each")
	for _, r := range results {
		if r.publish.Count() > 0 {
			p.Say("**%s** %s", r.kind.what, explained(&r.worst))
			p.Block(r.worst.lines)
		}
	}
	return &p
}

func table(p *figures.Page, column string, results []*result, of func(*result) []named) {
	p.Head("what happens", column, "strikes", "p50", "p90", "p99", "worst")
	for _, r := range results {
		for i := range of(r) {
			s := &of(r)[i]
			p.Row(append([]string{r.kind.what, s.name, strconv.Itoa(s.times.Count())}, quantiles(&s.times)...)...)
		}
	}
}

func gaps(p *figures.Page, results []*result, of func(*result) *figures.Sample, title string) {
	p.Say("%s", title)
	p.Head("what happens", "strikes", "p50", "p90", "p99", "worst", "how many")
	for _, r := range results {
		s := of(r)
		p.Row(append(append([]string{r.kind.what, strconv.Itoa(s.Count())}, quantiles(s)...), s.Histogram())...)
	}
}

func quantiles(s *figures.Sample) (cells []string) {
	for _, q := range []float64{0.5, 0.9, 0.99, 1} {
		cells = append(cells, figures.Milliseconds(s.Percentile(q)))
	}
	return cells
}

// explained says in a sentence where a strike's gap comes from.
func explained(k *strike) string {
	whom := ""
	if k.victim != "" {
		whom = " (" + k.victim + ")"
	}
	cut := ""
	if len(k.parts) > 0 {
		var each []string
		for _, x := range k.parts {
			each = append(each, x.name+" "+figures.Milliseconds(x.took))
		}
		cut = " From the strike to its end: " + strings.Join(each, ", ") + "."
	}
	return fmt.Sprintf("strike %d%s: %s without an acknowledgement, from %s after the strike on.%s Meanwhile a timer of this program was up to %s "+
		"late, and a write of 4 KiB with its sync took up to %s.",
		k.number, whom, figures.Milliseconds(k.publish), figures.Milliseconds(max(k.began, 0)), cut,
		figures.Milliseconds(k.late), figures.Milliseconds(k.sync))
}

func number(n uint64) string { return strconv.FormatUint(n, 10) }
