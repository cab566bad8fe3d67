package subscription

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/topic"
)

// recordRoom is what a group of cursor records leaves free in a state-log entry for owner and framing.
const recordRoom = 64 << 10

// kindDedup is the kind of deduplication records in a state log. Kinds 16 to 31 are cursors'.
const kindDedup uint8 = 32

// Pauses between attempts to write.
const (
	pauseMin = 20 * time.Millisecond
	pauseMax = 2 * time.Second
)

// Bundle is the state of a bundle's topics in its state log, while the bundle is served here.
type Bundle struct {
	env Env

	mu sync.Mutex
	// unsettled are subscriptions of topics that are no longer served, as long as they may still be written, by owner.
	unsettled map[string][]*Subscription
}

// NewBundle returns a bundle of which no topic is open.
func NewBundle(env Env) *Bundle {
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	env.Sched = sched.OrReal(env.Sched)
	return &Bundle{env: env, unsettled: map[string][]*Subscription{}}
}

// Forget ends a topic's set that was closed or dropped, whose topic may be opened again afterwards.
func (b *Bundle) Forget(s *Set) {
	unsettled := s.unsettled()
	if len(unsettled) == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unsettled[s.cfg.Owner] = append(b.unsettled[s.cfg.Owner], unsettled...)
}

// settle waits until nothing is being written any more of the subscriptions of a topic that was served before: who loads
// them earlier would miss what is on its way, and write over it.
func (b *Bundle) settle(ctx context.Context, c *Config) error {
	b.mu.Lock()
	subs := b.unsettled[c.Owner]
	b.mu.Unlock()
	for _, s := range subs {
		if s.settled(ctx); ctx.Err() != nil {
			return unavailable("load subscriptions of topic", c.Name, ctx.Err())
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.unsettled, c.Owner) // the topic that asks is open: nothing was added meanwhile
	return nil
}

// write appends cursors' records to the state log, in order, and waits until they are durable. What is definitely not
// written (too few bookies) is tried again as long as the bundle is served here.
func (b *Bundle) write(c *Config, records []cursor.Record, split func(int) [][]cursor.Record) error {
	if len(records) == 0 {
		return nil
	}
	log, err := b.env.State(b.env.Life)
	if err != nil {
		return err
	}
	for _, group := range split(statelog.MaxEntry - recordRoom) {
		pause := pauseMin
		for {
			err := b.append(b.env.Life, log, recordsOf(c.Owner, group))
			if err == nil {
				break
			}
			var failed *ledger.AppendError
			if !errors.As(err, &failed) || failed.Outcome != ledger.NotWritten || sched.Sleep(b.env.Life, b.env.Sched, pause) != nil {
				return err
			}
			pause = min(2*pause, pauseMax)
		}
	}
	return nil
}

// append appends records and waits until they are durable.
func (b *Bundle) append(ctx context.Context, log *statelog.Log, records []statelog.Record) error {
	return b.await(ctx, func(done func(error)) error { return log.Append(ctx, records, done) })
}

// await starts something that tells its outcome, and waits for that.
func (b *Bundle) await(ctx context.Context, start func(done func(error)) error) error {
	ended := make(chan struct{})
	var outcome error
	if err := start(func(err error) { outcome = err; close(ended) }); err != nil {
		return err
	}
	if _, err := b.env.Sched.Wait(ctx, sched.Channels{ended}); err != nil {
		return err //nolint:wrapcheck // the caller's own
	}
	return outcome
}

func recordsOf(owner string, records []cursor.Record) []statelog.Record {
	out := make([]statelog.Record, len(records))
	for i, r := range records {
		out[i] = statelog.Record{Owner: owner, Kind: r.Kind, Key: r.Key, Value: r.Value, Delete: r.Delete}
	}
	return out
}

// Snapshots keeps the deduplication records of a topic in the state log.
func (b *Bundle) Snapshots(owner string) topic.SnapshotStore { return &snapshots{b, owner} }

type snapshots struct {
	b     *Bundle
	owner string
}

// Load returns the topic's live records.
func (s *snapshots) Load(ctx context.Context) ([]topic.Record, error) {
	log, err := s.b.env.State(ctx)
	if err != nil {
		return nil, err
	}
	live, err := log.Load(ctx, s.owner)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the owner and what is damaged
	}
	var out []topic.Record
	for _, r := range live {
		if r.Kind == kindDedup {
			out = append(out, topic.Record{Key: r.Key, Value: r.Value})
		}
	}
	return out, nil
}

// Save appends records and waits until they are durable.
func (s *snapshots) Save(ctx context.Context, records []topic.Record) error {
	log, err := s.b.env.State(ctx)
	if err != nil {
		return err
	}
	out := make([]statelog.Record, len(records))
	for i, r := range records {
		out[i] = statelog.Record{Owner: s.owner, Kind: kindDedup, Key: r.Key, Value: r.Value, Delete: r.Delete}
	}
	return s.b.append(ctx, log, out)
}

// Delete ends a topic for good, with its set. What the state log has of it goes first, so that a deletion which is interrupted leaves
// nothing behind that nobody looks for. After an error the topic may be opened again, to go on with it.
func (b *Bundle) Delete(ctx context.Context, s *Set) error {
	s.Close(ctx)
	err := s.cfg.Topic.Refuse(ctx)
	if err == nil {
		err = b.erase(ctx, s)
	}
	if err == nil {
		err = s.cfg.Topic.Delete(ctx)
	}
	if err != nil {
		s.cfg.Topic.Shutdown()
	}
	return err
}

// erase deletes what the state log has of a topic whose set was closed, once nothing of it is being written any more.
func (b *Bundle) erase(ctx context.Context, s *Set) error {
	log, err := b.env.State(ctx)
	if err != nil {
		return err
	}
	if err := b.settle(ctx, &s.cfg); err != nil {
		return err
	}
	for _, sub := range s.unsettled() {
		if sub.settled(ctx); ctx.Err() != nil {
			return fmt.Errorf("delete state of topic %s: %w", s.cfg.Name, ctx.Err())
		}
	}
	return b.await(ctx, func(done func(error)) error { return log.DeleteOwner(ctx, s.cfg.Owner, done) })
}
