package meta

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

func (s *Store) clusterKey() string   { return s.prefix + "cluster" }
func (s *Store) ledgerIDsKey() string { return s.prefix + "ledger-ids" }
func (s *Store) ledgersPrefix() string {
	return s.prefix + "ledgers/"
}

func (s *Store) ledgerKey(id entry.LedgerID) string { return s.ledgersPrefix() + compactID(uint64(id)) }

func (s *Store) holderPrefix(u entry.StorageUUID) string {
	return s.prefix + "bybookie/" + hexUUID(u) + "/"
}

func (s *Store) holderKey(u entry.StorageUUID, id entry.LedgerID) string {
	return s.holderPrefix(u) + compactID(uint64(id))
}
func (s *Store) chainKey(c ChainID) string { return s.prefix + "chains/" + string(c) }
func (s *Store) chainPagesPrefix(c ChainID) string {
	return s.prefix + "chain-pages/" + string(c) + "/"
}

func (s *Store) chainPageKey(c ChainID, page uint64) string {
	return s.chainPagesPrefix(c) + compactID(page)
}
func (s *Store) cookiesPrefix() string                 { return s.prefix + "cookies/" }
func (s *Store) cookieKey(id string) string            { return s.cookiesPrefix() + id }
func (s *Store) retiredPrefix() string                 { return s.prefix + "retired/" }
func (s *Store) retiredKey(u entry.StorageUUID) string { return s.retiredPrefix() + hexUUID(u) }
func (s *Store) bundleNumbersKey(ns string) string     { return s.prefix + "bundle-numbers/" + ns }
func (s *Store) namespaceDeletingKey(ns string) string { return s.prefix + "ns-deleting/" + ns }
func (s *Store) viewPrefix() string                    { return s.prefix + "view/" }
func (s *Store) bookieKey(u entry.StorageUUID) string {
	return s.viewPrefix() + "bookies/" + hexUUID(u)
}
func (s *Store) brokerKey(id string) string { return s.viewPrefix() + "brokers/" + id }
func (s *Store) ownerKey(b BundleID) string { return s.viewPrefix() + "owners/" + string(b) }

func (s *Store) ownersPrefix(ns string) string { return s.viewPrefix() + "owners/" + ns + "/" }

func (s *Store) epochKey(b BundleID) string { return s.viewPrefix() + "epochs/" + string(b) }

func (s *Store) epochsPrefix(ns string) string { return s.viewPrefix() + "epochs/" + ns + "/" }
func (s *Store) tenantsPrefix() string         { return s.viewPrefix() + "tenants/" }
func (s *Store) tenantKey(t string) string     { return s.tenantsPrefix() + t }
func (s *Store) namespacesPrefix(tenant string) string {
	return s.viewPrefix() + "namespaces/" + tenant
}

func (s *Store) namespaceKey(ns string) string { return s.viewPrefix() + "namespaces/" + ns }

func (s *Store) topicsPrefix(ns string) string { return s.viewPrefix() + "topics/" + ns + "/" }
func (s *Store) topicKey(name string) string   { return s.viewPrefix() + "topics/" + name }
func (s *Store) topicChainsPrefix(u entry.UUID) string {
	return s.prefix + "chains/topic/" + u.String() + "/"
}

func (s *Store) bundleChainsPrefix(ns string) string { return s.prefix + "chains/bundle/" + ns + "/" }

// ElectionKey is the key of a named election of the cluster, for package lease.
func (s *Store) ElectionKey(name string) string { return s.prefix + "elections/" + name }

// compactID writes n so that shorter is smaller and keys sort by number: the count of its hexadecimal digits
// as a letter from a, then the digits. 0x1a2 is "c1a2".
func compactID(n uint64) string {
	digits := strconv.FormatUint(n, 16)
	return string(rune('a'+len(digits)-1)) + digits
}

func parseCompactID(s string) (uint64, error) {
	if s == "" {
		return 0, fmt.Errorf("%w: no id", ErrInvalid)
	}
	n, err := strconv.ParseUint(s[1:], 16, 64)
	if err != nil || compactID(n) != s {
		return 0, fmt.Errorf("%w: %q is no id", ErrInvalid, s)
	}
	return n, nil
}

func hexUUID(u entry.UUID) string { return hex.EncodeToString(u[:]) }

// Split returns the namespace and the number of a bundle's name, or an [ErrInvalid].
func (b BundleID) Split() (namespace string, number uint32, err error) {
	at := strings.LastIndexByte(string(b), '/')
	if at < 0 {
		return "", 0, fmt.Errorf("%w bundle %q: want tenant/namespace/number", ErrInvalid, string(b))
	}
	namespace, digits := string(b)[:at], string(b)[at+1:]
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || strconv.FormatUint(n, 10) != digits {
		return "", 0, fmt.Errorf("%w bundle %q: want tenant/namespace/number", ErrInvalid, string(b))
	}
	if err := checkNamespace(namespace); err != nil {
		return "", 0, fmt.Errorf("bundle %q: %w", string(b), err)
	}
	return namespace, uint32(n), nil
}

// bundleID names bundle number of a namespace.
func bundleID(namespace string, number uint32) BundleID {
	return BundleID(namespace + "/" + strconv.FormatUint(uint64(number), 10))
}

// checkNamespace accepts a full "tenant/namespace".
func checkNamespace(ns string) error {
	if ns == "" {
		return fmt.Errorf("%w: namespace is empty", ErrInvalid)
	}
	if _, _, err := topicname.ParseNamespace(ns); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// checkTopic accepts the full name of a whole topic.
func checkTopic(name string) (topicname.Name, error) {
	n, err := topicname.Parse(name)
	if err != nil {
		return n, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if n.Partition != topicname.NoPartition {
		return n, fmt.Errorf("%w: %q names a partition, want its topic %q", ErrInvalid, name, n.Base())
	}
	if n.String() != name {
		return n, fmt.Errorf("%w: %q is not a full name, want %q", ErrInvalid, name, n)
	}
	return n, nil
}

// checkID accepts the id of a bookie or broker: like a topic's name, so that it can be part of a key.
func checkID(kind, id string) error {
	n, err := topicname.Parse(id)
	if err != nil || n.String() != topicname.DefaultTenant+"/"+topicname.DefaultNamespace+"/"+id {
		return fmt.Errorf("%w: %s id %q: want letters, digits and . _ : = -", ErrInvalid, kind, id)
	}
	return nil
}

// checkChain keeps a chain's name one of the two kinds that exist, so that no key prefix holds another.
func checkChain(c ChainID) error {
	if _, _, ok := c.data(); ok {
		return nil
	}
	rest, ok := strings.CutPrefix(string(c), "bundle/")
	if ok {
		rest, ok = strings.CutSuffix(rest, "/state")
	}
	if !ok {
		return fmt.Errorf("%w chain %q", ErrInvalid, string(c))
	}
	if _, _, err := BundleID(rest).Split(); err != nil {
		return fmt.Errorf("chain %q: %w", string(c), err)
	}
	return nil
}

// Data splits the name of a data log into topic and partition; ok is false for any other chain.
func (c ChainID) Data() (topic entry.UUID, index int, ok bool) {
	topic, n, ok := c.data()
	return topic, int(n), ok
}

// data splits the name of a data log.
func (c ChainID) data() (topic entry.UUID, index uint32, ok bool) {
	parts := strings.Split(string(c), "/")
	if len(parts) != 4 || parts[0] != "topic" || parts[3] != "data" {
		return topic, 0, false
	}
	topic, err := entry.ParseUUID(parts[1])
	if err != nil {
		return topic, 0, false
	}
	n, err := strconv.ParseUint(parts[2], 10, 31)
	if err != nil || DataChain(topic, int(n)) != c {
		return topic, 0, false
	}
	return topic, uint32(n), true
}
