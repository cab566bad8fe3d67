package meta

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Watch follows the changes of the keys that begin with prefix, those of revision from first: f is called with each
// response, one after the other. It returns why that ended: etcd's error, or that of ctx.
type Watch func(ctx context.Context, prefix string, from int64, f func(clientv3.WatchResponse)) error

// Kind is a kind of record that a [Cache] keeps.
type Kind uint8

// The kinds of a cache.
const (
	KindBookies Kind = iota // and their marks
	KindBrokers
	KindOwners // owners and epochs of bundles
	KindNamespaces
	KindTopics
	KindOperations
	kinds
)

// Cache keeps the records that lookups need, by one watch over all of them, so that what it answers is always
// one revision of etcd, a little late: for lookups, never for safety. It holds every topic's record, some 200
// bytes each; that is its only growth.
//
// After a lost connection or an election the watch goes on where it was; when etcd has compacted that away,
// the cache reads everything again and keeps answering from what it has until then. One watch per kind would
// be simpler to filter but shows a topic before its namespace; copying maps per change for lock-free lookups
// would cost a copy of every topic for each one created.
//
// It is safe for concurrent use.
type Cache struct {
	store   *Store
	watch   Watch
	sched   sched.Scheduler
	cancel  context.CancelFunc
	run     *sched.Group
	synced  chan struct{} // closed after the first full read
	metrics *watchMetrics

	// resyncs counts full reads.
	resyncs atomic.Int64

	mu      sync.RWMutex
	rev     int64
	revWait chan struct{} // closed and replaced when rev grows
	changed [kinds]chan struct{}
	state   cacheState
}

// cacheState is everything the cache knows, at one revision.
type cacheState struct {
	bookies    map[entry.StorageUUID]BookieInfo
	brokers    map[string]BrokerInfo
	owners     map[BundleID]Owner
	epochs     map[BundleID]entry.Epoch
	tenants    map[string]bool
	namespaces map[string]Namespace
	topics     map[string]Topic
	marks      map[entry.StorageUUID]Mark
	operations map[string]Operation
}

func newCacheState() cacheState {
	return cacheState{
		bookies:    make(map[entry.StorageUUID]BookieInfo),
		brokers:    make(map[string]BrokerInfo),
		owners:     make(map[BundleID]Owner),
		epochs:     make(map[BundleID]entry.Epoch),
		tenants:    make(map[string]bool),
		namespaces: make(map[string]Namespace),
		topics:     make(map[string]Topic),
		marks:      make(map[entry.StorageUUID]Mark),
		operations: make(map[string]Operation),
	}
}

// NewCache starts a cache that lives until ctx ends or Close is called. It is empty until [Cache.Synced].
func NewCache(ctx context.Context, s *Store) *Cache {
	return NewCacheOver(ctx, s, s.watch, sched.Real)
}

// NewCacheOver is NewCache for a store made by [NewOver].
func NewCacheOver(ctx context.Context, s *Store, watch Watch, sc sched.Scheduler) *Cache {
	ctx, cancel := context.WithCancel(ctx)
	c := &Cache{
		store: s, watch: watch, sched: sc, cancel: cancel, run: sched.NewGroup(sc), synced: make(chan struct{}),
		revWait: make(chan struct{}), state: newCacheState(), metrics: newWatchMetrics(),
	}
	for k := range c.changed {
		c.changed[k] = make(chan struct{})
	}
	c.run.Go(func() { c.keep(ctx) })
	return c
}

// watch is a [Watch] over the store's client.
func (s *Store) watch(ctx context.Context, prefix string, from int64, f func(clientv3.WatchResponse)) error {
	// A member cut off from its leader ends the watch rather than fall silent.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	for resp := range s.cli.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(from), clientv3.WithProgressNotify()) {
		if err := resp.Err(); err != nil {
			return err //nolint:wrapcheck // as etcd says it
		}
		f(resp)
	}
	return ctx.Err() //nolint:wrapcheck // as a context says it
}

// Close stops the cache and waits for its goroutine. What it knew stays readable.
func (c *Cache) Close() {
	c.cancel()
	c.run.Wait()
}

// Synced waits for the first full read, or returns the context's error.
func (c *Cache) Synced(ctx context.Context) error {
	if _, err := c.sched.Wait(ctx, sched.Channels{c.synced}); err != nil {
		return fmt.Errorf("wait for metadata cache: %w", err)
	}
	return nil
}

// Revision is the etcd revision that the cache has seen, at least.
func (c *Cache) Revision() int64 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.rev
}

// WaitRevision waits until the cache has seen revision rev: that of a record just written, for instance.
func (c *Cache) WaitRevision(ctx context.Context, rev int64) error {
	begin := time.Now()
	for {
		c.mu.RLock()
		have, wait := c.rev, c.revWait
		c.mu.RUnlock()
		if have >= rev {
			c.metrics.wait.Observe(time.Since(begin).Seconds())
			return nil
		}
		if _, err := c.sched.Wait(ctx, sched.Channels{wait}); err != nil {
			return fmt.Errorf("wait for revision %d in metadata cache, at %d: %w", rev, have, err)
		}
	}
}

// Changed returns a channel that is closed when a record of that kind changes after the call. Ask for it
// first, look second, wait third: then no change is missed.
func (c *Cache) Changed(k Kind) <-chan struct{} {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.changed[k]
}

// Bookies returns the live bookies by storage identity. Those that are marked are draining. The slice is the caller's.
func (c *Cache) Bookies() []BookieInfo {
	c.mu.RLock()
	all := make([]BookieInfo, 0, len(c.state.bookies))
	for u := range c.state.bookies {
		b, _ := c.state.bookie(u)
		all = append(all, b)
	}
	c.mu.RUnlock()
	slices.SortFunc(all, func(a, b BookieInfo) int { return slices.Compare(a.UUID[:], b.UUID[:]) })
	return all
}

// Bookie returns the live bookie with that storage identity. One that is marked is draining.
func (c *Cache) Bookie(u entry.StorageUUID) (BookieInfo, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.bookie(u)
}

func (st *cacheState) bookie(u entry.StorageUUID) (BookieInfo, bool) {
	b, ok := st.bookies[u]
	if _, marked := st.marks[u]; marked {
		b.Draining = true
	}
	return b, ok
}

// Mark returns the mark of a storage identity, whether its bookie lives or not.
func (c *Cache) Mark(u entry.StorageUUID) (Mark, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	m, ok := c.state.marks[u]
	return m, ok
}

// Marks returns all marks by storage identity. The slice is the caller's.
func (c *Cache) Marks() []Mark {
	c.mu.RLock()
	all := slices.Collect(maps.Values(c.state.marks))
	c.mu.RUnlock()
	slices.SortFunc(all, func(a, b Mark) int { return slices.Compare(a.UUID[:], b.UUID[:]) })
	return all
}

// Operation returns an operation by its id. Its blocks are shared: read only.
func (c *Cache) Operation(id string) (Operation, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	o, ok := c.state.operations[id]
	return o, ok
}

// Operations returns all operations, oldest first. Their blocks are shared: read only.
func (c *Cache) Operations() []Operation {
	c.mu.RLock()
	all := slices.Collect(maps.Values(c.state.operations))
	c.mu.RUnlock()
	sortOperations(all)
	return all
}

// Brokers returns the live brokers by id. The slice is the caller's.
func (c *Cache) Brokers() []BrokerInfo {
	c.mu.RLock()
	all := slices.Collect(maps.Values(c.state.brokers))
	c.mu.RUnlock()
	slices.SortFunc(all, func(a, b BrokerInfo) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Broker returns the live broker with that id.
func (c *Cache) Broker(id string) (BrokerInfo, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, ok := c.state.brokers[id]
	return b, ok
}

// Owner returns who owns a bundle; false when nobody does.
func (c *Cache) Owner(b BundleID) (Owner, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	o, ok := c.state.owners[b]
	return o, ok
}

// Owners returns all owned bundles. The map is the caller's.
func (c *Cache) Owners() map[BundleID]Owner {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return maps.Clone(c.state.owners)
}

// Epoch returns a bundle's epoch; 0 for one that was never owned.
func (c *Cache) Epoch(b BundleID) entry.Epoch {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.epochs[b]
}

// Tenant reports whether a tenant exists.
func (c *Cache) Tenant(name string) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.state.tenants[name]
}

// Namespace returns a namespace, without epochs. Its slices are shared: read only.
func (c *Cache) Namespace(name string) (Namespace, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	ns, ok := c.state.namespaces[name]
	return ns, ok
}

// Namespaces returns all namespaces by name. Their slices are shared: read only.
func (c *Cache) Namespaces() []Namespace {
	c.mu.RLock()
	all := slices.Collect(maps.Values(c.state.namespaces))
	c.mu.RUnlock()
	slices.SortFunc(all, func(a, b Namespace) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Topic returns a topic by its full name.
func (c *Cache) Topic(name string) (Topic, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	t, ok := c.state.topics[name]
	return t, ok
}

// Topics returns a namespace's topics by name.
func (c *Cache) Topics(namespace string) []Topic {
	prefix := namespace + "/"
	var all []Topic
	c.mu.RLock()
	for name, t := range c.state.topics {
		if strings.HasPrefix(name, prefix) {
			all = append(all, t)
		}
	}
	c.mu.RUnlock()
	slices.SortFunc(all, func(a, b Topic) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// DeletingTopics returns the topics that are being deleted, in any order.
func (c *Cache) DeletingTopics() []Topic {
	var all []Topic
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, t := range c.state.topics {
		if t.Deleting {
			all = append(all, t)
		}
	}
	return all
}

// keep reads everything and follows it until ctx ends.
func (c *Cache) keep(ctx context.Context) {
	wait := newBackoff()
	for full := true; ctx.Err() == nil; {
		if full {
			if err := c.load(ctx); err != nil {
				// Only a refusal or the end of ctx gets here; a refusal is worth another try, later.
				if ctx.Err() == nil {
					c.store.log.Warn("metadata cache can't read, trying again", "error", err)
					c.store.sleep(ctx, wait.grow())
				}
				continue
			}
			wait = newBackoff()
		}
		err := c.watch(ctx, c.store.viewPrefix(), c.Revision()+1, c.follow)
		if ctx.Err() == nil {
			c.metrics.restarts.Inc()
		}
		if full = errors.Is(err, rpctypes.ErrCompacted); !full && ctx.Err() == nil {
			c.store.log.Debug("metadata watch ended, going on", "error", err)
			c.store.sleep(ctx, wait.grow())
		}
	}
}

// load reads everything at one revision and puts it in place of what was known.
func (c *Cache) load(ctx context.Context) error {
	const page = 5000
	prefix := c.store.viewPrefix()
	end := clientv3.GetPrefixRangeEnd(prefix)
	next := newCacheState()
	var rev int64
	for from := prefix; ; {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(page)}
		if rev != 0 {
			opts = append(opts, clientv3.WithRev(rev))
		}
		resp, err := c.store.read(ctx, "read metadata view", clientv3.OpGet(from, opts...))
		if err != nil {
			return err
		}
		if rev == 0 {
			rev = resp.Header.Revision
		}
		got := resp.Responses[0].GetResponseRange()
		for _, kv := range got.Kvs {
			c.apply(&next, kv, false)
		}
		if !got.More {
			break
		}
		from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
	}
	c.mu.Lock()
	if rev < c.rev {
		c.store.log.Error("etcd's revision fell: it was restored from an older snapshot", "seen", c.rev, "now", rev)
	}
	c.state = next
	wake := c.advance(rev, true)
	for k := range c.changed {
		wake = append(wake, c.replaceChanged(Kind(k)))
	}
	c.metrics.resyncs.Inc()
	first := c.resyncs.Add(1) == 1 // before anybody is told
	c.mu.Unlock()
	closeAll(wake)
	if first {
		close(c.synced)
	}
	return nil
}

// follow applies the changes of one response: all changes of a revision at once.
func (c *Cache) follow(resp clientv3.WatchResponse) {
	c.metrics.events.Add(float64(len(resp.Events)))
	var touched [kinds]bool
	c.mu.Lock()
	for _, e := range resp.Events {
		if k, ok := c.apply(&c.state, e.Kv, e.Type == clientv3.EventTypeDelete); ok {
			touched[k] = true
		}
	}
	var wake []chan struct{}
	if n := len(resp.Events); n > 0 {
		// A watch that catches up is told the newest revision with each of its batches: only the last event
		// tells how far this one reaches.
		wake = c.advance(resp.Events[n-1].Kv.ModRevision, false)
	} else if resp.IsProgressNotify() {
		wake = c.advance(resp.Header.Revision, false)
	}
	for k := range touched {
		if touched[k] {
			wake = append(wake, c.replaceChanged(Kind(k)))
		}
	}
	c.mu.Unlock()
	closeAll(wake)
}

// advance notes the revision reached, which falls only when everything was read anew.
func (c *Cache) advance(rev int64, anew bool) []chan struct{} {
	if rev <= c.rev && !anew {
		return nil
	}
	c.rev = rev
	old := c.revWait
	c.revWait = make(chan struct{})
	return []chan struct{}{old}
}

func (c *Cache) replaceChanged(k Kind) chan struct{} {
	old := c.changed[k]
	c.changed[k] = make(chan struct{})
	return old
}

func closeAll(all []chan struct{}) {
	for _, ch := range all {
		close(ch)
	}
}

// apply brings st up to one record. A damaged record is logged and what was known of it dropped: a lookup then
// finds nothing, and whoever reads the record itself gets the typed error.
func (c *Cache) apply(st *cacheState, kv *mvccpb.KeyValue, deleted bool) (Kind, bool) {
	k, err := st.apply(strings.TrimPrefix(string(kv.Key), c.store.viewPrefix()), kv, deleted)
	if err != nil {
		c.store.log.Error("metadata record is damaged", "error", err)
	}
	return k, k < kinds
}

func (st *cacheState) apply(rest string, kv *mvccpb.KeyValue, deleted bool) (Kind, error) {
	key := string(kv.Key)
	kind, name, _ := strings.Cut(rest, "/")
	switch kind {
	case "bookies":
		u, err := entry.ParseUUID(name)
		if err != nil {
			return KindBookies, &CorruptRecordError{Key: key, Err: err}
		}
		return KindBookies, update(st.bookies, u, deleted, func() (BookieInfo, error) { return decodeBookie(key, kv.Value) })
	case "brokers":
		return KindBrokers, update(st.brokers, name, deleted, func() (BrokerInfo, error) { return decodeBroker(key, kv.Value) })
	case "owners":
		return KindOwners, update(st.owners, BundleID(name), deleted, func() (Owner, error) {
			o, _, err := decodeOwner(key, BundleID(name), kv.Value, kv.ModRevision)
			return o, err
		})
	case "epochs":
		return KindOwners, update(st.epochs, BundleID(name), deleted, func() (entry.Epoch, error) { return decodeEpoch(key, kv.Value) })
	case "tenants":
		return KindNamespaces, update(st.tenants, name, deleted, func() (bool, error) { return true, nil })
	case "namespaces":
		return KindNamespaces, update(st.namespaces, name, deleted, func() (Namespace, error) {
			ns, _, err := decodeNamespace(key, name, kv.Value, kv.ModRevision)
			return ns, err
		})
	case "topics":
		return KindTopics, update(st.topics, name, deleted, func() (Topic, error) {
			return decodeTopic(key, name, kv.Value, kv.ModRevision)
		})
	case "marks":
		u, err := entry.ParseUUID(name)
		if err != nil {
			return KindBookies, &CorruptRecordError{Key: key, Err: err}
		}
		return KindBookies, update(st.marks, u, deleted, func() (Mark, error) {
			m, _, err := decodeMark(kv)
			return m, err
		})
	case "operations":
		return KindOperations, update(st.operations, name, deleted, func() (Operation, error) {
			o, _, err := decodeOperation(kv)
			return o, err
		})
	}
	return kinds, nil // of a newer version
}

func update[K comparable, V any](m map[K]V, k K, deleted bool, decode func() (V, error)) error {
	if deleted {
		delete(m, k)
		return nil
	}
	v, err := decode()
	if err != nil {
		delete(m, k)
		return err
	}
	m[k] = v
	return nil
}
