package meta

import (
	"fmt"
	"sort"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/hash"
)

// FeatureLevel is the newest feature level that this program can read and write.
const FeatureLevel = 1

// DefaultBundles is the number of bundles of a new namespace.
const DefaultBundles = 16

// ClusterInfo is the cluster's own record.
type ClusterInfo struct {
	UUID         entry.UUID
	FeatureLevel uint32
	Created      time.Time
}

// BookieState says what a bookie accepts.
type BookieState uint8

// The states of a bookie.
const (
	BookieWritable BookieState = iota
	BookieReadOnly             // no new ledgers
	BookieFull                 // only recovery
)

// String returns the state's name as the CLI prints it.
func (s BookieState) String() string {
	switch s {
	case BookieWritable:
		return "WRITABLE"
	case BookieReadOnly:
		return "READ_ONLY"
	case BookieFull:
		return "FULL"
	}
	return fmt.Sprintf("BookieState(%d)", uint8(s))
}

// BookieInfo is a live bookie's registration.
type BookieInfo struct {
	ID         string
	UUID       entry.StorageUUID
	State      BookieState
	Draining   bool   // nothing new is to be placed on it; from a cache: or it is marked
	Data       string // address of the data path, host:port
	GRPC       string // address of control calls, host:port
	HTTP       string
	Zone       string // empty when unknown
	Host       string // host label
	FreeBytes  uint64
	TotalBytes uint64
	Sync       string // when it syncs, in words
	Version    string
	Started    time.Time
}

// Cookie ties a bookie id to the identity of the data on one disk, for good.
type Cookie struct {
	ID      string
	UUID    entry.StorageUUID
	Created time.Time
	// Starts is how often the bookie has started on that disk, as the disk counts. A disk that knows of fewer is an old copy.
	Starts uint64
	// Retired is set by ListCookies for identities that are gone for good.
	Retired bool
}

// BrokerInfo is a live broker's registration.
type BrokerInfo struct {
	ID      string
	URL     string // that clients use
	HTTP    string
	Peer    string // address that other brokers ping, host:port
	Version string
	Started time.Time
}

// Owner says who owns a bundle.
type Owner struct {
	Bundle BundleID
	Broker string // id
	URL    string // that clients use
	Epoch  entry.Epoch
	// Rev is the etcd revision of the owner's key.
	Rev int64
}

// Expectation is what a broker believes of a bundle's owner when it takes it. See [ExpectNone] and [ExpectOwner].
type Expectation struct {
	owner *Owner
}

// ExpectNone expects that nobody owns the bundle.
func ExpectNone() Expectation { return Expectation{} }

// ExpectOwner expects the owner o, or that o's lease has ended since and nobody took the bundle. A second
// takeover by the same suspicion fails, since the first one raised the epoch.
func ExpectOwner(o Owner) Expectation { return Expectation{owner: &o} }

// Bundle is a hash range of a namespace's topics: the unit of ownership.
type Bundle struct {
	ID          BundleID
	First, Last uint32 // both included
	// Epoch of the last takeover; 0 when it was never owned. [Store.GetNamespace] fills it in, the cache does not.
	Epoch entry.Epoch
}

// Namespace is a namespace's record.
type Namespace struct {
	Name     string // tenant/namespace
	Policies Policies
	Bundles  []Bundle // by hash, covering all 32 bits
	Deleting bool     // takes no new topics
	Created  time.Time
	Rev      int64
}

// Topic is a topic's record, one for all its partitions.
type Topic struct {
	Name       string // tenant/namespace/topic
	UUID       entry.UUID
	Partitions int  // 0: not partitioned
	Deleting   bool // takes no new messages or subscriptions
	Rev        int64
}

// Chains returns the data logs of a topic's partitions, by partition.
func (t Topic) Chains() []ChainID {
	all := make([]ChainID, max(t.Partitions, 1))
	for i := range all {
		all[i] = DataChain(t.UUID, i)
	}
	return all
}

// BundleOf returns the bundle of a topic or partition, by the hash of its full name. ns must be a record
// returned by this package, whose bundles cover every hash.
func BundleOf(ns Namespace, topicOrPartition string) Bundle {
	h := hash.Murmur3([]byte(topicOrPartition))
	i := sort.Search(len(ns.Bundles), func(i int) bool { return ns.Bundles[i].Last >= h })
	if i == len(ns.Bundles) {
		panic(fmt.Sprintf("meta: bundles of namespace %q do not cover hash %#x", ns.Name, h))
	}
	return ns.Bundles[i]
}
