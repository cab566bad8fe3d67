package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// registrar keeps what the cluster knows of a live bookie: under the session's lease, renewed when the store's state
// changes, now and then for the free bytes, and anew under each new lease or when it was removed.
type registrar struct {
	meta     *meta.Store
	cluster  entry.UUID
	session  *lease.Session
	store    *ledgerstore.Store
	base     meta.BookieInfo // what does not change
	interval time.Duration
	log      *slog.Logger
}

// holderTimeout is how long a process that may answer for the same storage has for its word.
const holderTimeout = time.Second

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

// registration is one that was made.
type registration struct {
	grant *lease.Grant
	info  meta.BookieInfo
}

// register registers under the lease of now, until it is done or ctx ends. An error that no retry can mend is
// returned at once: the identity was retired, or is another's, or another process that lives answers for it.
func (r *registrar) register(ctx context.Context) (registration, error) {
	var gone meta.BookieRegisteredError // a registration whose process is
	waiting := false
	for {
		grant, err := r.session.Wait(ctx)
		if err != nil {
			return registration{}, fmt.Errorf("wait for a lease: %w", err)
		}
		info := r.info()
		err = r.meta.RegisterBookie(ctx, info, grant.ID, gone.Lease)
		var taken *meta.BookieRegisteredError
		switch {
		case err == nil:
			return registration{grant: grant, info: info}, nil
		case errors.As(err, &taken):
			switch r.holder(ctx, taken.Info.Data) {
			case holderGone:
				gone = *taken
				continue
			case holderLives:
				return registration{}, &IdentityError{
					Problem: fmt.Sprintf("another process answers for storage %s of bookie %q at %s", r.base.UUID, r.base.ID, taken.Info.Data),
					Advice: "stop one of the two; if one data directory is a copy, it is the copy that must go: " +
						"empty it and start it under another --bookie-id",
				}
			case holderSilent:
				if !waiting {
					waiting = true
					r.log.Warn("this storage is registered by a process that does not answer: waiting for its lease to end",
						slog.String("addr", taken.Info.Data))
				}
			}
		case errors.Is(err, meta.ErrRetired), errors.Is(err, meta.ErrConflict), errors.Is(err, meta.ErrNotFound):
			return registration{}, &IdentityError{
				Problem: fmt.Sprintf("storage %s cannot be registered: %v", r.base.UUID, err),
				Advice:  "the identity of this disk is not valid any more; see the bookie's cookie in etcd",
			}
		case ctx.Err() != nil:
			return registration{}, err
		}
		pause := time.NewTimer(100*time.Millisecond + rand.N(100*time.Millisecond)) //nolint:gosec // jitter
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return registration{}, ctx.Err()
		}
	}
}

// holderState is what became of the process that an earlier registration names.
type holderState uint8

const (
	holderSilent holderState = iota // it may live: its lease decides
	holderGone
	holderLives
)

// holder asks the address of a registration who answers there. A bookie that is started again within its lease's TTL
// meets its own registration, and must not wait for that to end.
func (r *registrar) holder(ctx context.Context, addr string) holderState {
	if addr == r.base.Data {
		return holderGone // the port is this process's now
	}
	ctx, cancel := context.WithTimeout(ctx, holderTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return holderGone
	}
	if err != nil {
		return holderSilent
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	hello, err := bookiewire.AppendHello(nil, bookiewire.Hello{
		MinVersion: bookiewire.Version, MaxVersion: bookiewire.Version, Use: bookiewire.UseRequests, Cluster: r.cluster, Storage: r.base.UUID,
	})
	if err != nil {
		return holderSilent
	}
	if _, err := conn.Write(hello); err != nil {
		return holderSilent
	}
	w, err := bookiewire.ReadWelcome(conn)
	switch {
	case errors.Is(err, bookiewire.ErrMagic), err == nil && (w.Storage != r.base.UUID || w.Cluster != r.cluster):
		return holderGone // something else has the port
	case err != nil:
		return holderSilent
	}
	return holderLives
}

// run keeps the registration current after the first one, until ctx ends (nil) or it cannot be kept.
func (r *registrar) run(ctx context.Context, reg registration) error {
	ticker := time.NewTicker(r.interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		changed := r.store.StateChanged()
		there := true // as far as is known
		if stateOf(r.store.State()) == reg.info.State {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
			case <-reg.grant.Lost():
				there = false
			case <-ticker.C:
				there = r.isThere(ctx, reg)
				if there && !notable(reg.info.FreeBytes, r.store.Usage().Free, reg.info.TotalBytes) {
					continue
				}
			}
		}
		if there {
			info := r.info()
			if info.State != reg.info.State {
				r.log.Info("state changed", slog.String("state", info.State.String()), slog.Uint64("free_bytes", info.FreeBytes))
			}
			err := r.meta.UpdateBookie(ctx, info, reg.grant.ID)
			if err == nil {
				reg.info = info
				continue
			}
			if !errors.Is(err, meta.ErrLease) {
				select {
				case <-ticker.C:
				case <-ctx.Done():
				}
				continue
			}
		}
		if ctx.Err() != nil {
			break
		}
		r.log.Warn("registration is gone, registering again")
		var err error
		if reg, err = r.register(ctx); err != nil {
			if ctx.Err() != nil {
				break
			}
			return err
		}
	}
	return nil
}

// isThere looks whether the registration is there, under the lease it was made with. In doubt it is.
func (r *registrar) isThere(ctx context.Context, reg registration) bool {
	ctx, cancel := context.WithTimeout(ctx, r.interval)
	defer cancel()
	held, err := r.meta.BookieLease(ctx, r.base.UUID)
	if errors.Is(err, meta.ErrNotFound) {
		return false
	}
	return err != nil || held == reg.grant.ID
}

// notable reports whether free bytes changed by 1 % of the disk.
func notable(a, b, total uint64) bool { return max(a, b)-min(a, b) > total/100 }
