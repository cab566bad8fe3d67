package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// Leadership is an election won. Its context ends when the leadership does: etcd says that the lease is gone
// or the key another's, the lease's local deadline passes without a renewal, or it is resigned. The deadline
// counts here, unlike for a bundle, since nothing fences what a leader does.
type Leadership struct {
	cli    *clientv3.Client
	key    string
	rev    int64 // the key's, to recognise it
	grant  *Grant
	ctx    context.Context //nolint:containedctx // the leadership's life is what it stands for
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// ErrDeposed is the cause with which a leadership's context ends when it was lost.
var ErrDeposed = errors.New("leadership is lost")

// Campaign waits until key is free and takes it, with value, under the session's lease. It returns when it
// has won, or the context's error, or ErrClosed. The leadership ends with ctx too; the caller ends it with
// Resign in any case, also after it was lost.
func Campaign(ctx context.Context, cli *clientv3.Client, s *Session, key, value string) (*Leadership, error) {
	const retry = 200 * time.Millisecond
	ambiguous := false
	for {
		grant, err := s.Wait(ctx)
		if err != nil {
			return nil, err
		}
		resp, err := cli.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, value, clientv3.WithLease(grant.ID))).
			Else(clientv3.OpGet(key)).
			Commit()
		switch {
		case ctx.Err() != nil:
			return nil, fmt.Errorf("campaign for %s: %w", key, ctx.Err())
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			// The session is about to learn it.
			pause(ctx, min(retry, s.retryInterval()))
			continue
		case err != nil:
			ambiguous = true
			pause(ctx, retry)
			continue
		case resp.Succeeded:
			return lead(ctx, cli, grant, key, resp.Header.Revision), nil
		}
		held := resp.Responses[0].GetResponseRange().Kvs
		if ambiguous && len(held) > 0 && clientv3.LeaseID(held[0].Lease) == grant.ID && string(held[0].Value) == value {
			// An attempt of this call, whose reply was lost: nobody else has the lease.
			return lead(ctx, cli, grant, key, held[0].ModRevision), nil
		}
		waitFree(ctx, cli, key, resp.Header.Revision)
	}
}

// waitFree returns when key may be free: it was deleted after rev, or the watch ended.
func waitFree(ctx context.Context, cli *clientv3.Client, key string, rev int64) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	for resp := range cli.Watch(ctx, key, clientv3.WithRev(rev+1)) {
		if resp.Err() != nil {
			pause(ctx, 100*time.Millisecond)
			return
		}
		for _, e := range resp.Events {
			if e.Type == clientv3.EventTypeDelete {
				return
			}
		}
	}
}

func lead(ctx context.Context, cli *clientv3.Client, grant *Grant, key string, rev int64) *Leadership {
	ctx, cancel := context.WithCancelCause(ctx)
	l := &Leadership{cli: cli, key: key, rev: rev, grant: grant, ctx: ctx, cancel: cancel, done: make(chan struct{})}
	go l.run() //nolint:contextcheck // it has the leadership's own
	return l
}

// Context ends with the leadership.
func (l *Leadership) Context() context.Context { return l.ctx }

// run ends the leadership's context when it is lost.
func (l *Leadership) run() {
	defer close(l.done)
	defer l.cancel(ErrDeposed)
	watch, stop := context.WithCancel(l.ctx)
	defer stop()
	events := l.cli.Watch(watch, l.key, clientv3.WithRev(l.rev+1))
	timer := time.NewTimer(time.Until(l.grant.Deadline()))
	defer timer.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.grant.Lost():
			return
		case <-timer.C:
			left := time.Until(l.grant.Deadline())
			if left <= 0 {
				return
			}
			timer.Reset(left)
		case resp, ok := <-events:
			if !ok || resp.CompactRevision != 0 {
				// The key's later fate can't be followed: read it again from now.
				rev, held := l.reread(watch)
				if !held {
					return
				}
				events = l.cli.Watch(watch, l.key, clientv3.WithRev(rev+1))
				continue
			}
			if len(resp.Events) > 0 {
				return // deleted or another's
			}
		}
	}
}

// reread reports whether the key is still this leadership's, and the revision that says so.
func (l *Leadership) reread(ctx context.Context) (int64, bool) {
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, time.Until(l.grant.Deadline()))
		resp, err := l.cli.Get(attempt, l.key)
		cancel()
		if err == nil {
			return resp.Header.Revision, len(resp.Kvs) > 0 && resp.Kvs[0].ModRevision == l.rev
		}
		if time.Now().After(l.grant.Deadline()) {
			return 0, false
		}
		pause(ctx, 50*time.Millisecond)
	}
	return 0, false
}

// Resign ends the leadership and frees its key, so that another can win at once; if etcd does not answer
// before ctx ends, the key goes with the lease. It may be called again.
func (l *Leadership) Resign(ctx context.Context) error {
	l.cancel(context.Canceled)
	<-l.done
	_, err := l.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(l.key), "=", l.rev)).
		Then(clientv3.OpDelete(l.key)).
		Commit()
	if err != nil {
		return fmt.Errorf("resign %s: %w", l.key, err)
	}
	return nil
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) { _ = sched.Sleep(ctx, sched.Real, d) }
