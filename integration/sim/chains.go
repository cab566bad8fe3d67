package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// chains is the kind of topics that are nothing but a chain of ledgers.
type chains struct {
	w *world
}

// chainRun is a chain at its owner.
type chainRun struct {
	b     *broker
	topic *topic
	guard meta.Guard
	c     *chain.Chain
}

// An entry's body: a mark, its number, its first offset, its span and its time, and something to fill it.
const (
	bodyHeader = 40
	bodyMark   = 0x636861696e656421
)

func makeBody(number uint64, base entry.Offset, span uint32, at int64, size int) []byte {
	b := make([]byte, bodyHeader, bodyHeader+size)
	binary.BigEndian.PutUint64(b, bodyMark)
	binary.BigEndian.PutUint64(b[8:], number)
	binary.BigEndian.PutUint64(b[16:], uint64(base))
	binary.BigEndian.PutUint64(b[24:], uint64(span))
	binary.BigEndian.PutUint64(b[32:], uint64(at))
	for i := range size {
		b = append(b, byte(number)+byte(i))
	}
	return b
}

type bodyParts struct {
	number uint64
	base   entry.Offset
	span   uint32
	time   int64
}

func parseBody(b []byte) (bodyParts, bool) {
	if len(b) < bodyHeader || binary.BigEndian.Uint64(b) != bodyMark {
		return bodyParts{}, false
	}
	return bodyParts{
		number: binary.BigEndian.Uint64(b[8:]), base: entry.Offset(binary.BigEndian.Uint64(b[16:])),
		span: uint32(binary.BigEndian.Uint64(b[24:])), time: int64(binary.BigEndian.Uint64(b[32:])),
	}, true
}

func describe(b []byte) (entry.Offset, int64, error) {
	p, ok := parseBody(b)
	if !ok {
		return 0, 0, errors.New("sim: not an entry of a chain")
	}
	return p.base + entry.Offset(p.span), p.time, nil
}

func (k *chains) open(ctx context.Context, b *broker, tp *topic, guard meta.Guard) (service, error) {
	w := k.w
	c := &chainRun{b: b, topic: tp, guard: guard}
	var err error
	c.c, err = chain.Open(ctx, b.chainEnv(guard), guard, tp.chain, chain.Config{
		Replication: w.replication, RollBytes: w.limits.Bytes, RollEntries: w.limits.Entries, RollAge: w.limits.Age,
		OpenNow: w.chance(4), Describe: describe,
		OnConfirmed: func(all []chain.ConfirmedEntry) {
			for _, e := range all {
				w.ghost.confirms(b, e.Position.Ledger, e.Position.Entry)
				w.ghost.serve(e.Position.Ledger, e.Position.Entry, b.name)
			}
		},
	})
	if err != nil {
		return nil, err
	}
	w.trace(b.name, topicSubject(tp), "opened topic %d with epoch %d at offset %d", tp.index, guard.Epoch, c.c.NextOffset())
	return c, nil
}

func (c *chainRun) lost() <-chan struct{} { return c.c.Lost() }

func (c *chainRun) close(ctx context.Context) error {
	w := c.b.w
	if !w.ending {
		return c.c.Close(ctx)
	}
	var acked []*producerAppend // before it is read
	for _, a := range w.ghost.order {
		if a.topic == c.topic && a.durable() {
			acked = append(acked, a)
		}
	}
	got, err := c.readAll(ctx)
	if err != nil {
		return err
	}
	if err := c.c.Close(ctx); err != nil {
		return err
	}
	owner, err := w.checker.GetOwner(ctx, c.topic.bundle)
	if mine := err == nil && owner.Epoch == c.guard.Epoch; !mine {
		return nil // it was another's, which this one did not know
	}
	for _, a := range acked {
		k := entryKey{a.position.Ledger, a.position.Entry}
		if !got[k] && w.ghost.ledger(k.ledger).record.State != meta.LedgerDeleting {
			w.fail("I1", entrySubject(k.ledger, k.entry), "append %d was acknowledged at %d:%d, and the chain is read without it", a.number, k.ledger, k.entry)
			return nil
		}
	}
	return nil
}

// readAll reads the chain from end to end, by way of its bookies, when all is healed.
func (c *chainRun) readAll(ctx context.Context) (map[entryKey]bool, error) {
	w := c.b.w
	got := map[entryKey]bool{}
	var at entry.Position
	for failed := 0; ; {
		entries, next, err := c.c.Read(ctx, at, 64<<10)
		if err != nil {
			if failed++; failed == 8 {
				return nil, fmt.Errorf("read at %v: %w", at, err)
			}
			_ = sched.Sleep(ctx, c.b.sched, time.Second)
			continue
		}
		if len(entries) == 0 {
			return got, nil
		}
		for _, e := range entries {
			k := entryKey{e.Position.Ledger, e.Position.Entry}
			got[k] = true
			if !w.ghost.is(k, e.Body) {
				w.fail("I5", entrySubject(k.ledger, k.entry), "in the end %s reads other bytes for %d:%d", c.b.name, k.ledger, k.entry)
			}
		}
		at = next
	}
}

func (c *chainRun) shutdown() { c.c.Shutdown() }

func (c *chainRun) work() {
	w := c.b.w
	for range 1 + w.rng.IntN(4) {
		c.append(pick(w.kernel, w.levels), nil)
	}
	switch {
	case w.chance(60):
		c.c.Roll()
	case w.chance(60):
		c.c.Retire()
	case w.trims && w.chance(40):
		c.b.sched.Go(c.trim)
	case w.chance(30):
		c.b.sched.Go(c.read)
	}
}

func (c *chainRun) probe(done func()) {
	c.append(ledger.AckQuorum, func(o outcome) {
		if o == stored {
			done()
		}
	})
}

// append hands an entry in. then is told its outcome, and may be nil.
func (c *chainRun) append(level ledger.AckLevel, then func(outcome)) {
	w := c.b.w
	base, _ := c.c.Resume()
	w.numbers++
	a := &producerAppend{
		number: w.numbers, topic: c.topic, level: level, span: uint32(1 + w.rng.IntN(3)), ownerEpoch: c.guard.Epoch,
		by: c.b, life: c.b.life, then: then,
	}
	w.ghost.appends[a.number] = a
	w.ghost.order = append(w.ghost.order, a)
	w.tally[pending]++
	now := c.b.sched.Now().UnixMilli()
	c.c.Append(chain.Append{
		Body: makeBody(a.number, base, a.span, now, w.rng.IntN(200)), Span: a.span, Time: now, Level: level,
		Done: func(at entry.Position, err error) { w.ghost.finished(c.b, a, at, outcomeOf(err)) },
	})
}

// outcomeOf is what an append's error says.
func outcomeOf(err error) outcome {
	var failed *ledger.AppendError
	switch {
	case err == nil:
		return stored
	case errors.As(err, &failed) && failed.Outcome == ledger.NotWritten:
		return notWritten
	}
	return unknown
}

// trim deletes the oldest ledgers.
func (c *chainRun) trim() {
	w := c.b.w
	ctx, cancel := c.b.sched.WithTimeout(context.Background(), openPatience)
	defer cancel()
	runs := c.c.Runs()
	if len(runs) < 3 {
		return
	}
	upTo := runs[1+w.rng.IntN(len(runs)-2)].First
	freed, err := c.c.Trim(ctx, func(r meta.Run) bool { return r.End <= upTo })
	w.trace(c.b.name, topicSubject(c.topic), "trims topic %d below offset %d: %v, error %v", c.topic.index, upTo, freed, err != nil)
}

// read reads a few entries, from anywhere in the chain.
func (c *chainRun) read() {
	w := c.b.w
	ctx, cancel := c.b.sched.WithTimeout(context.Background(), openPatience)
	defer cancel()
	runs := c.c.Runs()
	if len(runs) == 0 {
		return
	}
	at := entry.Position{Ledger: pick(w.kernel, runs).Ledger}
	for range 3 {
		entries, next, err := c.c.Read(ctx, at, 1<<10)
		if err != nil {
			return
		}
		for _, e := range entries {
			w.served++
			if !w.ghost.is(entryKey{e.Position.Ledger, e.Position.Entry}, e.Body) {
				w.fail("I5", entrySubject(e.Position.Ledger, e.Position.Entry), "%s reads other bytes for %d:%d", c.b.name, e.Position.Ledger, e.Position.Entry)
			}
			w.ghost.serve(e.Position.Ledger, e.Position.Entry, c.b.name)
		}
		at = next
	}
}
