package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// registrar keeps what the cluster knows of a live bookie: under the session's lease, renewed when the store's state
// changes, now and then for the free bytes, and anew under each new lease.
type registrar struct {
	meta     *meta.Store
	session  *lease.Session
	store    *ledgerstore.Store
	base     meta.BookieInfo // what does not change
	interval time.Duration
	log      *slog.Logger
}

// info is the registration as it should be now.
func (r *registrar) info() meta.BookieInfo {
	b, usage := r.base, r.store.Usage()
	b.FreeBytes, b.TotalBytes = usage.Free, usage.Total
	b.State = stateOf(r.store.State())
	return b
}

func stateOf(s ledgerstore.State) meta.BookieState {
	switch s {
	case ledgerstore.ReadOnly:
		return meta.BookieReadOnly
	case ledgerstore.Full:
		return meta.BookieFull
	case ledgerstore.Writable:
	}
	return meta.BookieWritable
}

// register registers under the lease of now, until it is done or ctx ends. It returns the lease's end. An error that
// no retry can mend is returned at once: the identity was retired, or is another's.
func (r *registrar) register(ctx context.Context) (lost <-chan struct{}, registered meta.BookieInfo, err error) {
	for {
		grant, err := r.session.Wait(ctx)
		if err != nil {
			return nil, meta.BookieInfo{}, fmt.Errorf("wait for a lease: %w", err)
		}
		info := r.info()
		err = r.meta.RegisterBookie(ctx, info, grant.ID)
		switch {
		case err == nil:
			return grant.Lost(), info, nil
		case errors.Is(err, meta.ErrRetired), errors.Is(err, meta.ErrConflict), errors.Is(err, meta.ErrNotFound):
			return nil, meta.BookieInfo{}, &IdentityError{
				Problem: fmt.Sprintf("storage %s cannot be registered: %v", r.base.UUID, err),
				Advice:  "the identity of this disk is not valid any more; see the bookie's cookie in etcd",
			}
		case ctx.Err() != nil:
			return nil, meta.BookieInfo{}, err
		}
		pause := time.NewTimer(100*time.Millisecond + rand.N(100*time.Millisecond)) //nolint:gosec // jitter
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, meta.BookieInfo{}, ctx.Err()
		}
	}
}

// run keeps the registration current after the first one, until ctx ends (nil) or it cannot be kept.
func (r *registrar) run(ctx context.Context, lost <-chan struct{}, last meta.BookieInfo) error {
	ticker := time.NewTicker(r.interval)
	defer ticker.Stop()
	for {
		changed := r.store.StateChanged()
		if stateOf(r.store.State()) == last.State {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
			case <-ticker.C:
				if !notable(last.FreeBytes, r.store.Usage().Free, last.TotalBytes) {
					continue
				}
			case <-lost:
				r.log.Warn("registration lost with its lease, registering again")
				var err error
				if lost, last, err = r.register(ctx); err != nil {
					if ctx.Err() != nil {
						return nil
					}
					return err
				}
				continue
			}
		}
		info := r.info()
		if info.State != last.State {
			r.log.Info("state changed", slog.String("state", info.State.String()), slog.Uint64("free_bytes", info.FreeBytes))
		}
		err := r.meta.UpdateBookie(ctx, info, r.session.ID())
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			last = info
		case errors.Is(err, meta.ErrLease):
			// Lost will say so; until then there is nothing to update.
			select {
			case <-lost:
			case <-ctx.Done():
			case <-ticker.C:
			}
		default:
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
	}
}

// notable reports whether free bytes changed by 1 % of the disk.
func notable(a, b, total uint64) bool { return max(a, b)-min(a, b) > total/100 }
