package meta

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// OperationKind says what an operation does.
type OperationKind uint8

// The kinds of operations.
const (
	OperationDecommission OperationKind = iota + 1 // empties a live bookie, and retires its storage identity
	OperationRecover                               // makes a dead bookie's copies anew, and retires its storage identity
)

// String returns the kind's name as the CLI prints it.
func (k OperationKind) String() string {
	switch k {
	case OperationDecommission:
		return "decommission"
	case OperationRecover:
		return "recover"
	}
	return fmt.Sprintf("OperationKind(%d)", uint8(k))
}

// mark is what an operation of that kind marks its bookie as.
func (k OperationKind) mark() MarkKind {
	if k == OperationRecover {
		return MarkDead
	}
	return MarkEmptying
}

// OperationState says how far an operation has come. It never goes back, but from copying or proving to draining.
type OperationState uint8

// The states of an operation.
const (
	OperationPlanned   OperationState = iota // nobody has taken it up
	OperationDraining                        // owners change the ensembles of open ledgers that name the identity
	OperationCopying                         // copies are made elsewhere
	OperationProving                         // nothing seems to name the identity: to be proved as it is retired
	OperationDone                            // retired
	OperationCancelled                       // by a person; the mark is lifted
	OperationFailed                          // it cannot go on
)

// String returns the state's name as the CLI prints it.
func (s OperationState) String() string {
	switch s {
	case OperationPlanned:
		return "PLANNED"
	case OperationDraining:
		return "DRAINING"
	case OperationCopying:
		return "COPYING"
	case OperationProving:
		return "PROVING"
	case OperationDone:
		return "DONE"
	case OperationCancelled:
		return "CANCELLED"
	case OperationFailed:
		return "FAILED"
	}
	return fmt.Sprintf("OperationState(%d)", uint8(s))
}

// OperationOptions bound what an operation may do.
type OperationOptions struct {
	// Rate is how many bytes a second may be copied for it, over all workers; 0: no bound but the workers' own.
	Rate int64
	// PauseAboveP99 makes copying wait while publishing's 99th percentile is above it; 0: never.
	PauseAboveP99 time.Duration
	// RelaxZones lets copies go where a ledger's minimum of zones is not kept.
	RelaxZones bool
}

// OperationBlock says why one ledger does not go on.
type OperationBlock struct {
	Ledger entry.LedgerID
	// Owner is what the ledger is part of: a topic's name, or a chain's.
	Owner string
	// Reason says why, and what would help.
	Reason string
}

// MaxOperationBlocks bounds the ledgers that an operation's record names as blocked.
const MaxOperationBlocks = 20

// Operation is long work that outlives the tool that began it: its record, which whoever runs it brings up to date.
type Operation struct {
	ID     string
	Kind   OperationKind
	State  OperationState
	Bookie string // its id
	UUID   entry.StorageUUID
	OperationOptions
	// Paused: a person stopped its copying. Held says why copying waits besides; empty when it does not.
	Paused bool
	Held   string
	// Ledgers and Bytes are what named the identity when it began, bytes of their copies there, estimated from metadata.
	// LedgersLeft and BytesLeft name it still. OpenLeft of those are open and name it in their last fragment.
	Ledgers, LedgersLeft, OpenLeft int64
	Bytes, BytesLeft               int64
	// Speed is in bytes a second, of late.
	Speed int64
	// Blocked ledgers do not go on; Blocks are the first of them, at most [MaxOperationBlocks].
	Blocked int64
	Blocks  []OperationBlock
	// Runner is the broker that runs it.
	Runner string
	// Error says why it failed.
	Error                   string
	Created, Updated, Ended time.Time
	// Rev is the etcd revision the record was read at.
	Rev int64
}

// Over reports that nothing will be done any more.
func (o Operation) Over() bool { return o.State >= OperationDone }

// MayCopy reports whether copies may be made for it now.
func (o Operation) MayCopy() bool { return !o.Over() && !o.Paused && o.Held == "" }

func (s *Store) operationsPrefix() string      { return s.viewPrefix() + "operations/" }
func (s *Store) operationKey(id string) string { return s.operationsPrefix() + id }

// StartOperation writes the record of a new operation and the mark of its bookie, in one transaction. Of op it takes Kind,
// Bookie, the options, Ledgers, Bytes and Created; the id is made up. A mark for maintenance is replaced. It returns
// [ErrNotFound] for a bookie without a cookie and a [*MarkedError] when an operation empties it already.
func (s *Store) StartOperation(ctx context.Context, op Operation) (Operation, error) {
	const what = "start operation"
	fail := func(err error) (Operation, error) {
		return Operation{}, fmt.Errorf("%s to %s bookie %s: %w", what, op.Kind, op.Bookie, err)
	}
	cookie, rev, err := s.getCookie(ctx, op.Bookie)
	if err != nil {
		return fail(err)
	}
	op.UUID, op.State, op.Updated = cookie.UUID, OperationPlanned, op.Created
	op.LedgersLeft, op.BytesLeft = op.Ledgers, op.Bytes
	mine, seen := newOp(), int64(0)
	markKey := s.markKey(op.UUID)
	for {
		op.ID = fmt.Sprintf("op-%06x", rand.Uint32()&0xffffff) //nolint:gosec // a name
		value, err := encodeOperation(op, mine)
		if err != nil {
			return fail(err)
		}
		mark, err := encodeMark(Mark{Bookie: op.Bookie, Kind: op.Kind.mark(), Operation: op.ID, Since: op.Created}, mine)
		if err != nil {
			return fail(err)
		}
		var t txn
		t.compareRev(s.cookieKey(op.Bookie), rev)
		t.compareRev(markKey, seen)
		t.compareRev(s.operationKey(op.ID), 0)
		t.put(markKey, mark)
		t.put(s.operationKey(op.ID), value)
		resp, err := s.commitTxn(ctx, what, &t)
		if err != nil {
			return Operation{}, err
		}
		if resp.Succeeded {
			return s.GetOperation(ctx, op.ID)
		}
		now := t.results(resp)
		if now[s.cookieKey(op.Bookie)].GetModRevision() != rev {
			return fail(fmt.Errorf("cookie: %w", ErrConflict))
		}
		seen = 0
		if kv := now[markKey]; kv != nil {
			found, lastOp, err := decodeMark(kv)
			switch {
			case err != nil:
				return Operation{}, err
			case lastOp == mine: // an earlier attempt, whose reply was lost
				return s.GetOperation(ctx, found.Operation)
			case found.Kind != MarkMaintenance:
				return fail(&MarkedError{Mark: found})
			}
			seen = found.Rev
		}
	}
}

// GetOperation reads an operation's record, linearizably, or returns [ErrNotFound].
func (s *Store) GetOperation(ctx context.Context, id string) (Operation, error) {
	const op = "get operation"
	if err := checkID("operation", id); err != nil {
		return Operation{}, fmt.Errorf("%s: %w", op, err)
	}
	resp, err := s.read(ctx, op, clientv3.OpGet(s.operationKey(id)))
	if err != nil {
		return Operation{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Operation{}, fmt.Errorf("%s %s: %w", op, id, ErrNotFound)
	}
	o, _, err := decodeOperation(kvs[0])
	return o, err
}

// ListOperations lists all operations, those that are over too, oldest first.
func (s *Store) ListOperations(ctx context.Context) ([]Operation, error) {
	resp, err := s.read(ctx, "list operations", clientv3.OpGet(s.operationsPrefix(), clientv3.WithPrefix()))
	if err != nil {
		return nil, err
	}
	var all []Operation
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		o, _, err := decodeOperation(kv)
		if err != nil {
			return nil, err
		}
		all = append(all, o)
	}
	sortOperations(all)
	return all, nil
}

func sortOperations(all []Operation) {
	slices.SortFunc(all, func(a, b Operation) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.ID, b.ID))
	})
}

// UpdateOperation replaces the record of an operation that goes on, as it was read at op.Rev, or returns [ErrConflict] when
// it was changed since, [ErrNotFound] when it is gone. What it is of (kind, bookie, identity) must not change, and it must
// not end by this: see [Store.FinishOperation], [Store.EndOperation].
func (s *Store) UpdateOperation(ctx context.Context, op Operation) (Operation, error) {
	if op.Over() {
		return Operation{}, fmt.Errorf("update operation %s: %w: it would be %s", op.ID, ErrInvalid, op.State)
	}
	return s.replaceOperation(ctx, "update operation", op, nil)
}

// EndOperation ends an operation that did not do its work, CANCELLED or FAILED as op.State says, and lifts its mark in the
// same transaction. What was copied stays where it is. The errors are those of UpdateOperation.
func (s *Store) EndOperation(ctx context.Context, op Operation) (Operation, error) {
	const what = "end operation"
	if op.State != OperationCancelled && op.State != OperationFailed {
		return Operation{}, fmt.Errorf("%s %s: %w: it would be %s", what, op.ID, ErrInvalid, op.State)
	}
	return s.replaceOperation(ctx, what, op, func(t *txn) { t.del(s.markKey(op.UUID)) })
}

// FinishOperation retires the storage identity that op has emptied and makes the record DONE, in one transaction that
// proves that no ledger and no intent names the identity: [Store.RetireStorage] has what else goes. It returns
// [ErrNotEmpty] while one does, and the errors of UpdateOperation; then nothing has changed. op.Ended is the caller's time.
func (s *Store) FinishOperation(ctx context.Context, op Operation) (Operation, error) {
	const what = "finish operation"
	fail := func(err error) (Operation, error) { return Operation{}, fmt.Errorf("%s %s: %w", what, op.ID, err) }
	op.State = OperationDone
	cookie, rev, err := s.getCookie(ctx, op.Bookie)
	if err == nil && cookie.UUID != op.UUID {
		err = fmt.Errorf("%w: its cookie names %s", ErrConflict, cookie.UUID)
	}
	if err != nil { // retired, perhaps by an attempt whose reply was lost
		if found, readErr := s.GetOperation(ctx, op.ID); readErr == nil && found.State == OperationDone {
			return found, nil
		}
		return fail(err)
	}
	retired, err := encode(&metav1.Retired{Id: op.Bookie, RetiredMs: millis(op.Ended)})
	if err != nil {
		return fail(err)
	}
	return s.replaceOperation(ctx, what, op, func(t *txn) { s.retire(t, op.Bookie, op.UUID, rev, retired) })
}

// replaceOperation puts op over the record of op.Rev together with what add puts, or says why not.
func (s *Store) replaceOperation(ctx context.Context, what string, op Operation, add func(*txn)) (Operation, error) {
	fail := func(err error) (Operation, error) { return Operation{}, fmt.Errorf("%s %s: %w", what, op.ID, err) }
	if err := checkID("operation", op.ID); err != nil {
		return fail(err)
	}
	mine := newOp()
	value, err := encodeOperation(op, mine)
	if err != nil {
		return fail(err)
	}
	key := s.operationKey(op.ID)
	var t txn
	t.compareRev(key, op.Rev)
	t.put(key, value)
	if add != nil {
		add(&t)
	}
	resp, err := s.commitTxn(ctx, what, &t)
	if err != nil {
		return Operation{}, err
	}
	if resp.Succeeded {
		op.Rev = resp.Header.Revision
		return op, nil
	}
	kv := t.results(resp)[key]
	if kv == nil {
		return fail(ErrNotFound)
	}
	found, lastOp, err := decodeOperation(kv)
	switch {
	case err != nil:
		return Operation{}, err
	case lastOp == mine: // an earlier attempt, whose reply was lost
		return found, nil
	case found.Rev != op.Rev:
		return fail(ErrConflict)
	}
	return fail(fmt.Errorf("storage %s of bookie %s: ledgers name it, or its cookie changed: %w", op.UUID, op.Bookie, ErrNotEmpty))
}

// ForgetOperation deletes the record of an operation that is over, as it was read at op.Rev. One that is gone is no error.
func (s *Store) ForgetOperation(ctx context.Context, op Operation) error {
	const what = "forget operation"
	if !op.Over() {
		return fmt.Errorf("%s %s: %w: it is %s", what, op.ID, ErrInvalid, op.State)
	}
	key := s.operationKey(op.ID)
	_, err := s.commit(ctx, what, []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", op.Rev)},
		[]clientv3.Op{clientv3.OpDelete(key)}, nil)
	return err
}

// MarkedError says that an operation empties a bookie already. It is an [ErrConflict].
type MarkedError struct{ Mark Mark }

// Error implements error.
func (e *MarkedError) Error() string {
	return fmt.Sprintf("operation %s empties bookie %s", e.Mark.Operation, e.Mark.Bookie)
}

// Unwrap makes the error an ErrConflict.
func (e *MarkedError) Unwrap() error { return ErrConflict }

func encodeOperation(o Operation, lastOp uint64) (string, error) {
	m := &metav1.Operation{
		Kind: metav1.OperationKind(o.Kind), State: metav1.OperationState(o.State), Bookie: o.Bookie, Storage: o.UUID[:],
		Rate: uint64(o.Rate), PauseAboveP99Us: uint64(o.PauseAboveP99.Microseconds()), RelaxZones: o.RelaxZones,
		Paused: o.Paused, Held: o.Held, Ledgers: uint64(o.Ledgers), Bytes: uint64(o.Bytes),
		LedgersLeft: uint64(o.LedgersLeft), BytesLeft: uint64(o.BytesLeft), OpenLeft: uint64(o.OpenLeft), Speed: uint64(o.Speed),
		Blocked: uint64(o.Blocked), Runner: o.Runner, Error: o.Error,
		CreatedMs: millis(o.Created), UpdatedMs: millis(o.Updated), EndedMs: millis(o.Ended), LastOp: lastOp,
	}
	for _, b := range o.Blocks[:min(len(o.Blocks), MaxOperationBlocks)] {
		m.Blocks = append(m.Blocks, &metav1.OperationBlock{Ledger: uint64(b.Ledger), Owner: b.Owner, Reason: b.Reason})
	}
	return encode(m)
}

func decodeOperation(kv *mvccpb.KeyValue) (Operation, uint64, error) {
	key := string(kv.Key)
	var m metav1.Operation
	if err := decode(key, kv.Value, &m); err != nil {
		return Operation{}, 0, err
	}
	u, err := decodeUUID(m.Storage)
	if err != nil {
		return Operation{}, 0, &CorruptRecordError{Key: key, Err: err}
	}
	if m.Kind <= 0 || m.Kind > metav1.OperationKind(OperationRecover) || m.State < 0 || m.State > metav1.OperationState(OperationFailed) {
		return Operation{}, 0, corrupt(key, "kind %d, state %d", m.Kind, m.State)
	}
	for _, n := range []uint64{m.Rate, m.Ledgers, m.Bytes, m.LedgersLeft, m.BytesLeft, m.OpenLeft, m.Speed, m.Blocked} {
		if n > math.MaxInt64 {
			return Operation{}, 0, corrupt(key, "a count of %d", n)
		}
	}
	if m.PauseAboveP99Us > uint64(math.MaxInt64/time.Microsecond) {
		return Operation{}, 0, corrupt(key, "a time of %d us", m.PauseAboveP99Us)
	}
	if len(m.Blocks) > MaxOperationBlocks {
		return Operation{}, 0, corrupt(key, "%d blocked ledgers", len(m.Blocks))
	}
	o := Operation{
		ID: key[strings.LastIndexByte(key, '/')+1:], Kind: OperationKind(m.Kind), State: OperationState(m.State), Bookie: m.Bookie, UUID: u,
		OperationOptions: OperationOptions{
			Rate: int64(m.Rate), PauseAboveP99: time.Duration(m.PauseAboveP99Us) * time.Microsecond, RelaxZones: m.RelaxZones,
		},
		Paused: m.Paused, Held: m.Held, Ledgers: int64(m.Ledgers), Bytes: int64(m.Bytes),
		LedgersLeft: int64(m.LedgersLeft), BytesLeft: int64(m.BytesLeft), OpenLeft: int64(m.OpenLeft), Speed: int64(m.Speed),
		Blocked: int64(m.Blocked), Runner: m.Runner, Error: m.Error,
		Created: fromMillis(m.CreatedMs), Updated: fromMillis(m.UpdatedMs), Ended: fromMillis(m.EndedMs), Rev: kv.ModRevision,
	}
	for _, b := range m.Blocks {
		o.Blocks = append(o.Blocks, OperationBlock{Ledger: entry.LedgerID(b.Ledger), Owner: b.Owner, Reason: b.Reason})
	}
	return o, m.LastOp, nil
}
