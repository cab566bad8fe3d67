package bookie

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/sched"
)

const (
	// scrubEvery is the least time between the beginnings of two scrubs: a disk with little on it is not read all the time.
	scrubEvery = time.Hour
	// scrubBurst is what is read at once at most.
	scrubBurst = 1 << 20
)

// scrubber reads what is stored again, slowly, so that damage is found while there are other copies.
type scrubber struct {
	store *ledgerstore.Store
	rate  rate.Limit // bytes per second
	log   *slog.Logger

	bytes, passes atomic.Int64
}

// run scrubs until ctx ends.
func (s *scrubber) run(ctx context.Context) {
	limiter := rate.NewLimiter(s.rate, scrubBurst)
	pace := func(ctx context.Context, n int) error {
		return limiter.WaitN(ctx, min(n, scrubBurst))
	}
	for {
		next := time.Now().Add(scrubEvery)
		if _, err := s.pass(ctx, pace); err != nil && ctx.Err() == nil {
			s.log.Warn("scrub could not be finished; trying again", slog.Any("error", err))
		}
		if sched.Sleep(ctx, sched.Real, max(time.Until(next), time.Minute)) != nil {
			return
		}
	}
}

// now scrubs without a pause.
func (s *scrubber) now(ctx context.Context) (ledgerstore.Scrubbed, error) {
	return s.pass(ctx, func(ctx context.Context, _ int) error { return ctx.Err() })
}

func (s *scrubber) pass(ctx context.Context, pace func(context.Context, int) error) (ledgerstore.Scrubbed, error) {
	sum, err := s.store.Scrub(ctx, func(ctx context.Context, n int) error {
		s.bytes.Add(int64(n))
		return pace(ctx, n)
	})
	if err != nil {
		return sum, err //nolint:wrapcheck // it names the segment
	}
	s.passes.Add(1)
	if sum.Damaged > 0 {
		s.log.Error("entries here cannot be read; they are repaired from other copies", slog.Int64("entries", sum.Damaged))
	}
	return sum, nil
}
