package lease

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// scriptedEtcd grants leases 1, 2, 3, … and answers renewals as it is told.
type scriptedEtcd struct {
	mu      sync.Mutex
	granted int64
	renewal error
	slow    time.Duration // until a renewal is answered
	revoked clientv3.LeaseID
}

func (e *scriptedEtcd) answer(err error, slow time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.renewal, e.slow = err, slow
}

func (e *scriptedEtcd) Grant(context.Context, int64) (*clientv3.LeaseGrantResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.granted++
	return &clientv3.LeaseGrantResponse{ID: clientv3.LeaseID(e.granted)}, nil
}

func (e *scriptedEtcd) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	e.mu.Lock()
	err, slow := e.renewal, e.slow
	e.mu.Unlock()
	select {
	case <-time.After(slow):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	return &clientv3.LeaseKeepAliveResponse{ID: id, TTL: 6}, nil
}

func (e *scriptedEtcd) Revoke(_ context.Context, id clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.revoked = id
	return &clientv3.LeaseRevokeResponse{}, nil
}

// While etcd does not answer, the local deadline passes and the lease is not given up; when it answers again
// the same lease is alive. Only etcd's word ends it.
func TestDeadlineIsLocalLossIsNot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := new(scriptedEtcd)
		s, err := NewSessionOver(t.Context(), e, sched.Real, 6*time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		g, _ := s.Wait(t.Context())
		time.Sleep(time.Minute)
		if !s.Alive() {
			t.Fatal("renewed for a minute, but not alive")
		}
		e.answer(errors.New("no leader"), 0)
		time.Sleep(7 * time.Second)
		if s.Alive() {
			t.Fatal("alive without a renewal for longer than the TTL")
		}
		if g.Context().Err() != nil || s.ID() != g.ID {
			t.Fatal("the lease was given up though etcd never said so")
		}
		if n := s.Losses(); n != 0 {
			t.Fatalf("%d leases are counted as lost, want 0", n)
		}
		e.answer(nil, 0)
		time.Sleep(time.Second)
		if !s.Alive() || s.ID() != g.ID {
			t.Fatal("not renewed after etcd came back")
		}
		e.answer(rpctypes.ErrLeaseNotFound, 0)
		<-g.Lost()
		next, err := s.Wait(t.Context())
		if err != nil || next.ID == g.ID {
			t.Fatalf("after the loss: %+v, %v", next, err)
		}
		if n := s.Losses(); n == 0 {
			t.Fatal("a lease was lost, and not counted")
		}
		e.answer(nil, 0)
		if err := s.Close(t.Context()); err != nil || e.revoked != s.grant().ID {
			t.Fatalf("closed with %v, revoked %d", err, e.revoked)
		}
	})
}

// The deadline counts from before a renewal was sent: a slow answer does not stretch it.
func TestDeadlineCountsFromTheSending(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := new(scriptedEtcd)
		s, err := NewSessionOver(t.Context(), e, sched.Real, 6*time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close(context.WithoutCancel(t.Context())) }()
		begin := time.Now()
		e.answer(nil, 1900*time.Millisecond)
		time.Sleep(3950 * time.Millisecond) // the first renewal left at 2 s and is answered
		if got, want := s.Deadline().Sub(begin), 8*time.Second; got != want {
			t.Fatalf("the deadline is %v after the start, want %v", got, want)
		}
	})
}
