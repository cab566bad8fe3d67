package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Registrar keeps what the cluster knows of a live bookie: under the session's lease, renewed when the store's state
// changes, now and then for the free bytes, and anew under each new lease or when it was removed.
type Registrar struct {
	Meta    *meta.Store
	Session *lease.Session
	Store   *ledgerstore.Store
	// Base is what does not change of the registration; Interval the time between two looks at what does.
	Base     meta.BookieInfo
	Interval time.Duration
	// Holder asks the address of another registration of the storage who answers there.
	Holder func(ctx context.Context, addr string) Presence
	Sched  sched.Scheduler
	Log    *slog.Logger
}

// holderTimeout is how long a process that may answer for the same storage has for its word.
const holderTimeout = time.Second

// info is the registration as it should be now.
func (r *Registrar) info() meta.BookieInfo {
	b, usage := r.Base, r.Store.Usage()
	b.FreeBytes, b.TotalBytes = usage.Free, usage.Total
	b.State = stateOf(r.Store.State())
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

// Registration is one that was made.
type Registration struct {
	grant *lease.Grant
	info  meta.BookieInfo
}

// Register registers under the lease of now, until it is done or ctx ends. An error that no retry can mend is
// returned at once: the identity was retired, or is another's, or another process that lives answers for it.
func (r *Registrar) Register(ctx context.Context) (Registration, error) {
	var gone meta.BookieRegisteredError // a registration whose process is
	waiting := false
	for {
		grant, err := r.Session.Wait(ctx)
		if err != nil {
			return Registration{}, fmt.Errorf("wait for a lease: %w", err)
		}
		info := r.info()
		err = r.Meta.RegisterBookie(ctx, info, grant.ID, gone.Lease)
		var taken *meta.BookieRegisteredError
		switch {
		case err == nil:
			return Registration{grant: grant, info: info}, nil
		case errors.As(err, &taken):
			switch r.Holder(ctx, taken.Info.Data) {
			case PresenceGone:
				gone = *taken
				continue
			case PresenceAlive:
				return Registration{}, &IdentityError{
					Problem: fmt.Sprintf("another process answers for storage %s of bookie %q at %s", r.Base.UUID, r.Base.ID, taken.Info.Data),
					Advice: "stop one of the two; if one data directory is a copy, it is the copy that must go: " +
						"empty it and start it under another --bookie-id",
				}
			case PresenceUnknown:
				if !waiting {
					waiting = true
					r.Log.Warn("this storage is registered by a process that does not answer: waiting for its lease to end",
						slog.String("addr", taken.Info.Data))
				}
			}
		case errors.Is(err, meta.ErrRetired), errors.Is(err, meta.ErrConflict), errors.Is(err, meta.ErrNotFound):
			return Registration{}, &IdentityError{
				Problem: fmt.Sprintf("storage %s cannot be registered: %v", r.Base.UUID, err),
				Advice:  "the identity of this disk is not valid any more; see the bookie's cookie in etcd",
			}
		case ctx.Err() != nil:
			return Registration{}, err
		}
		if err := sched.Sleep(ctx, r.Sched, 100*time.Millisecond+sched.N(r.Sched, 100*time.Millisecond)); err != nil {
			return Registration{}, err
		}
	}
}

// Presence is what became of the process that a registration names.
type Presence uint8

// The kinds of presence.
const (
	// PresenceUnknown: it may live. Its lease decides.
	PresenceUnknown Presence = iota
	// PresenceGone: nobody is there any more, or somebody else is.
	PresenceGone
	// PresenceAlive: it answers for the storage.
	PresenceAlive
)

// presence asks an address who answers there. A bookie that is started again within its lease's TTL meets its own
// registration, and must not wait for that to end. own is this process's address.
func presence(ctx context.Context, me Identity, own, addr string) Presence {
	if addr == own {
		return PresenceGone // the port is this process's now
	}
	ctx, cancel := context.WithTimeout(ctx, holderTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return PresenceGone
	}
	if err != nil {
		return PresenceUnknown
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	hello, err := bookiewire.AppendHello(nil, bookiewire.Hello{
		MinVersion: bookiewire.Version, MaxVersion: bookiewire.Version, Use: bookiewire.UseRequests, Cluster: me.Cluster, Storage: me.Storage,
	})
	if err != nil {
		return PresenceUnknown
	}
	if _, err := conn.Write(hello); err != nil {
		return PresenceUnknown
	}
	w, err := bookiewire.ReadWelcome(conn)
	switch {
	case errors.Is(err, bookiewire.ErrMagic), err == nil && (w.Storage != me.Storage || w.Cluster != me.Cluster):
		return PresenceGone // something else has the port
	case err != nil:
		return PresenceUnknown
	}
	return PresenceAlive
}

// Run keeps the registration current after the first one, until ctx ends (nil) or it cannot be kept.
func (r *Registrar) Run(ctx context.Context, reg Registration) error {
	for ctx.Err() == nil {
		changed := r.Store.StateChanged()
		there := true // as far as is known
		if stateOf(r.Store.State()) == reg.info.State {
			tick, stop := sched.After(r.Sched, r.Interval)
			i, _ := r.Sched.Wait(ctx, sched.Channels{changed, reg.grant.Lost(), tick})
			stop()
			switch i {
			case -1:
				return nil
			case 1:
				there = false
			case 2:
				there = r.isThere(ctx, reg)
				if there && !notable(reg.info.FreeBytes, r.Store.Usage().Free, reg.info.TotalBytes) {
					continue
				}
			}
		}
		if there {
			info := r.info()
			if info.State != reg.info.State {
				r.Log.Info("state changed", slog.String("state", info.State.String()), slog.Uint64("free_bytes", info.FreeBytes))
			}
			err := r.Meta.UpdateBookie(ctx, info, reg.grant.ID)
			if err == nil {
				reg.info = info
				continue
			}
			if !errors.Is(err, meta.ErrLease) {
				_ = sched.Sleep(ctx, r.Sched, r.Interval)
				continue
			}
		}
		if ctx.Err() != nil {
			break
		}
		r.Log.Warn("registration is gone, registering again")
		var err error
		if reg, err = r.Register(ctx); err != nil {
			if ctx.Err() != nil {
				break
			}
			return err
		}
	}
	return nil //nolint:nilerr // ctx has ended
}

// isThere looks whether the registration is there, under the lease it was made with. In doubt it is.
func (r *Registrar) isThere(ctx context.Context, reg Registration) bool {
	ctx, cancel := r.Sched.WithTimeout(ctx, r.Interval)
	defer cancel()
	held, err := r.Meta.BookieLease(ctx, r.Base.UUID)
	if errors.Is(err, meta.ErrNotFound) {
		return false
	}
	return err != nil || held == reg.grant.ID
}

// notable reports whether free bytes changed by 1 % of the disk.
func notable(a, b, total uint64) bool { return max(a, b)-min(a, b) > total/100 }
