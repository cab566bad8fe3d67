package subscription_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/chain/chaintest"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/subscription"
	"github.com/penstock-mq/penstock/pkg/topic"
)

func reason(t *testing.T, err error) subscription.Reason {
	t.Helper()
	var refused *subscription.Error
	if !errors.As(err, &refused) {
		t.Fatalf("%v, want a refusal", err)
	}
	return refused.Reason
}

// What was acknowledged stays so when the topic is opened again, and nothing else does; trimming goes by it.
func TestAcknowledgementsOutliveAClosing(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.publish(10)
	for _, o := range []entry.Offset{0, 1, 2, 5} {
		c, err := s.ensure("s").Attach(newStream(), subscription.Shared, dispatch.Consumer{})
		check(t, err)
		ack(t, c, o)
		c.Close()
		s.again()
	}
	p := s.ensure("s").Progress()
	if p.Floor != 3 || p.Backlog != 6 || p.Holes != 1 {
		t.Fatalf("floor %d, backlog %d, %d holes, want 3, 6 and 1", p.Floor, p.Backlog, p.Holes)
	}
	floor, err := s.set.TrimFloor(t.Context())
	if err != nil || floor != 3 {
		t.Fatalf("trim floor %d, %v, want 3", floor, err)
	}
}

// A consumer that comes back is delivered what was published while there was none.
func TestAConsumerComesBack(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.publish(1)
	sub := s.ensure("s")
	for n := range 3 {
		came := newStream()
		c, err := sub.Attach(came, subscription.Exclusive, dispatch.Consumer{})
		check(t, err)
		c.Permits(10)
		if got := came.await(t, 1); !slices.Equal(got, []entry.Offset{entry.Offset(n)}) {
			t.Fatalf("consumer %d was delivered %v", n, got)
		}
		ack(t, c, entry.Offset(n))
		c.Close()
		s.publish(1)
	}
}

// Delivery skips what is acknowledged, goes on with what is published later, and follows a seek.
func TestDelivery(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.publish(3)
	sub := s.ensure("s")
	first := newStream()
	c, err := sub.Attach(first, subscription.Exclusive, dispatch.Consumer{})
	check(t, err)
	defer c.Close()
	_, err = sub.Attach(newStream(), subscription.Shared, dispatch.Consumer{})
	if reason(t, err) != subscription.Conflict {
		t.Fatal(err)
	}
	c.Permits(4)
	first.await(t, 3)
	s.publish(1)
	if got := first.await(t, 4); !slices.Equal(got, []entry.Offset{0, 1, 2, 3}) {
		t.Fatalf("delivered %v", got)
	}
	reader := newStream()
	r, err := s.set.AttachReader(reader, 2, dispatch.Consumer{})
	check(t, err)
	r.Permits(10)
	if got := reader.await(t, 2); !slices.Equal(got, []entry.Offset{2, 3}) {
		t.Fatalf("a reader was delivered %v", got)
	}
	r.Close()
	if n := s.set.Connected(); n != 1 {
		t.Fatalf("%d connected", n)
	}
	check(t, c.Ack(nil, 2, nil))
	check(t, sub.Seek(t.Context(), 1))
	if reason(t, first.stopped) != subscription.Moved {
		t.Fatal(first.stopped)
	}
	if err := c.Ack([]cursor.Range{{First: 1, End: 2}}, 0, nil); !errors.Is(err, cursor.ErrStaleGeneration) {
		t.Fatalf("acknowledged what was delivered before a move: %v", err)
	}
	c.Close()
	second := newStream()
	c2, err := sub.Attach(second, subscription.Shared, dispatch.Consumer{})
	check(t, err)
	defer c2.Close()
	c2.Permits(10)
	if got := second.await(t, 3); !slices.Equal(got, []entry.Offset{1, 2, 3}) {
		t.Fatalf("delivered %v after a move to 1", got)
	}
}

// What was given back comes after its delay, and not before, though the broker that takes over has a clock that is a day off.
func TestADelayIsOfNoClock(t *testing.T) {
	t.Parallel()
	for _, kind := range []subscription.Type{subscription.Exclusive, subscription.Shared} {
		for _, by := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
			t.Run(fmt.Sprint(kind, by), func(t *testing.T) {
				t.Parallel()
				f := chaintest.New(t, etcd.Client(), 3)
				s := serve(t, f)
				s.publish(1)
				give := func(name string, delay time.Duration) {
					out := newStream()
					c, err := s.ensure(name).Attach(out, kind, dispatch.Consumer{})
					check(t, err)
					c.Permits(1)
					out.await(t, 1)
					c.Nack(delay, []cursor.Range{{First: 0, End: 1}})
					c.Close()
				}
				give("soon", 100*time.Millisecond)
				give("late", 12*time.Hour)
				s.again() // just after that: it is remembered all the same
				s = serveBy(t, f, by)
				late, soon := newStream(), newStream()
				for name, out := range map[string]*stream{"late": late, "soon": soon} {
					c, err := s.ensure(name).Attach(out, kind, dispatch.Consumer{})
					check(t, err)
					defer c.Close()
					c.Permits(1)
				}
				soon.await(t, 1)
				if p := s.ensure("late").Progress(); p.Status.Delayed != 1 {
					t.Fatalf("what is to come in 12 hours is not waited for: %s", p.Status.Detail)
				}
			})
		}
	}
}

// A consumer that gives up while the state log is read must not begin the subscription anew: there would be two of that
// name, and the topic would be delivered from where either stands.
func TestASubscriptionThatIsNotReadYetIsNotCreated(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.ensure("s")
	s.publish(10)
	for range 10 {
		s.again()
		release := s.hold()
		loading := make(chan error, 1)
		go func() { loading <- s.set.Load(t.Context()) }()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 2 { // as the one who loads, and as one who waits for that
			if _, _, err := s.set.Ensure(ctx, "s", at(10)); err == nil {
				t.Fatal("a subscription that was not read is there")
			}
		}
		release()
		check(t, <-loading)
		if p := s.ensure("s").Progress(); p.Floor != 0 {
			t.Fatalf("the subscription is at %d, want 0", p.Floor)
		}
	}
}

// A subscription is only there once it is durable, also for whoever comes second: he would go by it, and it would be gone with
// the owner.
func TestASubscriptionThatIsNotWrittenYetIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	check(t, s.set.Load(t.Context()))
	release := s.hold()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		if _, _, err := s.set.Ensure(ctx, "s", at(0)); err == nil {
			t.Fatal("a subscription that is not written is there")
		}
	}
	release()
	if _, created, err := s.set.Ensure(t.Context(), "s", at(0)); err != nil || created {
		t.Fatalf("created again: %v, %v", created, err)
	}
}

// A topic is not opened again before what its subscriptions had under way is written.
func TestALateFlushIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.publish(10)
	c, err := s.ensure("s").Attach(newStream(), subscription.Shared, dispatch.Consumer{})
	check(t, err)
	defer c.Close()
	release := s.hold()
	done := make(chan error, 1)
	check(t, c.Ack([]cursor.Range{{First: 0, End: 4}}, 0, func(err error) { done <- err }))
	s.set.Drop()
	if err := c.Ack([]cursor.Range{{First: 4, End: 5}}, 0, nil); !errors.Is(err, topic.ErrClosed) {
		t.Fatalf("acknowledged at a set that is dropped: %v", err)
	}
	s.b.Forget(s.set)
	s.serveTopic()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.set.Get(ctx, "s"); err == nil {
		t.Fatal("read while the former flush is under way")
	}
	release()
	check(t, func() error { _, err := s.set.Get(t.Context(), "s"); return err }())
	check(t, <-done)
	if p := s.ensure("s").Progress(); p.Floor != 4 {
		t.Fatalf("the subscription is at %d, want 4", p.Floor)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.publish(10)
	st := newStream()
	c, err := s.ensure("s").Attach(st, subscription.Shared, dispatch.Consumer{})
	check(t, err)
	defer c.Close()
	ack(t, c, 3)
	if r := reason(t, s.set.Remove(t.Context(), "s", false)); r != subscription.Refused {
		t.Fatal(r)
	}
	check(t, s.set.Remove(t.Context(), "s", true))
	if reason(t, st.stopped) != subscription.NotFound {
		t.Fatal(st.stopped)
	}
	for range 2 {
		_, err := s.set.Get(t.Context(), "s")
		if reason(t, err) != subscription.NotFound {
			t.Fatal(err)
		}
		if owners := s.log.Owners(); len(owners) != 0 {
			t.Fatalf("the state log still has something of %v", owners)
		}
		s.again()
	}
	if p := s.ensure("s").Progress(); p.Floor != 0 || p.Holes != 0 {
		t.Fatalf("a subscription of an old name begins at %d with %d holes", p.Floor, p.Holes)
	}
	check(t, s.b.Delete(t.Context(), s.set))
	if owners := s.log.Owners(); len(owners) != 0 {
		t.Fatalf("the state log still has something of %v", owners)
	}
	if _, _, err := s.set.Ensure(t.Context(), "other", at(0)); !errors.Is(err, errGone) {
		t.Fatalf("a subscription is created at a set that is closed: %v", err)
	}
}

// Nobody is told that a subscription is deleted before that is durable: if it fails the next owner has it, and consumers that
// were told otherwise do not come back.
func TestADeletionIsToldWhenItIsDurable(t *testing.T) {
	t.Parallel()
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			t.Parallel()
			s := serve(t, chaintest.New(t, etcd.Client(), 3))
			s.publish(3)
			sub, st := s.ensure("s"), newStream()
			c, err := sub.Attach(st, subscription.Shared, dispatch.Consumer{})
			check(t, err)
			defer c.Close()
			release := s.hold()
			removed := make(chan error, 1)
			go func() { removed <- s.set.Remove(t.Context(), "s", true) }()
			for { // until the deletion is under way
				other, err := sub.Attach(newStream(), subscription.Shared, dispatch.Consumer{})
				if err != nil {
					break
				}
				other.Close()
			}
			if err := c.Ack([]cursor.Range{{First: 0, End: 1}}, 0, nil); reason(t, err) != subscription.Unavailable {
				t.Errorf("an acknowledgement while a deletion is under way: %v", err)
			}
			if why := st.why(); why != nil {
				t.Errorf("a consumer is told before the deletion is durable: %v", why)
			}
			if lost {
				s.log.Shutdown()
			}
			release()
			err = <-removed
			var gone *subscription.Error
			isGone := errors.As(st.why(), &gone) && gone.Reason == subscription.NotFound
			if (err != nil) != lost || st.why() == nil || isGone == lost {
				t.Errorf("deletion: %v; the consumer is told %v", err, st.why())
			}
			err = c.Ack([]cursor.Range{{First: 0, End: 1}}, 0, nil)
			if isGone = errors.As(err, &gone) && gone.Reason == subscription.NotFound; err == nil || isGone == lost {
				t.Errorf("an acknowledgement afterwards: %v", err)
			}
		})
	}
}

// When nothing is written any more, since the process is stopping, whoever waits for that is told so.
func TestNobodyWaitsForWhatIsNotWritten(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.publish(3)
	sub, other := s.ensure("s"), s.ensure("other")
	c, err := sub.Attach(newStream(), subscription.Shared, dispatch.Consumer{})
	check(t, err)
	defer c.Close()
	ack(t, c, 0)
	s.over.Store(true)
	told := make(chan error, 1)
	check(t, c.Ack([]cursor.Range{{First: 1, End: 2}}, 0, func(err error) { told <- err }))
	select {
	case err := <-told:
		if !errors.Is(err, topic.ErrClosed) {
			t.Errorf("an acknowledgement that is not written: %v, want %v", err, topic.ErrClosed)
		}
	default:
		t.Error("an acknowledgement that is not written is never answered")
	}
	if err := c.Ack([]cursor.Range{{First: 2, End: 3}}, 0, func(error) {}); !errors.Is(err, topic.ErrClosed) {
		t.Errorf("an acknowledgement after one that was not written: %v, want %v", err, topic.ErrClosed)
	}
	if err := other.Seek(t.Context(), 2); !errors.Is(err, topic.ErrClosed) {
		t.Errorf("a move that is not written: %v, want %v", err, topic.ErrClosed)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	for _, name := range []string{"", "a b", "a/b", "a\n", string(make([]byte, 201)), "\xff"} {
		_, _, err := s.set.Ensure(t.Context(), name, at(0))
		if reason(t, err) != subscription.Invalid {
			t.Fatalf("%q: %v", name, err)
		}
	}
}

func TestSnapshots(t *testing.T) {
	t.Parallel()
	s := serve(t, chaintest.New(t, etcd.Client(), 3))
	s.ensure("s")
	store := s.b.Snapshots(owner)
	check(t, store.Save(t.Context(), []topic.Record{{Key: []byte("a"), Value: []byte("1")}, {Key: []byte("b"), Value: []byte("2")}}))
	check(t, store.Save(t.Context(), []topic.Record{{Key: []byte("a"), Delete: true}}))
	got, err := store.Load(t.Context())
	if err != nil || len(got) != 1 || string(got[0].Key) != "b" || string(got[0].Value) != "2" {
		t.Fatalf("%v, %v", got, err)
	}
}

// deletions has something happen while a ledger is about to be deleted.
type deletions struct {
	chain.Metadata
	before func()
}

func (d *deletions) DeleteLedger(ctx context.Context, g meta.Guard, c meta.Chain, id entry.LedgerID) (meta.Chain, error) {
	if d.before != nil {
		d.before()
	}
	return d.Metadata.DeleteLedger(ctx, g, c, id)
}

// What a subscription was moved to, or began at, is not trimmed under it: nothing of a trim that looked at it before.
func TestATrimUnderWay(t *testing.T) {
	t.Parallel()
	f := chaintest.New(t, etcd.Client(), 3)
	held := &deletions{Metadata: f.Meta}
	f.Meta = held
	s := serve(t, f)
	for range 3 {
		s.publish(2)
		check(t, s.topic.Chain().RollAndWait(t.Context(), s.topic.Chain().Runs()[len(s.topic.Chain().Runs())-1].Ledger))
	}
	old := s.ensure("old")
	check(t, old.Expire(6))
	check(t, old.Seek(t.Context(), 6)) // and durable
	var work sync.WaitGroup
	begun := make(chan struct{}, 2)
	held.before = func() {
		held.before = nil
		for _, do := range []func() error{
			func() error { return old.Seek(t.Context(), 1) },
			func() error { _, _, err := s.set.Ensure(t.Context(), "new", at(1)); return err },
		} {
			work.Go(func() {
				if err := do(); err != nil {
					t.Error(err)
				}
				begun <- struct{}{}
			})
		}
		select { // a while, in which what does not wait is done
		case <-begun:
		case <-time.After(50 * time.Millisecond):
		}
	}
	_, freed, err := s.set.Trim(t.Context(), topic.TrimPolicy{})
	if err != nil || freed == 0 {
		t.Fatalf("%d bytes trimmed, %v", freed, err)
	}
	work.Wait()
	for _, sub := range []*subscription.Subscription{old, s.ensure("new")} {
		if p := sub.Progress(); p.Floor < s.topic.Earliest() {
			t.Errorf("subscription %s is at %d, and what lies below %d was trimmed", sub.Name(), p.Floor, s.topic.Earliest())
		}
	}
}

// What is acknowledged and on no disk yet may be forgotten by the next owner: it is not trimmed.
func TestATrimWaitsForWhatIsDurable(t *testing.T) {
	t.Parallel()
	f := chaintest.New(t, etcd.Client(), 3)
	s := serve(t, f)
	sub := s.ensure("s")
	for range 3 {
		s.publish(2)
		check(t, s.topic.Chain().RollAndWait(t.Context(), s.topic.Chain().Runs()[len(s.topic.Chain().Runs())-1].Ledger))
	}
	release := f.Fake.Hold(bookieclient.AtRequest, bookieclient.OpAdd)
	defer release()
	check(t, sub.Expire(6))
	if _, freed, err := s.set.Trim(t.Context(), topic.TrimPolicy{}); err != nil || freed > 0 {
		t.Errorf("%d bytes trimmed, %v", freed, err)
	}
}
