package bookiewire

import (
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Code is a bookie's answer to one request. Three classes matter to a recovery: [OK] is a positive,
// [NoEntry] and [NoLedger] are negatives (this identity cannot have had the entry), everything else decides
// nothing.
type Code uint8

// The codes. Their numbers are part of the protocol.
const (
	// OK: done, and what it depends on is on disk.
	OK Code = 0
	// NoEntry: this identity knows the ledger and has never acknowledged the entry.
	NoEntry Code = 1
	// NoLedger: this identity has never stored anything of the ledger.
	NoLedger Code = 2
	// Unknown: the bookie cannot tell (disk error, limbo, index not ready, wrong identity).
	Unknown Code = 3
	// Fenced: a newer term is stored; Error.Term carries it.
	Fenced Code = 4
	// ReadOnly: the bookie takes no new ledgers, or (full) no writes but recovery's and urgent ones; or, once its
	// reserve is used up, not even those.
	ReadOnly Code = 5
	// Overloaded: the bytes in flight are at their limit; retry.
	Overloaded Code = 6
	// NotAdmitted: metadata does not let this writer write here (not open, other nonce, not a member).
	NotAdmitted Code = 7
	// BadChecksum: the body does not match the checksum sent with it.
	BadChecksum Code = 8
	// BadRequest: the request breaks a limit or the protocol.
	BadRequest Code = 9
	// Disconnected is never on the wire: the client's word for a request whose answer will not come
	// (connection refused, reset, timed out, bookie's address unknown). The outcome of an add is unknown.
	Disconnected Code = 255
)

// Error is a negative answer, or no answer, to one request to a bookie.
type Error struct {
	Code Code
	// Term is the stored term, with Code Fenced.
	Term entry.Term
	// Detail is text for people.
	Detail string
}

// Error says what the bookie answered.
func (e *Error) Error() string {
	if e.Detail == "" {
		return "bookie answered " + e.Code.String()
	}
	return fmt.Sprintf("bookie answered %s: %s", e.Code, e.Detail)
}

// Add stores one entry.
type Add struct {
	Ledger entry.LedgerID
	Entry  entry.EntryID
	// Term is 0 for the ledger's writer; a recovery's own term for its write-back.
	Term entry.Term
	// Recovery marks a recovery's or a repair's write: it passes a fence of a term ≤ Term.
	Recovery bool
	// Urgent marks an add of a ledger that frees space in the end, such as consumers' acknowledgements: a bookie whose
	// disk is full takes it as it takes a recovery's, from its reserve. It passes no fence.
	Urgent bool
	// Nonce is the writer's nonce, as in the ledger's metadata; checked when the ledger is new here.
	Nonce uint64
	// LAC is the highest entry confirmed when the add was sent; a recovery freezes it.
	LAC entry.EntryID
	// Checksum is entry.Checksum(Ledger, Entry, Body).
	Checksum uint32
	// Body is envelope and frame. The sender must not change it until the add is done.
	Body []byte
}

// Read asks for entries of one ledger.
type Read struct {
	Ledger entry.LedgerID
	First  entry.EntryID
	// Stride is the distance between the entries wanted; 1 for each.
	Stride uint32
	// MaxEntries limits the entries returned; at least 1.
	MaxEntries uint32
	// MaxBytes limits the bodies returned; the first one is always returned.
	MaxBytes uint32
	// Recovery fences the ledger with Term, durably, before the answer, also before a negative one.
	// MaxEntries is 1 then.
	Recovery bool
	Term     entry.Term
}

// ReadReply carries the run of entries that was found from Read.First on. A missing first entry is an *Error;
// a missing later one ends the run.
type ReadReply struct {
	// LAC is the highest the bookie has seen for the ledger.
	LAC     entry.EntryID
	Entries []ReadEntry
}

// ReadEntry is one stored entry. The reader owns Body, and has yet to verify Checksum.
type ReadEntry struct {
	Entry    entry.EntryID
	Checksum uint32
	Body     []byte
}

// Fence raises a ledger's term.
type Fence struct {
	Ledger entry.LedgerID
	Term   entry.Term
}

// FenceReply is sent once the term is durable and every add admitted before it is durable too.
type FenceReply struct {
	LAC entry.EntryID
}

// WriteLAC makes a LAC known while its writer is idle.
type WriteLAC struct {
	Ledger entry.LedgerID
	Nonce  uint64
	LAC    entry.EntryID
}

// WaitLAC asks for the LAC, waiting until it is above After or Timeout has passed. Fenced does not end it.
type WaitLAC struct {
	Ledger  entry.LedgerID
	After   entry.EntryID
	Timeout time.Duration
}

// WaitLACReply is the highest LAC the bookie has seen; the timeout is not an error.
type WaitLACReply struct {
	LAC entry.EntryID
}
