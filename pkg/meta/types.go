package meta

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// LedgerState orders a ledger's life; it never goes back.
type LedgerState uint8

// The states of a ledger.
const (
	LedgerOpen LedgerState = iota
	LedgerInRecovery
	LedgerClosed
	LedgerDeleting
)

// String returns the state's name as the CLI prints it.
func (s LedgerState) String() string {
	switch s {
	case LedgerOpen:
		return "OPEN"
	case LedgerInRecovery:
		return "IN_RECOVERY"
	case LedgerClosed:
		return "CLOSED"
	case LedgerDeleting:
		return "DELETING"
	}
	return fmt.Sprintf("LedgerState(%d)", uint8(s))
}

// Slot is one place in an ensemble: the identity of the data, and its zone and host as of placement.
type Slot struct {
	UUID entry.StorageUUID
	Zone string
	// Host is what [HostHash] makes of the host label; 0 is unknown. Labels themselves are long, and every ledger's record
	// has three.
	Host uint32
}

// HostHash stands for a host label in a [Slot]: its FNV-1a hash of 32 bits. An empty label is unknown, 0. Should two labels
// ever share a hash, their bookies are taken to share a host, which is the safe side.
func HostHash(label string) uint32 {
	if label == "" {
		return 0
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(label))
	return max(h.Sum32(), 1)
}

// Fragment is a stretch of a ledger, from First on, with one ensemble.
type Fragment struct {
	First entry.EntryID
	Slots []Slot
}

// Replication is how a ledger is copied. E ≥ Qw ≥ Qa ≥ 1; MinZones ≤ Qa, 0 and 1 mean "any zones".
type Replication struct {
	Ensemble    int // E
	WriteQuorum int // Qw
	AckQuorum   int // Qa
	MinZones    int
}

// ReplicaIntent names a bookie that a repair is copying a fragment to.
type ReplicaIntent struct {
	Target   entry.StorageUUID
	Fragment entry.EntryID // its First
	Deadline time.Time
}

// Ledger is a ledger's record. Values returned by this package are the caller's to change; they share nothing.
type Ledger struct {
	ID    entry.LedgerID
	State LedgerState
	Term  entry.Term
	Nonce uint64 // the writer's
	Replication
	Fragments []Fragment
	// Last and Length are set when the ledger is closed. Length counts each entry's body once, in bytes.
	Last   entry.EntryID
	Length int64
	// LastOp identifies the transaction that wrote the record, so that an ambiguous one can tell its own.
	LastOp  uint64
	Pending []ReplicaIntent
	Chain   ChainID
	// DeletedOn, of a ledger that is being deleted: identities that hold nothing of it any more. When all
	// holders are in it the record becomes a tombstone: DELETING without fragments.
	DeletedOn []entry.StorageUUID
	// Rev is the etcd revision the record was read at.
	Rev int64
}

// BundleID names a bundle: "tenant/namespace/n" with a number that is never reused.
type BundleID string

// ChainID names a chain of ledgers: a topic partition's data log or a bundle's state log.
type ChainID string

// DataChain names the data log of partition index of topic (index 0 of a topic without partitions).
func DataChain(topic entry.UUID, index int) ChainID {
	return ChainID(fmt.Sprintf("topic/%s/%d/data", topic, index))
}

// StateChain names the state log of a bundle.
func StateChain(b BundleID) ChainID { return ChainID("bundle/" + string(b) + "/state") }

// Run is a chain's use of one ledger.
type Run struct {
	Ledger entry.LedgerID
	First  entry.Offset // of its first message; set when the ledger is opened
	// The rest is set when the ledger is closed.
	Closed  bool
	End     entry.Offset // offset after its last message
	MaxTime int64        // newest broker time in it, Unix milliseconds; 0 when empty
	Bytes   int64
}

// Chain is a chain's record: its runs, oldest first, and what survives their trimming.
type Chain struct {
	ID     ChainID
	Bundle BundleID
	Runs   []Run
	// NextOffset is a floor of the next offset: the end of the last closed run.
	NextOffset entry.Offset
	// LastLedger is the highest ledger id that the chain ever had; 0 when none.
	LastLedger entry.LedgerID
	// Rev is the etcd revision the record was read at; 0 means that it does not exist yet.
	Rev int64

	// pages are the records that hold the oldest runs, nextPage the number of the next one.
	pages    []chainPage
	nextPage uint64
}

// chainPage is a record of a long chain: its number and how many runs it holds.
type chainPage struct {
	number uint64
	runs   int
}

// Guard is the proof of ownership that every owner's transaction compares.
type Guard struct {
	Bundle BundleID
	Epoch  entry.Epoch
	// Topic, when set, is the topic of the chain, as last seen; read only. Opening a ledger compares that it still
	// exists and is not being deleted: an owner whose cache is late must not store what nobody finds again.
	Topic *Topic
}

// Closing says how a ledger ends, under T3's guards by its writer or T5's by a recovery.
type Closing struct {
	// Ledger as last seen: its writer's (T3), or as [Store.StartRecovery] returned it (T5).
	Ledger Ledger
	Last   entry.EntryID
	Length int64
	// Tail, of a recovery: fragments that replace the ledger's from Tail[0].First on; empty keeps them.
	Tail []Fragment
	// End is the offset after the ledger's last message; MaxTime its newest broker time, Unix milliseconds.
	End     entry.Offset
	MaxTime int64
	// Recovery selects T5, which needs state IN_RECOVERY and Term.
	Recovery bool
	Term     entry.Term
}
