package topic_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// modelClient is a producer as the SDK is one: it sends ahead, goes back to what failed, and comes back with its epoch.
type modelClient struct {
	name string
	p    *topic.Producer
	next uint64 // the sequence to send next

	mu     sync.Mutex
	wg     *sync.WaitGroup // what the present handle has not been told
	back   *uint64         // the lowest sequence that failed with the present handle
	broken bool            // … which is of no more use
	acked  map[uint64]bool
}

func (c *modelClient) fail(wg *sync.WaitGroup, seq uint64, err error) {
	if c.wg != wg {
		return // of an older handle
	}
	var add *ledger.AppendError
	if !errors.Is(err, topic.ErrSequenceGap) && !errors.Is(err, topic.ErrUnavailable) &&
		!(errors.As(err, &add) && add.Outcome == ledger.NotWritten) {
		c.broken = true
	}
	if c.back == nil || seq < *c.back {
		c.back = &seq
	}
}

func (c *modelClient) send(tb testing.TB, n int) {
	tb.Helper()
	b := batch(tb, c.name, c.next, n)
	seq, wg := c.next, c.wg
	c.next += uint64(n)
	wg.Add(1)
	b.Done = func(_ topic.Receipt, err error) {
		defer wg.Done()
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.fail(wg, seq, err)
			return
		}
		for i := range uint64(n) {
			c.acked[seq+i] = true
		}
	}
	if err := c.p.Append(tb.Context(), b); err != nil {
		wg.Done()
		c.mu.Lock()
		c.fail(wg, seq, err)
		c.mu.Unlock()
	}
}

// open lets the client come back.
func (c *modelClient) open(tb testing.TB, tp *topic.Topic) error {
	tb.Helper()
	epoch := uint64(0)
	if c.p != nil {
		epoch = c.p.Epoch()
	}
	p, err := tp.OpenProducer(tb.Context(), c.name, epoch, true)
	if err != nil {
		return fmt.Errorf("come back: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for seq := range c.acked {
		if int64(seq) > p.LastSequence() {
			return fmt.Errorf("%s: sequence %d was acknowledged, the last one is said to be %d", c.name, seq, p.LastSequence())
		}
	}
	for seq := range p.LastSequence() + 1 {
		c.acked[uint64(seq)] = true
	}
	c.p, c.next, c.wg, c.back, c.broken = p, uint64(p.LastSequence()+1), new(sync.WaitGroup), nil, false
	return nil
}

// settle waits for what was sent, and goes back to what failed. It reports whether the handle is broken.
func (c *modelClient) settle() bool {
	c.wg.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.back != nil {
		c.next, c.back = *c.back, nil
	}
	return c.broken
}

// Producers that send ahead, fail, come back and send again; bookies that go and come; owners that are replaced while they
// write; snapshots that fail half-way; trimming: each sequence is stored once, in order, and nothing acknowledged is lost.
func TestProducersThroughEverything(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		f := newCluster(t, 4)
		uuids := bookieclient.FakeUUIDs(4)
		store := newMemStore()
		cfg := topic.Config{Snapshots: store, RollEntries: 4}
		tp := f.open(f.Takeover(), topic.NewCache(2000), cfg)
		clients := []*modelClient{{name: "a"}, {name: "b"}}
		reopen := func(c *modelClient) {
			for {
				err := c.open(t, tp)
				if err == nil {
					return
				}
				if tp.Err() == nil {
					rt.Fatal(err)
				}
			}
		}
		for _, c := range clients {
			c.acked = map[uint64]bool{}
			reopen(c)
		}
		down := -1
		verify := func() {
			// Before what is stored is read: batches of handles that were replaced are done meanwhile.
			acked := map[string]int64{}
			for _, c := range clients {
				acked[c.name] = -1
				c.mu.Lock()
				for seq := range c.acked {
					acked[c.name] = max(acked[c.name], int64(seq))
				}
				c.mu.Unlock()
			}
			stored := map[string][]uint64{}
			for _, v := range values(t, tp, tp.Earliest()) {
				name, seq, _ := strings.Cut(v, "/")
				n, err := strconv.ParseUint(seq, 10, 64)
				check(t, err)
				stored[name] = append(stored[name], n)
			}
			for _, c := range clients {
				s := stored[c.name]
				for i := range s {
					if i > 0 && s[i] != s[i-1]+1 {
						rt.Fatalf("%s: %d is stored after %d", c.name, s[i], s[i-1])
					}
				}
				highest := acked[c.name]
				if tp.Earliest() == 0 && (len(s) == 0 && highest >= 0 || len(s) > 0 && s[0] != 0) {
					rt.Fatalf("%s: stored %v, acknowledged up to %d", c.name, s, highest)
				}
				if len(s) > 0 && int64(s[len(s)-1]) < highest {
					rt.Fatalf("%s: stored %v, acknowledged up to %d", c.name, s, highest)
				}
			}
		}
		restart := func() {
			if down >= 0 {
				f.Fake.Restart(uuids[down])
				down = -1
			}
		}
		heal := func() {
			restart()
			for i := range uuids {
				f.SetWritable(i, true)
			}
		}
		settle := func() {
			heal()
			for range 1000 {
				failed := false
				for _, c := range clients {
					end := c.next
					if c.settle() {
						reopen(c)
					}
					for c.next < end {
						failed = true
						c.send(t, 1)
					}
					c.wg.Wait()
				}
				if !failed {
					return
				}
			}
			rt.Fatal("producers do not come to rest")
		}
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			c := clients[rapid.IntRange(0, 1).Draw(rt, "client")]
			switch what := rapid.IntRange(0, 13).Draw(rt, "what"); what {
			case 0: // another owner, while the old one's producers have batches on their way
				old := tp
				restart() // no ledger may be opened all the same
				tp = f.open(f.Takeover(), topic.NewCache(2000), cfg)
				for _, c := range clients {
					c.send(t, 1) // to the old owner
				}
				for _, c := range clients {
					reopen(c)
				}
				if rapid.Bool().Draw(rt, "unless it is dead") {
					old.Shutdown()
				}
			case 1:
				reopen(c)
			case 2:
				if down < 0 {
					down = rapid.IntRange(0, 3).Draw(rt, "bookie")
					f.Fake.Crash(uuids[down])
				}
			case 3:
				heal()
			case 4:
				for i := range uuids {
					f.SetWritable(i, false)
				}
			case 5:
				settle()
				verify()
			case 6:
				store.set(errors.New("away"), rapid.IntRange(0, 3).Draw(rt, "records"))
				if err := tp.Snapshot(t.Context()); err == nil {
					rt.Fatal("saved nowhere")
				}
				store.set(nil, 0)
			case 7:
				check(t, tp.Snapshot(t.Context()))
			case 8:
				if tp.Err() == nil {
					_, _, err := tp.Trim(t.Context(), topic.TrimPolicy{Floor: tp.Next() / 2})
					check(t, err)
				}
			case 9:
				check(t, tp.Close(t.Context()))
				restart()
				tp = f.open(f.Takeover(), nil, cfg)
				for _, c := range clients {
					reopen(c)
				}
			case 10: // sends what it sent before, from somewhere on
				c.next = uint64(rapid.IntRange(0, int(c.next)).Draw(rt, "from"))
				for c.next < uint64(rapid.IntRange(0, int(c.next)+5).Draw(rt, "until")) {
					c.send(t, 1)
				}
			default:
				for range rapid.IntRange(1, 6).Draw(rt, "batches") {
					c.send(t, 1)
				}
			}
			for _, c := range clients {
				if c.mu.Lock(); c.broken {
					c.mu.Unlock()
					reopen(c)
					continue
				}
				if c.back != nil {
					c.next, c.back = *c.back, nil
				}
				c.mu.Unlock()
			}
		}
		settle()
		verify()
		for o := tp.Earliest(); o < tp.Next(); o++ {
			at, err := tp.PositionOf(t.Context(), o)
			check(t, err)
			if back, err := tp.OffsetOf(t.Context(), at); err != nil || back != o {
				rt.Fatalf("offset %d is at %v, which is offset %d; %v", o, at, back, err)
			}
		}
		if got, err := tp.OffsetAt(t.Context(), 0); err != nil || got != tp.Earliest() {
			rt.Fatalf("everything was stored after offset %d, the earliest is %d; %v", got, tp.Earliest(), err)
		}
		tp.Shutdown()
		eventually(t, "bytes to be given back", func() bool { return f.budget.Used() == 0 || tp.PendingBytes() == 0 })
	})
}
