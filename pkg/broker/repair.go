package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/repair"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// What repair needs of a broker: bookies' control calls, and owners that let go of ledgers.

func (b *Broker) newRepair() *repair.Runner {
	b.control = bookieclient.NewControl(func(u entry.StorageUUID) (string, bool) {
		k, ok := b.deps.Cache.Bookie(u)
		return k.GRPC, ok
	})
	cfg := b.cfg.Repair
	cfg.Worker = b.cfg.Self.ID
	return repair.New(cfg, repair.Env{
		Meta: b.deps.Meta, Topology: b.deps.Cache, Session: b.deps.Session,
		Ledger:  ledger.Env{Bookies: b.deps.Bookies, Metadata: b.deps.Meta, Log: b.log, Config: b.cfg.Ledger},
		Control: b.control, Owners: owners{b: b}, Log: b.log, Registerer: b.deps.Registerer,
	})
}

func (b *Broker) runRepair(ctx context.Context) {
	defer b.control.Close()
	b.repair.Run(ctx)
}

// owners is repair.Owners.
type owners struct{ b *Broker }

// Release has the owner of a ledger close it: this broker, or the one that lookups name.
func (o owners) Release(ctx context.Context, l meta.Ledger) error {
	ctx, cancel := context.WithTimeout(ctx, releasePatience)
	defer cancel()
	err := o.b.release(ctx, l)
	var moved *movedError
	if !errors.As(err, &moved) || moved.url == "" {
		return err
	}
	brokers := o.b.deps.Cache.Brokers()
	i := slices.IndexFunc(brokers, func(k meta.BrokerInfo) bool { return k.URL == moved.url })
	if i < 0 {
		return err
	}
	conn, err := dialPeer(brokers[i].Peer)
	if err != nil {
		return fmt.Errorf("dial %s: %w", moved.url, err)
	}
	defer conn.Close()
	_, err = brokerv1.NewAdminClient(conn).ReleaseLedger(ctx, &brokerv1.ReleaseLedgerRequest{Id: uint64(l.ID)})
	return err //nolint:wrapcheck // the broker says what it could not do
}

// releasePatience bounds how long an owner is waited for.
const releasePatience = 15 * time.Second

// release has a ledger closed that belongs to a bundle which is, or should be, served here. Whatever is appended later goes to another.
func (b *Broker) release(ctx context.Context, l meta.Ledger) error {
	record, err := b.deps.Meta.GetChain(ctx, l.Chain)
	if err != nil {
		return fmt.Errorf("release ledger %d: %w", l.ID, err)
	}
	u, err := b.bundleByID(ctx, record.Bundle, string(l.Chain))
	if err != nil {
		return err
	}
	if l.Chain == meta.StateChain(record.Bundle) {
		return u.releaseState(ctx, l.ID)
	}
	r, err := b.ofChain(l.Chain, record.Bundle)
	if err != nil {
		return fmt.Errorf("release ledger %d: %w", l.ID, err)
	}
	t, err := u.open(ctx, r, false) // which recovers what a former owner left open
	if err != nil {
		return err
	}
	if isEmpty(t.log.Chain(), l.ID) { // it does not roll
		t.close(ctx, b.cfg.Self.URL)
		return ctx.Err() //nolint:wrapcheck // as a context says it
	}
	return t.log.Chain().RollAndWait(ctx, l.ID) //nolint:wrapcheck // it names the chain
}

// nobody is an owner in no state log: forgetting it is an entry that says nothing.
const nobody = "nobody"

// releaseState is release for the bundle's own log.
func (u *bundle) releaseState(ctx context.Context, id entry.LedgerID) error {
	log, err := u.stateLog(ctx)
	if err != nil {
		return err
	}
	if isEmpty(log.Chain(), id) { // nor does this, and nothing else of the bundle may be written for long
		said := make(chan error, 1)
		if err := log.DeleteOwner(ctx, nobody, func(err error) { said <- err }); err != nil {
			return err //nolint:wrapcheck // it names the log
		}
		select {
		case err := <-said:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err() //nolint:wrapcheck // as a context says it
		}
	}
	return log.Chain().RollAndWait(ctx, id) //nolint:wrapcheck // it names the chain
}

// isEmpty reports whether a ledger is the chain's open one, and nothing was appended to it.
func isEmpty(c *chain.Chain, id entry.LedgerID) bool {
	runs := c.Runs()
	if len(runs) == 0 {
		return false
	}
	last := runs[len(runs)-1]
	return last.Ledger == id && !last.Closed && last.Bytes == 0
}

// ofChain finds the topic or partition whose data log a chain is.
func (b *Broker) ofChain(id meta.ChainID, bundle meta.BundleID) (resolved, error) {
	topic, index, ok := id.Data()
	namespace, _, err := bundle.Split()
	if !ok || err != nil {
		return resolved{}, fmt.Errorf("chain %s of bundle %s is of no topic", id, bundle)
	}
	for _, record := range b.deps.Cache.Topics(namespace) {
		if record.UUID != topic {
			continue
		}
		name, err := topicname.Parse(record.Name)
		if err != nil {
			return resolved{}, fmt.Errorf("parse the name of a stored topic: %w", err)
		}
		if record.Partitions > 0 {
			name = name.WithPartition(index)
		}
		return resolved{name: name, record: record}, nil
	}
	return resolved{}, fmt.Errorf("the topic of chain %s: %w", id, meta.ErrNotFound)
}
