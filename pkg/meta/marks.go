package meta

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// MarkKind says what a storage identity is marked for.
type MarkKind uint8

// The kinds of marks.
const (
	MarkMaintenance MarkKind = iota + 1 // no new placements for a while; its copies stay
	MarkEmptying                        // no new placements, every copy moves elsewhere, then the identity is retired
	MarkDead                            // as MarkEmptying, of a disk that never comes back: nobody waits for it
)

// String returns the kind's name as the CLI prints it.
func (k MarkKind) String() string {
	switch k {
	case MarkMaintenance:
		return "MAINTENANCE"
	case MarkEmptying:
		return "EMPTYING"
	case MarkDead:
		return "DEAD"
	}
	return fmt.Sprintf("MarkKind(%d)", uint8(k))
}

// Mark says that nothing new is to be placed on a storage identity, and why. It outlives the registration of the
// bookie, which ends with its lease. It goes when it is lifted, or with the identity, in the transaction that retires that.
//
// A mark is honoured by those who choose bookies, by their [Cache], a little late; no transaction compares it. What is
// placed on a marked identity nevertheless is one more ledger to move, and retirement compares that none is left.
type Mark struct {
	UUID entry.StorageUUID
	// Bookie is the id that the identity has.
	Bookie string
	Kind   MarkKind
	// Operation is the id of the [Operation] that set it; empty for maintenance.
	Operation string
	Since     time.Time
	// Rev is the etcd revision the record was read at.
	Rev int64
}

// Empties reports that every copy on the identity is to be made elsewhere.
func (m Mark) Empties() bool { return m.Kind == MarkEmptying || m.Kind == MarkDead }

func (s *Store) markKey(u entry.StorageUUID) string { return s.viewPrefix() + "marks/" + hexUUID(u) }

func encodeMark(m Mark, lastOp uint64) (string, error) {
	return encode(&metav1.Mark{
		Kind: metav1.MarkKind(m.Kind), Bookie: m.Bookie, Operation: m.Operation, SinceMs: millis(m.Since), LastOp: lastOp,
	})
}

func decodeMark(kv *mvccpb.KeyValue) (Mark, uint64, error) {
	key := string(kv.Key)
	u, err := entry.ParseUUID(key[strings.LastIndexByte(key, '/')+1:])
	if err != nil {
		return Mark{}, 0, &CorruptRecordError{Key: key, Err: err}
	}
	var m metav1.Mark
	if err := decode(key, kv.Value, &m); err != nil {
		return Mark{}, 0, err
	}
	if m.Kind <= 0 || m.Kind > metav1.MarkKind(MarkDead) {
		return Mark{}, 0, corrupt(key, "mark %d", m.Kind)
	}
	if k := MarkKind(m.Kind); (m.Operation == "") != (k == MarkMaintenance) {
		return Mark{}, 0, corrupt(key, "mark %s of operation %q", k, m.Operation)
	}
	return Mark{
		UUID: u, Bookie: m.Bookie, Kind: MarkKind(m.Kind), Operation: m.Operation, Since: fromMillis(m.SinceMs), Rev: kv.ModRevision,
	}, m.LastOp, nil
}

// GetMark reads the mark of a storage identity, linearizably, or returns [ErrNotFound].
func (s *Store) GetMark(ctx context.Context, u entry.StorageUUID) (Mark, error) {
	const op = "get mark"
	resp, err := s.read(ctx, op, clientv3.OpGet(s.markKey(u)))
	if err != nil {
		return Mark{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Mark{}, fmt.Errorf("%s of storage %s: %w", op, u, ErrNotFound)
	}
	m, _, err := decodeMark(kvs[0])
	return m, err
}

// ListMarks lists all marks, by storage identity.
func (s *Store) ListMarks(ctx context.Context) ([]Mark, error) {
	resp, err := s.read(ctx, "list marks", clientv3.OpGet(s.viewPrefix()+"marks/", clientv3.WithPrefix()))
	if err != nil {
		return nil, err
	}
	var all []Mark
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		m, _, err := decodeMark(kv)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// MarkMaintenance marks the disk of bookie id: nothing new is placed on it until [Store.LiftMaintenance]. now is the
// caller's time. Repeating it is no error. It returns [ErrNotFound] for an id without a cookie and a [*MarkedError] when an
// operation empties the bookie.
func (s *Store) MarkMaintenance(ctx context.Context, id string, now time.Time) (Mark, error) {
	const op = "mark bookie for maintenance"
	fail := func(err error) (Mark, error) { return Mark{}, fmt.Errorf("%s %s: %w", op, id, err) }
	cookie, rev, err := s.getCookie(ctx, id)
	if err != nil {
		return fail(err)
	}
	m := Mark{UUID: cookie.UUID, Bookie: id, Kind: MarkMaintenance, Since: now}
	value, err := encodeMark(m, newOp())
	if err != nil {
		return fail(err)
	}
	key := s.markKey(cookie.UUID)
	var t txn
	t.compareRev(s.cookieKey(id), rev)
	t.compareRev(key, 0)
	t.put(key, value)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return Mark{}, err
	}
	if resp.Succeeded {
		return s.GetMark(ctx, cookie.UUID)
	}
	kv := t.results(resp)[key]
	if kv == nil {
		return fail(fmt.Errorf("cookie: %w", ErrConflict))
	}
	found, _, err := decodeMark(kv)
	switch {
	case err != nil:
		return Mark{}, err
	case found.Kind != MarkMaintenance:
		return fail(&MarkedError{Mark: found})
	}
	return found, nil
}

// LiftMaintenance ends what [Store.MarkMaintenance] began. A bookie that is not marked is no error; one that an operation
// empties is a [*MarkedError].
func (s *Store) LiftMaintenance(ctx context.Context, id string) error {
	const op = "lift maintenance"
	fail := func(err error) error { return fmt.Errorf("%s of bookie %s: %w", op, id, err) }
	cookie, err := s.GetCookie(ctx, id)
	if err != nil {
		return fail(err)
	}
	key := s.markKey(cookie.UUID)
	resp, err := s.read(ctx, op, clientv3.OpGet(key))
	if err != nil {
		return err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return nil
	}
	m, _, err := decodeMark(kvs[0])
	switch {
	case err != nil:
		return err
	case m.Kind != MarkMaintenance:
		return fail(&MarkedError{Mark: m})
	}
	var t txn
	t.compareRev(key, m.Rev)
	t.del(key)
	done, err := s.commitTxn(ctx, op, &t)
	if err != nil || done.Succeeded || t.results(done)[key] == nil {
		return err
	}
	return fail(ErrConflict)
}
