package dispatch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// world is what surrounds a core: a topic in memory, an acknowledgement state, consumers that take notes.
type world struct {
	t     testing.TB
	core  Core
	now   time.Time
	spans []uint32 // of the topic's entries, repeated
	end   entry.Offset
	gone  entry.Offset // offsets below are trimmed
	acks  *cursor.Cursor
	ids   map[string]ConsumerID
	names map[ConsumerID]string
	last  ConsumerID
	fail  error                            // of reads
	got   func(to ConsumerID, d *Delivery) // sees every delivery
	mid   func()                           // happens between a read and its answer
	saw   []string
	retry []Retry
}

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func newWorld(tb testing.TB, core Core, spans ...uint32) *world {
	tb.Helper()
	acks, err := cursor.New(cursor.Meta{UUID: entry.UUID{1}, Name: "s"})
	if err != nil {
		tb.Fatal(err)
	}
	if len(spans) == 0 {
		spans = []uint32{1}
	}
	return &world{t: tb, core: core, now: epoch, spans: spans, acks: acks, ids: map[string]ConsumerID{}, names: map[ConsumerID]string{}}
}

// entries returns the entries that hold [from, until).
func (w *world) entries(from, until entry.Offset) []Entry {
	cycle := entry.Offset(0)
	for _, s := range w.spans {
		cycle += entry.Offset(s)
	}
	var out []Entry
	at := from / cycle * cycle
	for i := 0; at < min(until, w.end); i++ {
		span := w.spans[i%len(w.spans)]
		if at+entry.Offset(span) > max(from, w.gone) {
			out = append(out, Entry{Offset: at, Span: span, Frame: []byte("x")})
		}
		at += entry.Offset(span)
	}
	return out
}

func (w *world) read(req ReadRequest) {
	if w.fail != nil {
		w.core.ReadFailed(req.ID, w.fail, w.now)
		return
	}
	if from := w.acks.NextUnacked(req.From); from > req.From {
		w.core.EntriesRead(ReadResult{ID: req.ID, Next: from}, w.now)
		return
	}
	res := ReadResult{ID: req.ID, Next: max(req.From, min(w.gone, req.Until))}
	bytes := 0
	for _, e := range w.entries(req.From, req.Until) {
		if bytes += len(e.Frame); bytes > req.MaxBytes && len(res.Entries) > 0 {
			break
		}
		res.Next = e.Range().End
		missing := w.acks.Missing(nil, e.Range())
		if len(missing) == 1 && missing[0] == e.Range() {
			missing = nil
		} else if len(missing) == 0 {
			continue
		}
		res.Entries = append(res.Entries, ReadEntry{Entry: e, Missing: missing})
	}
	if w.mid != nil {
		w.mid()
	}
	w.core.EntriesRead(res, w.now)
}

// settle does everything there is to do and returns why there is no more.
func (w *world) settle() Action {
	for range 1_000_000 {
		a := w.core.Next(w.now)
		switch a.Kind {
		case ActionRead:
			w.read(a.Read)
		case ActionSend:
			for i := range a.Deliveries {
				d := &a.Deliveries[i]
				w.saw = append(w.saw, w.names[a.Consumer]+":"+describeDelivery(d))
				if w.got != nil {
					w.got(a.Consumer, d)
				}
			}
		case ActionActivate:
			w.saw = append(w.saw, "+"+w.names[a.Consumer])
		case ActionDeactivate:
			w.saw = append(w.saw, "-"+w.names[a.Consumer])
		case ActionRetries:
			w.retry = append(w.retry, a.Retries...)
		case ActionWait:
			return a
		}
	}
	w.t.Fatal("it never comes to rest")
	return Action{}
}

// describeDelivery writes 7 for a message, 8-11 for a batch, 8-11!9 with a skip of 9, and *2 for a redelivery.
func describeDelivery(d *Delivery) string {
	closed := func(r cursor.Range) string {
		if r.Len() == 1 {
			return strconv.FormatUint(uint64(r.First), 10)
		}
		return fmt.Sprintf("%d-%d", uint64(r.First), uint64(r.End)-1)
	}
	parts := []string{closed(d.Range())}
	for _, skip := range d.Skip {
		parts = append(parts, "!"+closed(skip))
	}
	if d.Redelivered > 0 {
		parts = append(parts, fmt.Sprintf("*%d", d.Redelivered))
	}
	return strings.Join(parts, "")
}

func (w *world) add(name string, priority int32) error {
	w.last++
	w.ids[name], w.names[w.last] = w.last, name
	return w.core.ConsumerAdded(Consumer{ID: w.last, Name: name, Priority: priority}, w.now)
}

func (w *world) ack(id ConsumerID, r cursor.Range) {
	if _, err := w.acks.Ack(w.acks.Generation(), w.end, r); err != nil {
		w.t.Fatal(err)
	}
	w.core.Acked(w.acks.Generation(), id, r)
}

// do carries out one line of a story.
func (w *world) do(line string) string {
	f := strings.Fields(line)
	num := func(i int) uint64 {
		n, err := strconv.ParseUint(f[i], 10, 64)
		if err != nil {
			w.t.Fatalf("%q: %v", line, err)
		}
		return n
	}
	span := func(i int) cursor.Range {
		first, last, two := strings.Cut(f[i], "-")
		a, _ := strconv.ParseUint(first, 10, 64)
		b := a
		if two {
			b, _ = strconv.ParseUint(last, 10, 64)
		}
		return cursor.Range{First: entry.Offset(a), End: entry.Offset(b) + 1}
	}
	switch f[0] {
	case "load":
		w.core.Loaded(w.acks.Generation(), w.acks.Floor(), w.end, nil, w.now)
	case "add": // NAME [PRIORITY]
		priority := int32(0)
		if len(f) > 2 {
			priority = int32(num(2))
		}
		if err := w.add(f[1], priority); err != nil {
			return err.Error()
		}
	case "remove":
		w.core.ConsumerRemoved(w.ids[f[1]], w.now)
	case "permits":
		w.core.Permits(w.ids[f[1]], uint32(num(2)))
	case "publish": // up to and without
		w.end = entry.Offset(num(1))
		w.core.DataAvailable(w.end)
	case "ack":
		w.ack(w.ids[f[1]], span(2))
	case "nack": // NAME RANGE DELAY
		d, err := time.ParseDuration(f[3])
		if err != nil {
			w.t.Fatal(err)
		}
		w.core.Nacked(w.ids[f[1]], w.now.Add(d), w.now, span(2))
	case "after":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			w.t.Fatal(err)
		}
		w.now = w.now.Add(d)
	case "seek":
		w.acks.Seek(entry.Offset(num(1)))
		w.core.SeekDone(w.acks.Generation(), entry.Offset(num(1)))
	case "trim":
		w.gone = entry.Offset(num(1))
	case "storage":
		if w.fail = nil; f[1] != "ok" {
			w.fail = fmt.Errorf("storage is %s", f[1])
		}
	default:
		w.t.Fatalf("%q is no command", line)
	}
	w.saw = nil
	a := w.settle()
	if s := w.core.Status(w.now); s.Reason != a.Reason || s.Detail == "" {
		w.t.Fatalf("it waits for %s, but says %s (%s)", a.Reason, s.Reason, s.Detail)
	}
	out := strings.Join(w.saw, " ")
	if out != "" {
		out += " "
	}
	out += "(" + string(a.Reason)
	if !a.Until.IsZero() {
		out += " " + a.Until.Sub(w.now).String()
	}
	return out + ")"
}

// story runs lines of "command => what is seen"; consumers are letters, A:3 is a delivery of offset 3 to A.
func (w *world) story(text string) {
	w.t.Helper()
	for n, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		command, want, _ := strings.Cut(line, "=>")
		if got := w.do(strings.TrimSpace(command)); got != strings.TrimSpace(want) {
			w.t.Fatalf("line %d: %s\n got: %s\nwant: %s\nstatus: %+v", n+1, strings.TrimSpace(command), got, strings.TrimSpace(want), w.core.Status(w.now))
		}
	}
}

func TestExclusiveStory(t *testing.T) {
	t.Parallel()
	newWorld(t, NewExclusive(DefaultConfig(false))).story(`
		publish 10    => (no-consumers)
		add A         => (ack-state-loading)
		load          => (no-permits)
		permits A 4   => A:0 A:1 A:2 A:3 (no-permits)
		add B         => exclusive subscription has a consumer already ("A"): disconnect it, or use Failover or Shared
		ack A 1       => (no-permits)
		# A leaves; B gets what A did not acknowledge, in order, before anything new
		remove A      => (no-consumers)
		add B         => (no-permits)
		permits B 100 => B:0*1 B:2*1 B:3*1 B:4 B:5 B:6 B:7 B:8 B:9 (no-data)
		ack B 0-7     => (no-data)
		publish 12    => B:10 B:11 (no-data)
		# what is given back comes again, and so does what lies behind it, in order
		nack B 9 5s   => (redelivery-delay 5s)
		publish 13    => (redelivery-delay 5s)
		after 4s      => (redelivery-delay 1s)
		after 1s      => B:9*1 B:10*1 B:11*1 B:12 (no-data)
		# offset 8 was not given back and stays with B
		ack B 8-12    => (no-data)
	`)
}

func TestExclusiveSeekStory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, NewExclusive(DefaultConfig(false)), 4)
	w.story(`
		publish 12    => (no-consumers)
		load          => (no-consumers)
		add A         => (no-permits)
		permits A 100 => A:0-3 A:4-7 A:8-11 (no-data)
		ack A 0-9     => (no-data)
		# into the middle of a batch: the batch comes whole, with what to skip
		seek 6        => A:4-7!4-5 A:8-11 (no-data)
		ack A 9       => (no-data)
		remove A      => (no-consumers)
		add B         => (no-permits)
		permits B 3   => B:4-7!4-5*1 B:8-11!9*1 (no-data)
		seek 12       => (no-data)
		publish 16    => (no-permits)
		# two permits went below zero by a batch
		permits B 2   => (no-permits)
		permits B 1   => B:12-15 (no-data)
	`)
}

func TestFailoverStory(t *testing.T) {
	t.Parallel()
	newWorld(t, NewFailover(DefaultConfig(false))).story(`
		publish 6     => (no-consumers)
		load          => (no-consumers)
		add B 1       => +B (no-permits)
		add C 1       => (no-permits)
		permits C 100 => (no-permits)
		permits B 3   => B:0 B:1 B:2 (no-permits)
		ack B 0       => (no-permits)
		# A comes before B: it takes over with what B did not acknowledge
		add A 0       => -B +A (no-permits)
		permits A 2   => A:1*1 A:2*1 (no-permits)
		# an acknowledgement of the former active one still counts
		ack B 1       => (no-permits)
		# giving back what one no longer holds does nothing
		nack B 2 0s   => (no-permits)
		remove A      => +B (no-permits)
		remove B      => +C C:2*2 C:3 C:4 C:5 (no-data)
		remove C      => (no-consumers)
	`)
}

func TestFailoverBreaksTiesByName(t *testing.T) {
	t.Parallel()
	newWorld(t, NewFailover(DefaultConfig(false))).story(`
		load  => (no-consumers)
		add M => +M (no-data)
		add Z => (no-data)
		add B => -M +B (no-data)
	`)
}

func TestSharedStory(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig(true)
	cfg.MaxUnackedPerConsumer, cfg.MaxUnackedPerSubscription = 4, 6
	newWorld(t, NewShared(cfg)).story(`
		publish 20    => (no-consumers)
		load          => (no-consumers)
		add A         => (no-permits)
		add B         => (no-permits)
		permits B 1   => B:0 (no-permits)
		permits A 10  => A:1 A:2 A:3 A:4 (unacked-limit-consumer)
		permits B 10  => B:5 (unacked-limit-subscription)
		ack A 1       => A:6 (unacked-limit-subscription)
		# given back with a delay: others go on
		nack B 0 10s  => B:7 (unacked-limit-subscription)
		nack A 2 0s   => A:2*1 (unacked-limit-subscription)
		ack A 3-6     => B:8 B:9 A:10 A:11 (unacked-limit-subscription)
		after 10s     => (unacked-limit-subscription)
		# B leaves: A gets what B held as far as it may
		remove B      => A:0*1 (unacked-limit-consumer)
		ack A 2       => A:7*1 (no-permits)
		ack A 0-10    => (no-permits)
		permits A 100 => A:12 A:13 A:14 (unacked-limit-consumer)
		ack A 11-14   => A:15 A:16 A:17 A:18 (unacked-limit-consumer)
		ack A 15-18   => A:19 (no-data)
	`)
}

func TestSharedTakesTurns(t *testing.T) {
	t.Parallel()
	newWorld(t, NewShared(DefaultConfig(true))).story(`
		load          => (no-consumers)
		add A         => (no-data)
		add B         => (no-data)
		add C         => (no-data)
		permits A 100 => (no-data)
		permits B 100 => (no-data)
		permits C 1   => (no-data)
		publish 9     => A:0 A:1 A:2 B:3 B:4 B:5 C:6 A:7 A:8 (no-data)
		publish 10    => B:9 (no-data)
		publish 11    => A:10 (no-data)
	`)
}

func TestSharedBatchesAreDeliveredWholeWithSkips(t *testing.T) {
	t.Parallel()
	newWorld(t, NewShared(DefaultConfig(true)), 4).story(`
		publish 8     => (no-consumers)
		load          => (no-consumers)
		add A         => (no-permits)
		permits A 1   => A:0-3 (no-permits)
		ack A 1       => (no-permits)
		add B         => (no-permits)
		permits B 100 => B:4-7 (no-data)
		# of the batch only what was given back is for B; 3 is still in the hands of A
		nack A 0-2 0s => B:0-3!1!3*1 (no-data)
		nack B 4 1s   => (redelivery-delay 1s)
		ack B 4       => (no-data)
		remove A      => B:0-3!0-2*1 (no-data)
		remove B      => (no-consumers)
		add D         => (no-permits)
		permits D 9   => D:0-3!1*2 D:4-7!4*1 (no-data)
	`)
}

func TestReaderStory(t *testing.T) {
	t.Parallel()
	core := NewReader(DefaultConfig(false), 6, 12)
	newWorld(t, core, 4).story(`
		publish 12     => (no-consumers)
		add R          => (no-permits)
		permits R 3    => R:4-7!4-5 R:8-11 (no-data)
		nack R 8 0s    => (no-data)
		remove R       => (no-consumers)
	`)
	if s := core.Status(epoch); s.Unacked != 0 || s.Next != 12 {
		t.Fatalf("a reader keeps state: %+v", s)
	}
}

func TestStorageTroubleIsToldAndTriedAgain(t *testing.T) {
	t.Parallel()
	for _, core := range []Core{NewExclusive(DefaultConfig(false)), NewShared(DefaultConfig(true))} {
		w := newWorld(t, core)
		w.story(`
			publish 4      => (no-consumers)
			load           => (no-consumers)
			storage broken => (no-consumers)
			add A          => (no-permits)
			permits A 100  => (read-failed 20ms)
			after 20ms     => (read-failed 40ms)
			storage ok     => (read-failed 40ms)
			after 40ms     => A:0 A:1 A:2 A:3 (no-data)
			publish 20     => A:4 A:5 A:6 A:7 A:8 A:9 A:10 A:11 A:12 A:13 A:14 A:15 A:16 A:17 A:18 A:19 (no-data)
			storage broken => (no-data)
			ack A 0-9      => (no-data)
			publish 21     => (read-failed 20ms)
		`)
	}
	// What was trimmed meanwhile is passed over.
	newWorld(t, NewShared(DefaultConfig(true))).story(`
		publish 8     => (no-consumers)
		load          => (no-consumers)
		add A         => (no-permits)
		permits A 4   => A:0 A:1 A:2 A:3 (no-permits)
		trim 6        => (no-permits)
		nack A 0-3 0s => (no-permits)
		permits A 100 => A:6 A:7 (no-data)
	`)
}

func TestExpiryLeavesNothingToWaitFor(t *testing.T) {
	t.Parallel()
	for _, core := range []Core{NewExclusive(DefaultConfig(false)), NewShared(DefaultConfig(true))} {
		newWorld(t, core).story(`
			publish 10    => (no-consumers)
			load          => (no-consumers)
			add A         => (no-permits)
			permits A 3   => A:0 A:1 A:2 (no-permits)
			ack nobody 0-7 => (no-permits)
			ack nobody 8-9 => (no-data)
			publish 11    => (no-permits)
			permits A 1   => A:10 (no-data)
		`)
	}
}

func TestAckThatCrossesAReadIsNotDelivered(t *testing.T) {
	t.Parallel()
	for name, core := range map[string]Core{"exclusive": NewExclusive(DefaultConfig(false)), "shared": NewShared(DefaultConfig(true))} {
		w := newWorld(t, core)
		w.do("publish 4")
		w.do("load")
		w.do("add A")
		w.mid = func() { // after the reader has looked at the acknowledgements
			w.ack(0, cursor.Range{First: 1, End: 3})
			w.mid = nil
		}
		if got := w.do("permits A 100"); got != "A:0 A:3 (no-data)" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func TestAnswerOfAnAbandonedReadIsIgnored(t *testing.T) {
	t.Parallel()
	for name, core := range map[string]Core{"exclusive": NewExclusive(DefaultConfig(false)), "shared": NewShared(DefaultConfig(true))} {
		w := newWorld(t, core)
		w.do("publish 4")
		w.do("load")
		w.do("add A")
		w.mid = func() {
			w.mid = nil
			w.acks.Seek(2)
			w.core.SeekDone(w.acks.Generation(), 2)
		}
		if got := w.do("permits A 100"); got != "A:2 A:3 (no-data)" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func TestRetriesAreToldAndComeBackAfterARestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, NewShared(DefaultConfig(true)))
	w.story(`
		publish 6     => (no-consumers)
		load          => (no-consumers)
		add A         => (no-permits)
		permits A 100 => A:0 A:1 A:2 A:3 A:4 A:5 (no-data)
		nack A 2-3 9s => (redelivery-delay 9s)
		remove A      => (no-consumers)
	`)
	want := []Retry{
		{cursor.Range{First: 2, End: 4}, 1, epoch.Add(9 * time.Second), cursor.RetryNacked},
		{cursor.Range{First: 0, End: 2}, 1, time.Time{}, cursor.RetryConsumerGone},
		{cursor.Range{First: 4, End: 6}, 1, time.Time{}, cursor.RetryConsumerGone},
	}
	if !slices.Equal(w.retry, want) {
		t.Fatalf("told %+v\nwant %+v", w.retry, want)
	}
	for _, r := range w.retry { // by way of the cursor
		if _, err := w.acks.SetRetry(w.acks.Generation(), w.end, r.Range, r.ForCursor()); err != nil {
			t.Fatal(err)
		}
	}
	w.retry = FromCursor(w.acks.Retries())
	w.core = NewShared(DefaultConfig(true))
	w.core.Loaded(0, 0, w.end, w.retry, w.now)
	w.story(`
		add A         => (no-permits)
		permits A 100 => A:0*1 A:1*1 A:4*1 A:5*1 (redelivery-delay 9s)
		after 9s      => A:2*1 A:3*1 (no-data)
	`)
	// The same again, but the delayed ones go out before the first pass gets there.
	w.core = NewShared(DefaultConfig(true))
	w.now = epoch
	w.core.Loaded(0, 0, w.end, w.retry, w.now)
	w.story(`
		add A         => (no-permits)
		after 9s      => (no-permits)
		permits A 2   => A:2*1 A:3*1 (no-permits)
		permits A 100 => A:0*1 A:1*1 A:4*1 A:5*1 (no-data)
	`)
	w.core = NewExclusive(DefaultConfig(false))
	w.now = epoch
	w.core.Loaded(0, 0, w.end, w.retry, w.now)
	w.story(`
		add A         => (redelivery-delay 9s)
		permits A 100 => (redelivery-delay 9s)
		after 9s      => A:0*1 A:1*1 A:2*1 A:3*1 A:4*1 A:5*1 (no-data)
	`)
}

func TestDelayedRangesAreBounded(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig(true)
	cfg.MaxDelayed = 2
	newWorld(t, NewShared(cfg)).story(`
		publish 3      => (no-consumers)
		load           => (no-consumers)
		add A          => (no-permits)
		permits A 100  => A:0 A:1 A:2 (no-data)
		nack A 0 1h    => (redelivery-delay 1h0m0s)
		nack A 2 1m    => (redelivery-delay 1m0s)
		publish 5      => (delayed-limit 1m0s)
		after 1m       => A:2*1 A:3 A:4 (redelivery-delay 59m0s)
	`)
}
