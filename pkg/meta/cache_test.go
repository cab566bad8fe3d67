package meta_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
)

func newCache(t *testing.T, s *meta.Store) *meta.Cache {
	t.Helper()
	c := meta.NewCache(t.Context(), s)
	t.Cleanup(c.Close)
	check(t, c.Synced(t.Context()))
	return c
}

// await waits until cond holds, looking again after each change of kind: the loop of every consumer.
func await(t *testing.T, c *meta.Cache, kind meta.Kind, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		changed := c.Changed(kind)
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("%s: not seen", what)
		}
	}
}

func TestCacheFollows(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c := newCache(t, f.Store)

	// What was there at the start.
	if got, ok := c.Topic(f.topic.Name); !ok || got != f.topic {
		t.Fatalf("topic %+v", got)
	}
	if ns, ok := c.Namespace("public/default"); !ok || len(ns.Bundles) != 16 || !c.Tenant("public") {
		t.Fatalf("namespace %+v", ns)
	}
	if o, ok := c.Owner(bundle); !ok || o.Epoch != f.guard.Epoch || c.Epoch(bundle) != o.Epoch {
		t.Fatalf("owner %+v", o)
	}

	// What comes and goes.
	topic, err := f.CreateTopic(ctx, "public/default/second", 2)
	check(t, err)
	check(t, c.WaitRevision(ctx, topic.Rev))
	if got, ok := c.Topic(topic.Name); !ok || got != topic || len(c.Topics("public/default")) != 2 {
		t.Fatalf("a topic of a revision that was waited for: %+v", got)
	}
	doomed := newLease(t)
	check(t, f.RegisterBroker(ctx, broker("b2"), f.lease, 0))
	check(t, f.RegisterBroker(ctx, broker("b1"), doomed, 0))
	for n := byte(2); n > 0; n-- {
		id := fmt.Sprintf("k%d", n)
		check(t, f.CreateCookie(ctx, meta.Cookie{ID: id, UUID: storage(n)}))
		check(t, f.RegisterBookie(ctx, meta.BookieInfo{ID: id, UUID: storage(n), State: meta.BookieReadOnly}, f.lease, 0))
	}
	await(t, c, meta.KindBookies, "bookies", func() bool {
		all := c.Bookies()
		return len(all) == 2 && all[0].UUID == storage(1) && all[0].State == meta.BookieReadOnly
	})
	await(t, c, meta.KindBrokers, "brokers", func() bool {
		all := c.Brokers()
		return len(all) == 2 && all[0].ID == "b1" && all[1].ID == "b2"
	})
	_, err = etcd.Client().Revoke(ctx, doomed)
	check(t, err)
	await(t, c, meta.KindBrokers, "a broker whose lease ended", func() bool { _, ok := c.Broker("b1"); return !ok })
	check(t, f.ReleaseBundle(ctx, f.guard, "b1"))
	await(t, c, meta.KindOwners, "a release", func() bool { _, ok := c.Owner(bundle); return !ok })
	if c.Epoch(bundle) != f.guard.Epoch {
		t.Fatalf("the epoch went with the owner: %d", c.Epoch(bundle))
	}

	// A damaged record hides one topic, not the others, until it is whole again.
	key := "/penstock/" + f.cluster + "/view/topics/public/default/second"
	_, err = etcd.Client().Put(ctx, key, "\xff")
	check(t, err)
	await(t, c, meta.KindTopics, "a damaged record", func() bool { _, ok := c.Topic(topic.Name); return !ok })
	if _, ok := c.Topic(f.topic.Name); !ok {
		t.Fatal("another topic went with the damaged one")
	}
	_, err = etcd.Client().Delete(ctx, key)
	check(t, err)
	if c.Resyncs() != 1 {
		t.Fatalf("it read everything %d times", c.Resyncs())
	}
}

// The watch is cut off, and etcd compacts what it missed: the cache reads everything again, and learns of
// deletions too.
func TestCacheResyncsAfterCompaction(t *testing.T) {
	// Not parallel: it compacts the etcd that the others' watches follow, too.
	f := newFixture(t)
	ctx := t.Context()
	p := newProxy(t, etcd.Endpoints()[0])
	c := newCache(t, meta.New(p.client(), f.cluster, nil))

	p.setRefuse(true)
	for i := range 5 {
		_, err := f.CreateTopic(ctx, fmt.Sprintf("public/default/missed-%d", i), 0)
		check(t, err)
	}
	marked, err := f.MarkTopicDeleting(ctx, f.topic.Name)
	check(t, err)
	check(t, f.DeleteTopic(ctx, marked))
	last, err := f.UpdateNamespace(ctx, "public/default", meta.Policies{})
	check(t, err)
	if _, err := etcd.Client().Compact(ctx, last.Rev); err != nil {
		t.Fatal(err)
	}
	if _, ok := c.Topic(f.topic.Name); !ok {
		t.Fatal("while cut off the cache answers from what it has")
	}
	p.setRefuse(false)
	check(t, c.WaitRevision(ctx, last.Rev))
	if _, ok := c.Topic(f.topic.Name); ok {
		t.Fatal("a topic deleted meanwhile is still there")
	}
	if n := len(c.Topics("public/default")); n != 5 || c.Resyncs() != 2 {
		t.Fatalf("%d topics after %d full reads, want 5 after 2", n, c.Resyncs())
	}
	// And the watch goes on.
	topic, err := f.CreateTopic(ctx, "public/default/after", 0)
	check(t, err)
	await(t, c, meta.KindTopics, "a topic after the resync", func() bool { _, ok := c.Topic(topic.Name); return ok })
}

// A connection that breaks is no reason to read everything again, and nothing is missed over it.
func TestCacheSurvivesDisconnects(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	p := newProxy(t, etcd.Endpoints()[0])
	c := newCache(t, meta.New(p.client(), f.cluster, nil))
	for i := range 3 {
		p.cut()
		topic, err := f.CreateTopic(t.Context(), fmt.Sprintf("public/default/t-%d", i), 0)
		check(t, err)
		check(t, c.WaitRevision(t.Context(), topic.Rev))
		if got := c.Topics("public/default"); len(got) != i+2 || !slices.Contains(got, topic) {
			t.Fatalf("topics %+v", got)
		}
	}
	if c.Resyncs() != 1 {
		t.Fatalf("it read everything %d times", c.Resyncs())
	}
}

// Without etcd the cache waits as long as its callers do, and closes at once.
func TestCacheWithoutEtcd(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	p := newProxy(t, etcd.Endpoints()[0])
	cli := p.client()
	p.setRefuse(true)
	c := meta.NewCache(t.Context(), meta.New(cli, f.cluster, nil))
	if err := c.Synced(short(t)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	if err := c.WaitRevision(short(t), 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	c.Close()
	if len(c.Bookies()) != 0 {
		t.Fatal("it knows bookies")
	}
}

// Whoever waits for the end of a topic does not wait for that of another one, which somebody has made under its name meanwhile.
func TestATopicIsGoneThoughItsNameIsTakenAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	c := newCache(t, f.Store)
	first, err := f.CreateTopic(ctx, "public/default/again", 0)
	check(t, err)
	check(t, f.TopicStillThere(ctx, first))
	marked, err := f.MarkTopicDeleting(ctx, first.Name)
	check(t, err)
	check(t, f.TopicStillThere(ctx, marked))
	if err := f.TopicStillThere(ctx, first); !errors.Is(err, meta.ErrDeleting) {
		t.Fatalf("a topic that was marked since: %v", err)
	}
	waited := make(chan error, 1)
	go func() { waited <- c.TopicGone(ctx, marked) }()
	check(t, f.DeleteTopic(ctx, marked))
	second, err := f.CreateTopic(ctx, first.Name, 0)
	check(t, err)
	if second.UUID == first.UUID {
		t.Fatal("a topic of an old name has its UUID")
	}
	check(t, <-waited)
	check(t, c.TopicGone(ctx, marked))
	if err := f.TopicStillThere(ctx, marked); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("a topic whose name another one has: %v", err)
	}
}
