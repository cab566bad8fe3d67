package statelog

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Limits of records and entries, in bytes.
const (
	MaxOwner = 1 << 10
	MaxKey   = 32 << 10
	// MaxValue has room for the largest page of a cursor: 65,536 messages, each with another redelivery to come.
	MaxValue = 3 << 19
	// MaxEntry is what the records of one call may take, encoded, and stay together.
	MaxEntry = MaxValue + 64<<10
)

// Errors that callers decide by. All are returned wrapped. A record list that was taken in fails with a
// *ledger.AppendError.
var (
	// ErrClosed: the log was closed by its own process.
	ErrClosed = errors.New("state log is closed")
	// ErrTooLarge: a record exceeds a limit.
	ErrTooLarge = errors.New("record is too large")
)

// DamagedError says that something of an owner's state cannot be read back. Nothing is reset by it.
type DamagedError struct {
	// Owner is empty when it cannot be told whose record it is: then every owner's state is in doubt.
	Owner    string
	Kind     uint8
	Key      []byte
	Position entry.Position // Batch is the record's index in its entry
	Err      error
}

// Error says what is damaged, and where it lies.
func (e *DamagedError) Error() string {
	if e.Owner == "" {
		return fmt.Sprintf("state log entry %v is damaged, and it is unknown whose state it holds: %v", e.Position, e.Err)
	}
	return fmt.Sprintf("state of %s is damaged: record of kind %d, key %x, at %v: %v", e.Owner, e.Kind, e.Key, e.Position, e.Err)
}

// Unwrap returns what is wrong.
func (e *DamagedError) Unwrap() error { return e.Err }

// Record is one piece of an owner's state.
type Record struct {
	// Owner is whose state it is: 1 to MaxOwner bytes.
	Owner string
	// Kind tells an owner's kinds of keys apart.
	Kind uint8
	// Key is at most MaxKey bytes, Value at most MaxValue.
	Key, Value []byte
	// Delete removes the key; Value is ignored.
	Delete bool
}

// Env is what the state logs of a process share.
type Env struct {
	Chain chain.Env
	// Log and Metrics may be nil.
	Log     *slog.Logger
	Metrics *Metrics
	// Now is the clock; nil means that of Chain.Sched, which runs the logs too.
	Now func() time.Time
}

// Config says how a log behaves. Zero fields mean the defaults.
type Config struct {
	Replication meta.Replication
	// FloorBytes is the size below which nothing is rewritten, whatever is live: 8 MiB.
	FloorBytes int64
	// MaxPendingBytes bounds the records that are not yet stored; 16 MiB. Append waits beyond it.
	MaxPendingBytes int64
	// RollAge as for topics; 4 h.
	RollAge time.Duration
}

func (c Config) withDefaults() Config {
	if c.FloorBytes == 0 {
		c.FloorBytes = 8 << 20
	}
	if c.MaxPendingBytes == 0 {
		c.MaxPendingBytes = 16 << 20
	}
	return c
}

// growth is how many times its live bytes a log may have.
const growth = 4
