package bookieclient

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Control carries control calls to bookies, named by storage identity: what no frame of the data path asks for. It keeps one
// connection per bookie that was asked. It is safe for concurrent use.
type Control struct {
	resolve Resolver

	mu     sync.Mutex
	closed bool
	conns  map[entry.StorageUUID]controlConn
}

type controlConn struct {
	addr string
	conn *grpc.ClientConn
}

// Listing is a bookie's word of which entries of a range it has.
type Listing struct {
	// Known: it has something of the ledger. Limbo: it may have lost entries, and does not know which.
	Known, Limbo bool
	// Bits has a bit for each entry of the range, the lowest of the first byte for the first: durable, and not known to be unreadable.
	Bits []byte
}

// Damage is what a bookie found unreadable of a ledger.
type Damage struct {
	Ledger entry.LedgerID
	// Entries names them, for people and for comparison with what was said before.
	Entries string
	// Limbo: it may have lost entries, and does not know which.
	Limbo bool
}

// MaxListed is how many entries one ListEntries may ask for.
const MaxListed = 1 << 20

// NewControl returns a Control that is connected to nobody yet; resolve tells where a bookie takes control calls.
func NewControl(resolve Resolver) *Control {
	return &Control{resolve: resolve, conns: map[entry.StorageUUID]controlConn{}}
}

// Close ends all connections, and what is under way over them.
func (c *Control) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for u, k := range c.conns {
		k.conn.Close()
		delete(c.conns, u)
	}
}

func (c *Control) client(u entry.StorageUUID) (bookiev1.BookieClient, error) {
	addr, ok := c.resolve(u)
	switch {
	case !ok:
		return nil, errors.New("it is not registered")
	case addr == "":
		return nil, errors.New("it takes no control calls: start it with --grpc-listen")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.conns[u]
	switch {
	case c.closed:
		return nil, errors.New("this process is ending")
	case k.conn != nil && k.addr == addr:
		return bookiev1.NewBookieClient(k.conn), nil
	case k.conn != nil:
		k.conn.Close()
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	c.conns[u] = controlConn{addr: addr, conn: conn}
	return bookiev1.NewBookieClient(conn), nil
}

// ListEntries lists which of the entries first … last, at most [MaxListed], are durable at u and not known to be unreadable.
func (c *Control) ListEntries(ctx context.Context, u entry.StorageUUID, l entry.LedgerID, first, last entry.EntryID) (Listing, error) {
	k, err := c.client(u)
	if err != nil {
		return Listing{}, err
	}
	reply, err := k.ListEntries(ctx, &bookiev1.ListEntriesRequest{Ledger: uint64(l), First: int64(first), Last: int64(last), StorageUuid: u.String()})
	if err != nil {
		return Listing{}, err //nolint:wrapcheck // the bookie says what it could not do
	}
	return Listing{Known: reply.GetKnown(), Limbo: reply.GetLimbo(), Bits: reply.GetBitmap()}, nil
}

// ListDamage lists what u found unreadable.
func (c *Control) ListDamage(ctx context.Context, u entry.StorageUUID) ([]Damage, error) {
	k, err := c.client(u)
	if err != nil {
		return nil, err
	}
	reply, err := k.ListDamage(ctx, &bookiev1.ListDamageRequest{StorageUuid: u.String()})
	if err != nil {
		return nil, err //nolint:wrapcheck // likewise
	}
	all := make([]Damage, 0, len(reply.GetLedgers()))
	for _, d := range reply.GetLedgers() {
		var text strings.Builder
		for _, r := range d.GetEntries() {
			fmt.Fprintf(&text, "%d-%d ", r.GetFirst(), r.GetLast())
		}
		all = append(all, Damage{Ledger: entry.LedgerID(d.GetLedger()), Entries: text.String(), Limbo: d.GetLimbo()})
	}
	return all, nil
}

// EndLimbo says that u has all of a ledger again. The caller has seen it list all of it.
func (c *Control) EndLimbo(ctx context.Context, u entry.StorageUUID, l entry.LedgerID) error {
	k, err := c.client(u)
	if err != nil {
		return err
	}
	_, err = k.EndLimbo(ctx, &bookiev1.EndLimboRequest{Ledgers: []uint64{uint64(l)}})
	return err //nolint:wrapcheck // likewise
}
