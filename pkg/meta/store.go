package meta

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// Store reads and changes one cluster's records. It holds no state of them: each method is one transaction
// (or one linearizable read), so any number of stores, in any number of processes, may work on one cluster.
//
// A method that finds its record changed decides by the record as it is now: where the protocol lets the two
// changes stand side by side (a replica swap under an ensemble change) it computes its own change anew, else
// it returns what it found. Retrying the caller's bytes over whatever is there would be simpler and is how
// other systems have lost ensembles. The second rejected design is a lock per record: a lock's holder can be
// paused past its lease, a compared revision can't.
//
// It is safe for concurrent use.
type Store struct {
	cli     *clientv3.Client // nil over a connection that is not a client's
	kv      clientv3.KV
	sched   sched.Scheduler
	prefix  string
	log     *slog.Logger
	metrics *metrics
	down    atomic.Int64 // since when etcd has not answered, Unix nanoseconds of sched's clock; 0: it answers, as far as is known
}

// How long one attempt may take before it is sent again, doubling, and how long to wait between attempts. What etcd was
// sent while its leadership went over may be dropped without an answer, so the first attempt must not wait for long; the
// later ones leave time to an etcd that is slow.
const (
	attemptFirst = 1500 * time.Millisecond
	attemptMost  = 10 * time.Second
	backoffFirst = 20 * time.Millisecond
	backoffMost  = time.Second
)

// New makes a store of the named cluster over cli, which stays the caller's. cluster must be non-empty and
// without a slash.
func New(cli *clientv3.Client, cluster string, log *slog.Logger) *Store {
	return newStore(clientv3.RetryKVClient(cli), cli, sched.Real, cluster, log)
}

// NewOver is New for a process with a time of its own, a simulation's: kv carries requests; it tells by its grpc.Peer
// option which of them may have reached a server. Its [Cache] is made by [NewCacheOver].
func NewOver(kv pb.KVClient, s sched.Scheduler, cluster string, log *slog.Logger) *Store {
	return newStore(kv, nil, s, cluster, log)
}

func newStore(kv pb.KVClient, cli *clientv3.Client, s sched.Scheduler, cluster string, log *slog.Logger) *Store {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Store{
		cli:     cli,
		sched:   s,
		kv:      clientv3.NewKVFromKVClient(sendTracker{kv}, cli),
		prefix:  "/penstock/" + cluster + "/",
		log:     log,
		metrics: newMetrics(),
	}
}

// attempt bounds attempt n, counted from 0.
func (s *Store) attempt(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	return s.sched.WithTimeout(ctx, sched.Doubled(attemptFirst, n, attemptMost))
}

// closed reports that the client was closed.
func (s *Store) closed() bool { return s.cli != nil && s.cli.Ctx().Err() != nil }

// newOp identifies a transaction. 64 random bits: the chance that two writers of one record meet is nil.
func newOp() uint64 { return rand.Uint64() | 1 } //nolint:gosec // identity, not secrecy; never 0

// verdict is what one failed attempt says about its transaction.
type verdict uint8

const (
	verdictRefused   verdict = iota // the server answered: not applied, and asking again won't help
	verdictNotSent                  // certainly not applied; worth another attempt
	verdictAmbiguous                // may have been applied
)

// judge classifies the error of an attempt whose request may have left (sent).
func judge(err error, sent bool) verdict {
	if errors.Is(err, rpctypes.ErrTooManyRequests) {
		return verdictNotSent
	}
	var etcdErr rpctypes.EtcdError
	code := status.Code(err)
	if errors.As(err, &etcdErr) {
		code = etcdErr.Code()
	}
	switch code {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.NotFound, codes.ResourceExhausted,
		codes.OutOfRange, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented, codes.AlreadyExists:
		return verdictRefused
	default:
		// Lost connections, timeouts, elections, a server that stops.
		if !sent {
			return verdictNotSent
		}
		return verdictAmbiguous
	}
}

// commit sends a transaction until it has a definite outcome or ctx ends. Its compares must make a second
// application impossible or harmless; the caller recognises an earlier attempt of its own in what elses read.
func (s *Store) commit(ctx context.Context, op string, cmps []clientv3.Cmp, thens, elses []clientv3.Op) (*clientv3.TxnResponse, error) {
	begin := time.Now()
	ambiguous := false
	var last error
	wait := newBackoff()
	for n := 0; ; n++ {
		if ctx.Err() != nil {
			s.metrics.done(op, "unavailable", begin)
			return nil, fmt.Errorf("%s: %w: %w", op, outcome(ambiguous), describe(ctx.Err(), last))
		}
		tracked, sent := withSendTracking(ctx)
		attempt, cancel := s.attempt(tracked, n)
		resp, err := s.kv.Txn(attempt).If(cmps...).Then(thens...).Else(elses...).Commit()
		cancel()
		if err == nil {
			s.up()
			s.metrics.done(op, outcomeLabel(resp.Succeeded), begin)
			return resp, nil
		}
		switch judge(err, sent.Load()) {
		case verdictRefused:
			s.metrics.done(op, "refused", begin)
			if errors.Is(err, rpctypes.ErrLeaseNotFound) {
				err = ErrLease
			}
			if ambiguous { // an earlier attempt may have been applied, or may be yet
				err = fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
			}
			return nil, fmt.Errorf("%s: %w", op, err)
		case verdictAmbiguous:
			ambiguous = true
		case verdictNotSent:
		}
		last = err
		s.noteDown(ctx, op, err)
		if s.closed() {
			s.metrics.done(op, "unavailable", begin)
			return nil, fmt.Errorf("%s: %w: client is closed", op, outcome(ambiguous))
		}
		s.sleep(ctx, wait.grow())
	}
}

// read runs gets as one linearizable snapshot. It retries until ctx ends, then returns ErrUnavailable.
func (s *Store) read(ctx context.Context, op string, gets ...clientv3.Op) (*clientv3.TxnResponse, error) {
	begin := time.Now()
	var last error
	wait := newBackoff()
	for n := 0; ; n++ {
		if ctx.Err() != nil {
			s.metrics.read(op, "unavailable", begin)
			return nil, fmt.Errorf("%s: %w: %w", op, ErrUnavailable, describe(ctx.Err(), last))
		}
		attempt, cancel := s.attempt(ctx, n)
		resp, err := s.kv.Txn(attempt).Then(gets...).Commit()
		cancel()
		if err == nil {
			s.up()
			s.metrics.read(op, "ok", begin)
			return resp, nil
		}
		// Nothing is at stake in a read, so only a refusal ends it.
		if judge(err, true) == verdictRefused {
			s.metrics.read(op, "refused", begin)
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		last = err
		s.noteDown(ctx, op, err)
		if s.closed() {
			s.metrics.read(op, "unavailable", begin)
			return nil, fmt.Errorf("%s: %w: client is closed", op, ErrUnavailable)
		}
		s.sleep(ctx, wait.grow())
	}
}

func outcome(ambiguous bool) error {
	if ambiguous {
		return ErrUnknownOutcome
	}
	return ErrUnavailable
}

func outcomeLabel(succeeded bool) string {
	if succeeded {
		return "applied"
	}
	return "conflict"
}

// describe joins why the wait ended with what etcd said last, for people.
func describe(ended, last error) error {
	if last == nil {
		return ended
	}
	return fmt.Errorf("%w (last attempt: %w)", ended, last)
}

// noteDown and up log each change once, however many calls are waiting. That a caller has given up says nothing.
func (s *Store) noteDown(ctx context.Context, op string, err error) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	s.metrics.retries.Inc()
	if s.down.CompareAndSwap(0, s.sched.Now().UnixNano()) {
		s.log.Warn("etcd does not answer, trying again", "op", op, "error", err)
	}
}

func (s *Store) up() {
	if s.down.Load() != 0 && s.down.Swap(0) != 0 {
		s.log.Info("etcd answers again")
	}
}

// Away returns for how long etcd has not answered, as far as calls of this store have noticed; 0 means that it answers.
func (s *Store) Away() time.Duration {
	since := s.down.Load()
	if since == 0 {
		return 0
	}
	return max(time.Duration(s.sched.Now().UnixNano()-since), 1)
}

// backoff doubles from backoffFirst to backoffMost.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: backoffFirst} }

// grow returns the next wait.
func (b *backoff) grow() time.Duration {
	d := b.next
	b.next = min(2*b.next, backoffMost)
	return d
}

// sleep waits for anything from half of d to d, or until ctx ends.
func (s *Store) sleep(ctx context.Context, d time.Duration) {
	_ = sched.Sleep(ctx, s.sched, d/2+sched.N(s.sched, d/2))
}
