package ledgerstore

import (
	"sync/atomic"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Appender is what the core must know of an open segment: whether a batch fits. *segment.Writer is one.
type Appender interface {
	Room(records int, bodyBytes int64) bool
}

// Segment is one segment of a store. Its place in the log is its sequence number; a rewrite by compaction keeps the
// highest of what it replaces.
type Segment struct {
	seq uint64
	gen uint32 // counts rewrites under one sequence number; names the file
	// uuid is that of the file's header; the manifest pins it.
	uuid entry.UUID

	appender Appender
	path     string

	// The core's own, while the segment is unsealed.
	inFlight int   // batches not durable yet
	batches  int   // batches written
	durable  int64 // what a finished sync covers, from the start without a gap
	rolled   bool  // nothing more is appended
	// unstated is the ledger of the last record, until a batch behind it states that it is durable.
	unstated *ledger
	// holders are the ledgers that have slots for it.
	holders []*ledger

	// live counts the bytes of entries that exist; trash those of deleted ledgers that are to stay for a while; size what
	// the file takes. They are for compaction and usage.
	live  atomic.Int64
	trash atomic.Int64
	size  atomic.Int64
	// synced is what a sync has covered, under a policy that leaves some out.
	synced atomic.Int64
	// sealed is set once the footer is durable and the core has dropped the slots.
	sealed atomic.Bool
	// damaged is set when a read found corruption: compaction leaves the segment alone.
	damaged atomic.Bool
	// ledgers lists, sorted, whose records a sealed segment holds.
	ledgers []entry.LedgerID

	handle handle
}

// NewSegment describes a segment that is ready to be appended to, for whoever drives a [Core] by itself.
func NewSegment(seq uint64, a Appender) *Segment { return &Segment{seq: seq, appender: a} }

// Sequence is the segment's place in the log.
func (s *Segment) Sequence() uint64 { return s.seq }
