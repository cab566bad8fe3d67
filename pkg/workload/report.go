package workload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Kind is a promise that was broken.
type Kind string

// The kinds.
const (
	// Lost: acknowledged, and not read.
	Lost Kind = "lost"
	// Phantom: read, and never sent, or refused before.
	Phantom Kind = "phantom"
	// Reordered: read after a later message of the same producer.
	Reordered Kind = "reordered"
	// StoredTwice: stored at two offsets, though deduplication was on.
	StoredTwice Kind = "stored twice"
	// Gap: offsets that nothing was read at.
	Gap Kind = "gap"
	// Changed: two messages at one offset.
	Changed Kind = "changed"
	// Misplaced: read at another offset than its receipt told.
	Misplaced Kind = "misplaced"
)

// Violation is a broken promise: how often, with some examples for people.
type Violation struct {
	Kind     Kind
	Count    uint64
	Examples []string
}

// String tells the kind, the count and the examples.
func (v Violation) String() string {
	return fmt.Sprintf("%s: %d (%s)", v.Kind, v.Count, strings.Join(v.Examples, "; "))
}

func violate(all map[Kind]*Violation, k Kind, n uint64, example string) map[Kind]*Violation {
	if all == nil {
		all = make(map[Kind]*Violation)
	}
	v := all[k]
	if v == nil {
		v = &Violation{Kind: k}
		all[k] = v
	}
	v.Count += n
	if len(v.Examples) < maxExamples {
		v.Examples = append(v.Examples, example)
	}
	return all
}

// Report is a reading judged by a book. All numbers count messages.
type Report struct {
	Sent, Acknowledged, Refused, Unknown uint64
	// Unsettled messages never got an outcome: the run was cut short.
	Unsettled uint64
	// Deduplicated messages were acknowledged as stored by an earlier attempt.
	Deduplicated uint64
	// Received counts different messages, Redelivered repetitions at the same offset, StoredTwice further offsets of
	// the same message.
	Received, Redelivered, StoredTwice uint64
	// UnknownStored counts messages of unknown outcome that turned out to be stored.
	UnknownStored uint64
	// Violations are the promises broken, sorted by kind; none is good.
	Violations []Violation
}

// Err returns nil, or an error that names every violation.
func (r Report) Err() error {
	if len(r.Violations) == 0 {
		return nil
	}
	texts := make([]string, len(r.Violations))
	for i, v := range r.Violations {
		texts[i] = v.String()
	}
	return errors.New(strings.Join(texts, "\n"))
}

// Add sums another run's report up in r. Of a violation, the example is the first one's.
func (r *Report) Add(o Report) {
	r.Sent += o.Sent
	r.Acknowledged += o.Acknowledged
	r.Refused += o.Refused
	r.Unknown += o.Unknown
	r.Unsettled += o.Unsettled
	r.Deduplicated += o.Deduplicated
	r.Received += o.Received
	r.Redelivered += o.Redelivered
	r.StoredTwice += o.StoredTwice
	r.UnknownStored += o.UnknownStored
next:
	for _, v := range o.Violations {
		for i := range r.Violations {
			if r.Violations[i].Kind == v.Kind {
				r.Violations[i].Count += v.Count
				continue next
			}
		}
		r.Violations = append(r.Violations, v)
	}
}

// Count returns how many violations of a kind there are.
func (r Report) Count(k Kind) uint64 {
	for _, v := range r.Violations {
		if v.Kind == k {
			return v.Count
		}
	}
	return 0
}

// String sums the report up in a line.
func (r Report) String() string {
	parts := []string{fmt.Sprintf("sent %d, acknowledged %d, received %d, redelivered %d, stored twice %d",
		r.Sent, r.Acknowledged, r.Received, r.Redelivered, r.StoredTwice)}
	for _, x := range []struct {
		name string
		n    uint64
	}{{"refused", r.Refused}, {"of unknown outcome", r.Unknown}, {"without outcome", r.Unsettled}} {
		if x.n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", x.name, x.n))
		}
	}
	return strings.Join(parts, ", ")
}

// Columns head what [Report.Cells] returns.
var Columns = []string{"sent", "acked", "received", "lost", "duplicated", "reordered", "otherwise wrong"}

// Cells are the report as a line of a table. Duplicated counts what is stored twice, allowed or not, and not what was
// delivered twice.
func (r Report) Cells() []string {
	var out []string
	for _, n := range []uint64{r.Sent, r.Acknowledged, r.Received, r.Count(Lost), r.StoredTwice, r.Count(Reordered), r.OtherwiseWrong()} {
		out = append(out, strconv.FormatUint(n, 10))
	}
	return out
}

// OtherwiseWrong counts phantoms, gaps, changed and misplaced messages.
func (r Report) OtherwiseWrong() uint64 {
	return r.Count(Phantom) + r.Count(Gap) + r.Count(Changed) + r.Count(Misplaced)
}

// Judge compares a reading, which should be complete, with what was sent. dedup tells that deduplication was on, so that
// nothing may be stored twice.
func (b *Book) Judge(r *Reading, dedup bool) Report {
	out := Report{Unsettled: b.Unsettled(), Redelivered: r.redelivered, StoredTwice: r.storedTwice, Received: r.Received()}
	found := make(map[Kind]*Violation)
	for k, v := range r.violations {
		if k != StoredTwice || dedup {
			found[k] = &Violation{Kind: k, Count: v.Count, Examples: slices.Clone(v.Examples)}
		}
	}
	for i := range b.accounts {
		a, read := &b.accounts[i], r.producers[i].numbers
		acked, refused, unknown := a.acked.count(), a.refused.count(), a.unknown.count()
		out.Sent += a.sent
		out.Acknowledged += acked
		out.Refused += refused
		out.Unknown += unknown
		out.Deduplicated += a.deduplicated
		out.UnknownStored += a.unknown.and(read).count()
		found = each(found, Lost, a.acked.minus(read), fmt.Sprintf("of producer %d", i))
		strayed := r.producers[i].strayed.minus(r.producers[i].twice)
		found = each(found, Misplaced, strayed, fmt.Sprintf("of producer %d, read elsewhere than acknowledged", i))
		found = each(found, Phantom, a.refused.and(read), fmt.Sprintf("of producer %d, refused and read", i))
	}
	for _, n := range slices.Sorted(maps.Keys(r.partitions)) {
		offsets := r.partitions[n].offsets
		for i := 1; i < len(offsets); i++ {
			hole := ranges{{offsets[i-1].last + 1, offsets[i].first - 1}}
			found = each(found, Gap, hole, fmt.Sprintf("among the offsets of partition %d", n))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(found)) {
		out.Violations = append(out.Violations, *found[k])
	}
	return out
}

func each(found map[Kind]*Violation, k Kind, set ranges, where string) map[Kind]*Violation {
	for _, s := range set {
		text := fmt.Sprintf("%d–%d %s", s.first, s.last, where)
		if s.first == s.last {
			text = fmt.Sprintf("%d %s", s.first, where)
		}
		found = violate(found, k, s.len(), text)
	}
	return found
}
