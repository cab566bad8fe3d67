package meta

import (
	"errors"
	"fmt"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Errors that callers decide by. All are returned wrapped.
var (
	// ErrNotFound: there is no such record.
	ErrNotFound = errors.New("not found")
	// ErrExists: there is such a record already.
	ErrExists = errors.New("exists already")
	// ErrEpoch: the bundle's epoch is not the guard's; the ownership is lost, whatever is held under it must go.
	ErrEpoch = errors.New("bundle was taken over")
	// ErrConflict: another transaction came first, or a record is not as the caller saw it.
	ErrConflict = errors.New("changed by another transaction")
	// ErrRetired: a storage identity named by the caller is gone for good.
	ErrRetired = errors.New("storage identity is retired")
	// ErrLedgerOrder: the ledger's id is not above the chain's last one; reserve a new block.
	ErrLedgerOrder = errors.New("ledger id is not above the chain's last")
	// ErrNotEmpty: what is to be deleted still holds something.
	ErrNotEmpty = errors.New("not empty")
	// ErrDeleting: the topic or namespace is being deleted.
	ErrDeleting = errors.New("being deleted")
	// ErrInvalid: the arguments contradict each other or the record; nothing was sent.
	ErrInvalid = errors.New("invalid")
	// ErrLease: the lease handed in is gone; nothing was applied.
	ErrLease = errors.New("lease is gone")
	// ErrUnavailable: etcd could not be reached before the context ended, and nothing was applied.
	ErrUnavailable = errors.New("etcd is unavailable")
	// ErrUnknownOutcome: no reply came before the context ended; the change may have been applied, or may be yet.
	ErrUnknownOutcome = errors.New("outcome is unknown")
)

// LedgerStateError says that a ledger's state, term, nonce or fragments are not what a transition needs.
type LedgerStateError struct {
	Op      string
	Current Ledger // as it is now; the caller's
}

// Error implements error.
func (e *LedgerStateError) Error() string {
	return fmt.Sprintf("%s ledger %d: it is %s with term %d", e.Op, e.Current.ID, e.Current.State, e.Current.Term)
}

// OwnerConflictError says that a bundle is not owned as the caller expected. It is an [ErrConflict].
type OwnerConflictError struct {
	Bundle BundleID
	Owner  Owner // as it is now; zero Broker when nobody owns it
	Epoch  entry.Epoch
}

// Error implements error.
func (e *OwnerConflictError) Error() string {
	if e.Owner.Broker == "" {
		return fmt.Sprintf("bundle %s: nobody owns it, epoch %d", e.Bundle, e.Epoch)
	}
	return fmt.Sprintf("bundle %s: broker %s owns it with epoch %d", e.Bundle, e.Owner.Broker, e.Epoch)
}

// Unwrap makes the error an ErrConflict.
func (e *OwnerConflictError) Unwrap() error { return ErrConflict }

// CorruptRecordError says that a record in etcd can't be understood. Nothing is decided by it, and nothing
// repairs it by itself.
type CorruptRecordError struct {
	Key string
	Err error
}

// Error implements error.
func (e *CorruptRecordError) Error() string {
	return fmt.Sprintf("record %s is damaged: %v", e.Key, e.Err)
}

// Unwrap returns what is wrong with it.
func (e *CorruptRecordError) Unwrap() error { return e.Err }

// FeatureLevelError says that the cluster uses formats that this program does not know.
type FeatureLevelError struct {
	Cluster, Program uint32
}

// Error implements error.
func (e *FeatureLevelError) Error() string {
	return fmt.Sprintf("cluster has feature level %d, this program knows %d: run a newer version", e.Cluster, e.Program)
}
