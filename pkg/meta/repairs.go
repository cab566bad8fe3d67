package meta

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// RepairCause is a set of reasons why a ledger is to be repaired.
type RepairCause uint32

// The causes.
const (
	CauseLost         RepairCause = 1 << iota // a bookie that has copies is gone
	CauseDecommission                         // a bookie that has copies is to be emptied
	CauseHint                                 // its writer left copies to repair
	CauseMissing                              // a bookie lacks entries that it should have
	CauseCorrupt                              // a bookie has entries that it cannot read
	CauseMisplaced                            // copies share a host, or span too few zones
	CauseIntent                               // a copying was begun and not ended
	CauseOpen                                 // copies are missing of what was written to its open fragment

	causesEnd
)

// AllRepairCauses is the set of all causes.
const AllRepairCauses = causesEnd - 1

var causeNames = []string{"lost", "decommission", "hint", "missing", "corrupt", "misplaced", "intent", "open"}

// String names the causes, joined by commas.
func (c RepairCause) String() string {
	var names []string
	for i, name := range causeNames {
		if c&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// Each returns the causes one by one.
func (c RepairCause) Each() []RepairCause {
	var all []RepairCause
	for one := RepairCause(1); one < causesEnd; one <<= 1 {
		if c&one != 0 {
			all = append(all, one)
		}
	}
	return all
}

// RepairCounts are entries of one ledger that are not as they should be. An entry may count in several of them.
type RepairCounts struct {
	// BelowWriteQuorum have fewer copies than Qw, BelowAckQuorum fewer than Qa, Unavailable none that can be reached.
	BelowWriteQuorum, BelowAckQuorum, Unavailable uint64
	// Misplaced have copies that share a host or span too few zones.
	Misplaced uint64
}

// Repair is the record of a ledger that is to be repaired. It is there until the ledger is as it should be, so that whoever works
// on repairs finds it, and people see why it takes so long. It guards nothing: what a repair does to a ledger is guarded by the
// ledger's own record.
type Repair struct {
	Ledger entry.LedgerID
	Causes RepairCause
	Since  time.Time
	// Storages are the identities whose copies are missing, or are to go elsewhere.
	Storages []entry.StorageUUID
	Counts   RepairCounts
	// Stuck says why it does not go on; empty if it does.
	Stuck string
	// Worker was at it last; Doing says at what.
	Worker, Doing string
	// CopiedEntries and CopiedBytes are copies that were made since it is here.
	CopiedEntries, CopiedBytes uint64
	// Failures counts attempts in a row that came to nothing. Retry is when the next may begin; zero: at once.
	Failures uint32
	Retry    time.Time
	// Rev is the etcd revision the record was read at.
	Rev int64
}

// AbsentBookie is a bookie that is not registered, and not for long enough to be given up.
type AbsentBookie struct {
	ID   string
	UUID entry.StorageUUID
	// Since is when it was first missed, Lost when its copies count as lost.
	Since, Lost time.Time
	// Ledgers is how many name it.
	Ledgers uint64
}

// RepairCensus is what the auditor knows beside the records of single ledgers.
type RepairCensus struct {
	Auditor string
	At      time.Time
	// Waiting is how many damaged ledgers have no record yet.
	Waiting uint64
	Absent  []AbsentBookie
	// Compared is how far the comparison of all ledgers has come, ComparedAll when it last reached the end.
	Compared    entry.LedgerID
	ComparedAll time.Time
}

func (s *Store) repairsPrefix() string              { return s.prefix + "repair/ledgers/" }
func (s *Store) repairKey(id entry.LedgerID) string { return s.repairsPrefix() + compactID(uint64(id)) }
func (s *Store) repairClaimsPrefix() string         { return s.prefix + "repair/claims/" }
func (s *Store) repairClaimKey(id entry.LedgerID) string {
	return s.repairClaimsPrefix() + compactID(uint64(id))
}
func (s *Store) repairCensusKey() string { return s.prefix + "repair/census" }

func encodeRepair(r Repair, lastOp uint64) (string, error) {
	m := &metav1.Repair{
		Causes: uint32(r.Causes), SinceMs: millis(r.Since), BelowWriteQuorum: r.Counts.BelowWriteQuorum, BelowAckQuorum: r.Counts.BelowAckQuorum,
		Unavailable: r.Counts.Unavailable, Misplaced: r.Counts.Misplaced, Stuck: r.Stuck, Worker: r.Worker, Doing: r.Doing,
		CopiedEntries: r.CopiedEntries, CopiedBytes: r.CopiedBytes, Failures: r.Failures, RetryMs: millis(r.Retry), LastOp: lastOp,
	}
	for _, u := range r.Storages {
		m.Storages = append(m.Storages, u[:])
	}
	return encode(m)
}

func decodeRepair(key string, id entry.LedgerID, value []byte, rev int64) (Repair, uint64, error) {
	var m metav1.Repair
	if err := decode(key, value, &m); err != nil {
		return Repair{}, 0, err
	}
	r := Repair{
		Ledger: id, Causes: RepairCause(m.Causes), Since: fromMillis(m.SinceMs), Stuck: m.Stuck, Worker: m.Worker, Doing: m.Doing,
		Counts: RepairCounts{
			BelowWriteQuorum: m.BelowWriteQuorum, BelowAckQuorum: m.BelowAckQuorum, Unavailable: m.Unavailable, Misplaced: m.Misplaced,
		},
		CopiedEntries: m.CopiedEntries, CopiedBytes: m.CopiedBytes, Failures: m.Failures, Retry: fromMillis(m.RetryMs), Rev: rev,
	}
	for _, b := range m.Storages {
		u, err := decodeUUID(b)
		if err != nil {
			return Repair{}, 0, &CorruptRecordError{Key: key, Err: err}
		}
		r.Storages = append(r.Storages, u)
	}
	return r, m.LastOp, nil
}

// GetRepair reads the record of a ledger that is to be repaired, or returns [ErrNotFound].
func (s *Store) GetRepair(ctx context.Context, id entry.LedgerID) (Repair, error) {
	resp, err := s.read(ctx, "get repair", clientv3.OpGet(s.repairKey(id)))
	if err != nil {
		return Repair{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Repair{}, fmt.Errorf("get repair of ledger %d: %w", id, ErrNotFound)
	}
	r, _, err := decodeRepair(string(kvs[0].Key), id, kvs[0].Value, kvs[0].ModRevision)
	return r, err
}

// RepairList is the ledgers that are to be repaired, as of one revision.
type RepairList struct {
	// Repairs are by ledger.
	Repairs []Repair
	// Claims says who is at work on a ledger.
	Claims map[entry.LedgerID]string
	// Total is how many there are, of which Repairs may be the first ones.
	Total int
}

// ListRepairs lists the first limit ledgers that are to be repaired, those above after, and who is at work on them.
func (s *Store) ListRepairs(ctx context.Context, after entry.LedgerID, limit int) (RepairList, error) {
	prefix, claims := s.repairsPrefix(), s.repairClaimsPrefix()
	resp, err := s.read(ctx, "list repairs",
		clientv3.OpGet(s.repairKey(after+1), clientv3.WithRange(clientv3.GetPrefixRangeEnd(prefix)), clientv3.WithLimit(int64(limit))),
		clientv3.OpGet(claims, clientv3.WithPrefix()),
		clientv3.OpGet(prefix, clientv3.WithPrefix(), clientv3.WithCountOnly()))
	if err != nil {
		return RepairList{}, err
	}
	out := RepairList{Claims: map[entry.LedgerID]string{}, Total: int(resp.Responses[2].GetResponseRange().Count)}
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		id, err := s.ledgerIDOf(string(kv.Key), prefix)
		if err != nil {
			return RepairList{}, err
		}
		r, _, err := decodeRepair(string(kv.Key), id, kv.Value, kv.ModRevision)
		if err != nil {
			return RepairList{}, err
		}
		out.Repairs = append(out.Repairs, r)
	}
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		id, err := s.ledgerIDOf(string(kv.Key), claims)
		if err != nil {
			return RepairList{}, err
		}
		out.Claims[id] = string(kv.Value)
	}
	return out, nil
}

// NoteRepair says that a ledger is to be repaired. A record that is there gets r's causes besides its own and, if r has
// any, its counts and storages; unless it has all of that already it is due at once. The rest of r counts only for a new record.
func (s *Store) NoteRepair(ctx context.Context, r Repair) error {
	const op = "note repair"
	if r.Causes == 0 || r.Causes >= causesEnd {
		return fmt.Errorf("%s of ledger %d: %w: causes %#x", op, r.Ledger, ErrInvalid, uint32(r.Causes))
	}
	_, err := s.changeRepair(ctx, op, r.Ledger, func(cur *Repair) (*Repair, error) {
		if cur == nil {
			return &r, nil
		}
		next := *cur
		next.Causes |= r.Causes
		if r.Counts != (RepairCounts{}) || len(r.Storages) > 0 {
			next.Counts, next.Storages = r.Counts, r.Storages
		}
		if next.Causes == cur.Causes && next.Counts == cur.Counts && slices.Equal(next.Storages, cur.Storages) {
			return nil, errUnchanged
		}
		next.Retry = time.Time{}
		return &next, nil
	})
	return err
}

// UpdateRepair replaces the record that the caller has seen, as r.Rev says, and returns it. It returns [ErrConflict] when the
// record has changed since, [ErrNotFound] when it is gone.
func (s *Store) UpdateRepair(ctx context.Context, r Repair) (Repair, error) {
	return s.changeRepair(ctx, "update repair", r.Ledger, func(cur *Repair) (*Repair, error) {
		if err := seen(cur, r); err != nil {
			return nil, err
		}
		return &r, nil
	})
}

// EndRepair says that the ledger is as it should be. It returns [ErrConflict] when the record is not the one that the caller has
// seen: something else was found since. One that is gone is no error.
func (s *Store) EndRepair(ctx context.Context, r Repair) error {
	const op = "end repair"
	key := s.repairKey(r.Ledger)
	var t txn
	t.compareRev(key, r.Rev)
	t.del(key)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil || resp.Succeeded || t.results(resp)[key] == nil {
		return err
	}
	return fmt.Errorf("%s of ledger %d: %w", op, r.Ledger, ErrConflict)
}

func seen(cur *Repair, r Repair) error {
	switch {
	case cur == nil:
		return ErrNotFound
	case cur.Rev != r.Rev:
		return ErrConflict
	}
	return nil
}

// changeRepair applies change to the record, nil if there is none, or to what is there by then.
func (s *Store) changeRepair(ctx context.Context, op string, id entry.LedgerID, change func(*Repair) (*Repair, error)) (Repair, error) {
	key := s.repairKey(id)
	resp, err := s.read(ctx, op, clientv3.OpGet(key))
	if err != nil {
		return Repair{}, err
	}
	mine := newOp()
	var kv *mvccpb.KeyValue
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		kv = kvs[0]
	}
	for {
		var cur *Repair
		if kv != nil {
			r, lastOp, err := decodeRepair(key, id, kv.Value, kv.ModRevision)
			if err != nil {
				return Repair{}, err
			}
			if lastOp == mine {
				return r, nil // an earlier attempt of this call, whose reply was lost
			}
			cur = &r
		}
		next, err := change(cur)
		if errors.Is(err, errUnchanged) {
			return *cur, nil
		}
		if err != nil {
			return Repair{}, fmt.Errorf("%s of ledger %d: %w", op, id, err)
		}
		value, err := encodeRepair(*next, mine)
		if err != nil {
			return Repair{}, fmt.Errorf("%s of ledger %d: %w", op, id, err)
		}
		var t txn
		t.compareRev(key, kv.GetModRevision())
		t.put(key, value)
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return Repair{}, err
		}
		if resp.Succeeded {
			next.Rev = resp.Header.Revision
			return *next, nil
		}
		kv = t.results(resp)[key]
	}
}

// ClaimRepair lets one worker at a time be at a ledger that is to be repaired: by a key under its lease, so that another goes on
// when it dies. It reports false when another has it, or nothing is to be repaired any more. Claiming twice under one lease is claiming
// once. [ErrLease] says that the lease is gone.
func (s *Store) ClaimRepair(ctx context.Context, id entry.LedgerID, worker string, lease clientv3.LeaseID) (bool, error) {
	const op = "claim repair"
	if lease == clientv3.NoLease {
		return false, fmt.Errorf("%s of ledger %d: %w", op, id, ErrLease)
	}
	key := s.repairClaimKey(id)
	var t txn
	t.compareExists(s.repairKey(id))
	t.compareRev(key, 0)
	t.put(key, worker, clientv3.WithLease(lease))
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil || resp.Succeeded {
		return err == nil, err
	}
	now := t.results(resp)
	return now[s.repairKey(id)] != nil && clientv3.LeaseID(now[key].GetLease()) == lease, nil
}

// ReleaseRepair ends a claim made under that lease. One that is gone, or another's, is no error.
func (s *Store) ReleaseRepair(ctx context.Context, id entry.LedgerID, lease clientv3.LeaseID) error {
	return s.deregister(ctx, "release repair", s.repairClaimKey(id), lease)
}

// GetRepairCensus reads what the auditor knows; the zero census if there was none yet.
func (s *Store) GetRepairCensus(ctx context.Context) (RepairCensus, error) {
	key := s.repairCensusKey()
	resp, err := s.read(ctx, "get repair census", clientv3.OpGet(key))
	if err != nil {
		return RepairCensus{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return RepairCensus{}, nil
	}
	return decodeCensus(key, kvs[0].Value)
}

func decodeCensus(key string, value []byte) (RepairCensus, error) {
	var m metav1.RepairCensus
	if err := decode(key, value, &m); err != nil {
		return RepairCensus{}, err
	}
	c := RepairCensus{
		Auditor: m.Auditor, At: fromMillis(m.AtMs), Waiting: m.Waiting,
		Compared: entry.LedgerID(m.Compared), ComparedAll: fromMillis(m.ComparedMs),
	}
	for _, a := range m.Absent {
		u, err := decodeUUID(a.Storage)
		if err != nil {
			return RepairCensus{}, &CorruptRecordError{Key: key, Err: err}
		}
		c.Absent = append(c.Absent, AbsentBookie{
			ID: a.Id, UUID: u, Since: fromMillis(a.SinceMs), Lost: fromMillis(a.LostMs), Ledgers: a.Ledgers,
		})
	}
	return c, nil
}

// PutRepairCensus replaces the census. The auditor alone does; should there be two for a moment, either one's will do.
func (s *Store) PutRepairCensus(ctx context.Context, c RepairCensus) error {
	m := &metav1.RepairCensus{
		Auditor: c.Auditor, AtMs: millis(c.At), Waiting: c.Waiting, Compared: uint64(c.Compared), ComparedMs: millis(c.ComparedAll),
	}
	for _, a := range c.Absent {
		m.Absent = append(m.Absent, &metav1.AbsentBookie{
			Storage: a.UUID[:], Id: a.ID, SinceMs: millis(a.Since), LostMs: millis(a.Lost), Ledgers: a.Ledgers,
		})
	}
	value, err := encode(m)
	if err != nil {
		return fmt.Errorf("put repair census: %w", err)
	}
	_, err = s.commit(ctx, "put repair census", nil, []clientv3.Op{clientv3.OpPut(s.repairCensusKey(), value)}, nil)
	return err
}

// ClaimAudit makes one process at a time the auditor of repairs, by a key under its lease: it reports whether worker is. Whoever
// is asks again before each look, for the lease may be gone.
func (s *Store) ClaimAudit(ctx context.Context, worker string, lease clientv3.LeaseID) (bool, error) {
	const op = "claim audit"
	if lease == clientv3.NoLease {
		return false, fmt.Errorf("%s: %w", op, ErrLease)
	}
	key := s.ElectionKey("repair")
	var t txn
	t.compareRev(key, 0)
	t.put(key, worker, clientv3.WithLease(lease))
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil || resp.Succeeded {
		return err == nil, err
	}
	return clientv3.LeaseID(t.results(resp)[key].GetLease()) == lease, nil
}

// BookieRegistered reports whether a storage identity is registered, linearizably.
func (s *Store) BookieRegistered(ctx context.Context, u entry.StorageUUID) (bool, error) {
	_, err := s.BookieLease(ctx, u)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}
