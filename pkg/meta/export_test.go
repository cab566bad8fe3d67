package meta

import (
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Resyncs is how often the cache has read everything.
func (c *Cache) Resyncs() int64 { return c.resyncs.Load() }

// DecodeAny feeds value to the decoder of each kind of record, as if it lay under a key of that kind, and
// encodes again what was accepted.
func (s *Store) DecodeAny(kind uint8, value []byte) error {
	kv := &mvccpb.KeyValue{Value: value, ModRevision: 7}
	chain := DataChain(entry.UUID{1}, 0)
	st := newCacheState()
	apply := func(rest string) error {
		kv.Key = []byte(s.viewPrefix() + rest)
		_, err := st.apply(rest, kv, false)
		return err
	}
	switch kind % 17 {
	case 0:
		l, err := decodeLedger(s.ledgerKey(1), 1, value, 7)
		if err != nil {
			return err
		}
		if _, err := encodeLedger(l); err != nil {
			panic(err)
		}
	case 1:
		kv.Key = []byte(s.chainKey(chain))
		c, err := s.decodeChain(chain, kv, map[string][]byte{s.chainPageKey(chain, 0): value})
		if err != nil {
			return err
		}
		var t txn
		if err := newChainChange(c, Guard{Bundle: "a/b/0"}).addTo(s, &t); err != nil {
			panic(err)
		}
	case 2:
		_, err := decodeCluster("cluster", value)
		return err
	case 3:
		_, err := decodeLedgerIDs("ids", value)
		return err
	case 4:
		_, err := decodeCookie(s.cookieKey("k1"), value)
		return err
	case 5:
		kv.Key = []byte(s.retiredKey(entry.UUID{1}))
		_, err := s.decodeRetired(kv)
		return err
	case 6:
		return apply("owners/a/b/0")
	case 7:
		return apply("epochs/a/b/0")
	case 8:
		if err := apply("namespaces/a/b"); err != nil {
			return err
		}
		if _, err := encodeNamespace(st.namespaces["a/b"], 1); err != nil {
			panic(err)
		}
		BundleOf(st.namespaces["a/b"], "a/b/orders")
	case 9:
		return apply("topics/a/b/orders")
	case 10:
		return apply("brokers/b1")
	case 11:
		return apply("bookies/" + hexUUID(entry.UUID{1}))
	case 13:
		if err := apply("marks/" + hexUUID(entry.UUID{1})); err != nil {
			return err
		}
		if _, err := encodeMark(st.marks[entry.UUID{1}], 1); err != nil {
			panic(err)
		}
	case 14:
		if err := apply("operations/op-1"); err != nil {
			return err
		}
		if _, err := encodeOperation(st.operations["op-1"], 1); err != nil {
			panic(err)
		}
	case 15:
		r, _, err := decodeRepair(s.repairKey(1), 1, value, 7)
		if err != nil {
			return err
		}
		if _, err := encodeRepair(r, 1); err != nil {
			panic(err)
		}
	case 16:
		_, err := decodeCensus(s.repairCensusKey(), value)
		return err
	case 12:
		return apply(string(value)) // whatever the key
	}
	return nil
}
