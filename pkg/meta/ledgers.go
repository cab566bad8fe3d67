package meta

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// Owned is a store whose ledger transitions compare a bundle's epoch besides their own guards: what an owner
// hands to its ledgers, so that T2 and T4 of an owner that was replaced fail at once.
type Owned struct {
	*Store
	guard Guard
}

// Owned returns a view of the store whose ChangeEnsemble and StartRecovery compare g too.
func (s *Store) Owned(g Guard) *Owned { return &Owned{Store: s, guard: g} }

// ChangeEnsemble is [Store.ChangeEnsemble] under the guard; it may return [ErrEpoch] besides.
func (o *Owned) ChangeEnsemble(ctx context.Context, l Ledger, fragments []Fragment) (Ledger, error) {
	return o.changeEnsemble(ctx, &o.guard, l, fragments)
}

// StartRecovery is [Store.StartRecovery] under the guard; it may return [ErrEpoch] besides.
func (o *Owned) StartRecovery(ctx context.Context, id entry.LedgerID) (Ledger, error) {
	return o.startRecovery(ctx, &o.guard, id)
}

// GetLedger reads a ledger's record, linearizably. It returns [ErrNotFound] for an id without a record, which
// says nothing about what bookies may delete; a deleted ledger's record stays, as a tombstone.
func (s *Store) GetLedger(ctx context.Context, id entry.LedgerID) (Ledger, error) {
	key := s.ledgerKey(id)
	resp, err := s.read(ctx, "get ledger", clientv3.OpGet(key))
	if err != nil {
		return Ledger{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Ledger{}, fmt.Errorf("get ledger %d: %w", id, ErrNotFound)
	}
	return decodeLedger(key, id, kvs[0].Value, kvs[0].ModRevision)
}

// ListLedgers lists up to limit records with ids above after, by id. Tombstones are among them.
func (s *Store) ListLedgers(ctx context.Context, after entry.LedgerID, limit int) ([]Ledger, error) {
	resp, err := s.read(ctx, "list ledgers", clientv3.OpGet(s.ledgerKey(after+1),
		clientv3.WithRange(clientv3.GetPrefixRangeEnd(s.ledgersPrefix())), clientv3.WithLimit(int64(limit))))
	if err != nil {
		return nil, err
	}
	var all []Ledger
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		id, err := s.ledgerIDOf(string(kv.Key), s.ledgersPrefix())
		if err != nil {
			return nil, err
		}
		l, err := decodeLedger(string(kv.Key), id, kv.Value, kv.ModRevision)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

func (s *Store) ledgerIDOf(key, prefix string) (entry.LedgerID, error) {
	n, err := parseCompactID(key[len(prefix):])
	if err != nil {
		return 0, &CorruptRecordError{Key: key, Err: err}
	}
	return entry.LedgerID(n), nil
}

// Holdings are the ledgers that name a storage identity in a fragment or an intent.
type Holdings struct {
	// Revision is etcd's when they were read, all at once.
	Revision int64
	// Ledgers are all of them, by id: those that are being deleted too, until the identity has confirmed that.
	Ledgers []entry.LedgerID
	// Deleting are those of them that are being deleted. Only the ledger's record is a statement that it may go.
	Deleting []entry.LedgerID
}

// LedgersOn lists the ledgers that name the storage identity u in a fragment or an intent, by id, as of one
// revision. Ledgers that are being deleted are among them until u confirmed the deletion.
func (s *Store) LedgersOn(ctx context.Context, u entry.StorageUUID) ([]entry.LedgerID, error) {
	h, err := s.Holdings(ctx, u)
	return h.Ledgers, err
}

// Holdings reads the reverse index of the storage identity u, linearizably.
func (s *Store) Holdings(ctx context.Context, u entry.StorageUUID) (Holdings, error) {
	const page = 5000
	prefix := s.holderPrefix(u)
	end := clientv3.GetPrefixRangeEnd(prefix)
	var h Holdings
	for from := prefix; ; {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(page)}
		if h.Revision != 0 {
			opts = append(opts, clientv3.WithRev(h.Revision))
		}
		resp, err := s.read(ctx, "list a bookie's ledgers", clientv3.OpGet(from, opts...))
		if err != nil {
			return Holdings{}, err
		}
		got := resp.Responses[0].GetResponseRange()
		if h.Revision == 0 {
			h.Revision = resp.Header.Revision
		}
		for _, kv := range got.Kvs {
			id, err := s.ledgerIDOf(string(kv.Key), prefix)
			if err != nil {
				return Holdings{}, err
			}
			h.Ledgers = append(h.Ledgers, id)
			if string(kv.Value) == holderDeleting {
				h.Deleting = append(h.Deleting, id)
			}
		}
		if !got.More {
			return h, nil
		}
		from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
	}
}

// Revision is etcd's now, linearizably. It falls only when etcd was restored from an older copy.
func (s *Store) Revision(ctx context.Context) (int64, error) {
	resp, err := s.read(ctx, "read revision", clientv3.OpGet(s.clusterKey(), clientv3.WithCountOnly()))
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}

// ChangeEnsemble is T2: it gives the ledger new fragments, of which all but the last of l's must be unchanged.
// Its writer calls it with the ledger as it last saw it. A replica swap in between is kept. It returns a
// [*LedgerStateError] when the ledger is no longer OPEN or another writer's: the caller withdraws.
func (s *Store) ChangeEnsemble(ctx context.Context, l Ledger, fragments []Fragment) (Ledger, error) {
	return s.changeEnsemble(ctx, nil, l, fragments)
}

func (s *Store) changeEnsemble(ctx context.Context, g *Guard, l Ledger, fragments []Fragment) (Ledger, error) {
	const op = "change ensemble"
	if err := checkFragments(l.Replication, fragments); err != nil {
		return Ledger{}, fmt.Errorf("%s of ledger %d: %w", op, l.ID, err)
	}
	settled := len(l.Fragments) - 1 // fragments that only repair may change
	if settled < 0 || len(fragments) <= settled || !equalFragments(fragments[:settled], l.Fragments[:settled]) {
		return Ledger{}, fmt.Errorf("%s of ledger %d: %w: only the last fragment may change", op, l.ID, ErrInvalid)
	}
	return s.changeLedger(ctx, op, g, l, func(cur Ledger) (Ledger, error) {
		if cur.State != LedgerOpen || cur.Nonce != l.Nonce {
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		}
		if len(cur.Fragments) != len(l.Fragments) || !equalFragment(cur.Fragments[settled], l.Fragments[settled]) {
			// Only the writer changes these, and it has one change under way at a time.
			return Ledger{}, fmt.Errorf("%s of ledger %d: %w", op, l.ID, ErrConflict)
		}
		cur.Fragments = append(slices.Clone(cur.Fragments[:settled]), cloneFragments(fragments[settled:])...)
		return cur, nil
	})
}

// StartRecovery is T4: it raises the ledger's term and closes it to its writer. A ledger that is CLOSED
// already is returned as it is; one that is being deleted is a [*LedgerStateError].
func (s *Store) StartRecovery(ctx context.Context, id entry.LedgerID) (Ledger, error) {
	return s.startRecovery(ctx, nil, id)
}

func (s *Store) startRecovery(ctx context.Context, g *Guard, id entry.LedgerID) (Ledger, error) {
	const op = "start recovery"
	l, err := s.GetLedger(ctx, id)
	if err != nil {
		return Ledger{}, err
	}
	return s.changeLedger(ctx, op, g, l, func(cur Ledger) (Ledger, error) {
		switch cur.State {
		case LedgerOpen, LedgerInRecovery:
			cur.State = LedgerInRecovery
			cur.Term++
			return cur, nil
		case LedgerClosed:
			return cur, errUnchanged
		case LedgerDeleting:
		}
		return Ledger{}, &LedgerStateError{Op: op, Current: cur}
	})
}

// AddIntent is the first half of T6: it names a bookie that a repair copies a fragment to. It is refused with
// a [*LedgerStateError] for the last fragment of a ledger that is not CLOSED, for a fragment that does not
// exist, and for a target that is in the fragment. Repeating it moves the deadline, which ends the swap under the former one.
func (s *Store) AddIntent(ctx context.Context, id entry.LedgerID, intent ReplicaIntent) (Ledger, error) {
	const op = "add replica intent"
	l, err := s.GetLedger(ctx, id)
	if err != nil {
		return Ledger{}, err
	}
	return s.changeLedger(ctx, op, nil, l, func(cur Ledger) (Ledger, error) {
		i := repairable(cur, intent.Fragment)
		if i < 0 || slotOf(cur.Fragments[i], intent.Target) >= 0 {
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		}
		cur.Pending = append(withoutIntent(cur.Pending, intent.Target, intent.Fragment), intent)
		return cur, nil
	})
}

// DropIntent ends an intent without a swap. An intent that is gone already is no error. One of a ledger that is being deleted
// stays: its target may hold copies, and confirms the deletion as others do.
func (s *Store) DropIntent(ctx context.Context, id entry.LedgerID, target entry.StorageUUID, fragment entry.EntryID) (Ledger, error) {
	l, err := s.GetLedger(ctx, id)
	if err != nil {
		return Ledger{}, err
	}
	return s.changeLedger(ctx, "drop replica intent", nil, l, func(cur Ledger) (Ledger, error) {
		rest := withoutIntent(cur.Pending, target, fragment)
		if len(rest) == len(cur.Pending) || cur.State == LedgerDeleting {
			return cur, errUnchanged
		}
		cur.Pending = rest
		return cur, nil
	})
}

// SwapReplica is the second half of T6: in the fragment, which must be as the caller saw it, the identity old
// gives its slot to the new one, whose intent ends. The guards are those of AddIntent, and that the intent under which
// the copies were made is there still: with this deadline, which tells it from a later one. A bookie may delete copies once
// no intent names it, so they prove nothing after that.
func (s *Store) SwapReplica(ctx context.Context, id entry.LedgerID, fragment Fragment, old entry.StorageUUID, replacement Slot, deadline time.Time) (Ledger, error) {
	const op = "swap replica"
	l, err := s.GetLedger(ctx, id)
	if err != nil {
		return Ledger{}, err
	}
	return s.changeLedger(ctx, op, nil, l, func(cur Ledger) (Ledger, error) {
		i := repairable(cur, fragment.First)
		if i < 0 || !equalFragment(cur.Fragments[i], fragment) {
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		}
		at := slotOf(fragment, old)
		if at < 0 || slotOf(fragment, replacement.UUID) >= 0 {
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		}
		if !slices.ContainsFunc(cur.Pending, func(i ReplicaIntent) bool {
			return i.Target == replacement.UUID && i.Fragment == fragment.First && i.Deadline.Equal(deadline.Truncate(time.Millisecond))
		}) {
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		}
		cur.Fragments = cloneFragments(cur.Fragments)
		cur.Fragments[i].Slots[at] = replacement
		cur.Pending = withoutIntent(cur.Pending, replacement.UUID, fragment.First)
		return cur, nil
	})
}

// ConfirmDeleted says that the storage identity u, which saw the ledger DELETING, holds nothing of it any
// more. With the last holder's confirmation the record becomes a tombstone (T8), which stays: a bookie whose
// admission read came before the deletion may still create the ledger, and learns of it by the tombstone.
func (s *Store) ConfirmDeleted(ctx context.Context, id entry.LedgerID, u entry.StorageUUID) error {
	const op = "confirm deletion"
	l, err := s.GetLedger(ctx, id)
	if err != nil {
		return err
	}
	_, err = s.changeLedger(ctx, op, nil, l, func(cur Ledger) (Ledger, error) {
		if cur.State != LedgerDeleting {
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		}
		if !holders(cur)[u] {
			return cur, errUnchanged
		}
		cur.DeletedOn = append(slices.Clone(cur.DeletedOn), u)
		if len(holders(cur)) == 0 {
			return tombstone(cur), nil
		}
		return cur, nil
	})
	return err
}

// PurgeTombstone is T8 by retention: it makes a tombstone of a ledger that is DELETING, though holders have
// not confirmed.
func (s *Store) PurgeTombstone(ctx context.Context, id entry.LedgerID) error {
	const op = "purge ledger"
	l, err := s.GetLedger(ctx, id)
	if err != nil {
		return err
	}
	_, err = s.changeLedger(ctx, op, nil, l, func(cur Ledger) (Ledger, error) {
		switch {
		case cur.State != LedgerDeleting:
			return Ledger{}, &LedgerStateError{Op: op, Current: cur}
		case len(cur.Fragments) == 0:
			return cur, errUnchanged
		}
		return tombstone(cur), nil
	})
	return err
}

func tombstone(l Ledger) Ledger {
	l.Fragments, l.Pending, l.DeletedOn, l.Replication, l.Nonce = nil, nil, nil, Replication{}, 0
	return l
}

// errUnchanged ends a change that has nothing to do.
var errUnchanged = errors.New("nothing to change")

// changeLedger applies change to the record cur, or to what is there by then, in one transaction with the
// reverse index and the comparison of newly named identities. change gets a record that it may keep parts of
// but must not write through, and returns the next one, errUnchanged, or why it can't be.
func (s *Store) changeLedger(ctx context.Context, op string, g *Guard, cur Ledger, change func(Ledger) (Ledger, error)) (Ledger, error) {
	mine := newOp()
	key := s.ledgerKey(cur.ID)
	for {
		next, err := change(cur)
		if errors.Is(err, errUnchanged) {
			return cloneLedger(cur), nil
		}
		if err != nil {
			return Ledger{}, err
		}
		next.LastOp = mine
		t := txn{guard: g}
		if err := s.replaceLedger(&t, cur, next); err != nil {
			return Ledger{}, err
		}
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return Ledger{}, err
		}
		if resp.Succeeded {
			next.Rev = resp.Header.Revision
			return cloneLedger(next), nil
		}
		now := t.results(resp)
		kv := now[key]
		if kv == nil {
			return Ledger{}, fmt.Errorf("%s of ledger %d: %w", op, cur.ID, ErrNotFound)
		}
		found, err := decodeLedger(key, cur.ID, kv.Value, kv.ModRevision)
		if err != nil {
			return Ledger{}, err
		}
		if found.LastOp == mine {
			return found, nil // an earlier attempt of this call, whose reply was lost
		}
		if err := t.ownership(s, now); err != nil {
			return Ledger{}, fmt.Errorf("%s of ledger %d: %w", op, cur.ID, err)
		}
		if err := t.retirement(s, now); err != nil {
			return Ledger{}, fmt.Errorf("%s of ledger %d: %w", op, cur.ID, err)
		}
		cur = found
	}
}

// holderDeleting is the value of a holder's key from T7 on, so that a bookie need not read each of its ledgers to
// learn which may go.
const holderDeleting = "d"

// replaceLedger adds to t the change of a record: its revision compared, the reverse index brought along, no
// identity named anew that is retired.
func (s *Store) replaceLedger(t *txn, old, next Ledger) error {
	value, err := encodeLedger(next)
	if err != nil {
		return fmt.Errorf("encode ledger %d: %w", next.ID, err)
	}
	key := s.ledgerKey(next.ID)
	t.compareRev(key, old.Rev)
	t.put(key, value)
	before, after := holders(old), holders(next)
	for _, u := range sortedUUIDs(after) {
		switch {
		case !before[u]:
			t.put(s.holderKey(u, next.ID), "")
			t.compareUnretired(s, u)
		case next.State == LedgerDeleting && old.State != LedgerDeleting:
			t.put(s.holderKey(u, next.ID), holderDeleting)
		}
	}
	for _, u := range sortedUUIDs(before) {
		if !after[u] {
			t.del(s.holderKey(u, next.ID))
		}
	}
	return nil
}

// holders returns the identities that may hold something of l: in a fragment or an intent, and not confirmed
// to have deleted it.
func holders(l Ledger) map[entry.StorageUUID]bool {
	set := make(map[entry.StorageUUID]bool)
	for _, f := range l.Fragments {
		for _, slot := range f.Slots {
			set[slot.UUID] = true
		}
	}
	for _, i := range l.Pending {
		set[i.Target] = true
	}
	for _, u := range l.DeletedOn {
		delete(set, u)
	}
	return set
}

// repairable returns the index of the fragment that T6 may change, or -1.
func repairable(l Ledger, first entry.EntryID) int {
	if l.State == LedgerDeleting {
		return -1
	}
	for i, f := range l.Fragments {
		if f.First == first && (i < len(l.Fragments)-1 || l.State == LedgerClosed) {
			return i
		}
	}
	return -1
}

func slotOf(f Fragment, u entry.StorageUUID) int {
	return slices.IndexFunc(f.Slots, func(slot Slot) bool { return slot.UUID == u })
}

func withoutIntent(all []ReplicaIntent, target entry.StorageUUID, fragment entry.EntryID) []ReplicaIntent {
	var rest []ReplicaIntent
	for _, i := range all {
		if i.Target != target || i.Fragment != fragment {
			rest = append(rest, i)
		}
	}
	return rest
}

func equalFragment(a, b Fragment) bool { return a.First == b.First && slices.Equal(a.Slots, b.Slots) }

func equalFragments(a, b []Fragment) bool { return slices.EqualFunc(a, b, equalFragment) }

func cloneFragments(all []Fragment) []Fragment {
	out := make([]Fragment, len(all))
	for i, f := range all {
		out[i] = Fragment{First: f.First, Slots: slices.Clone(f.Slots)}
	}
	return out
}

// cloneLedger makes l share nothing with what the caller handed in.
func cloneLedger(l Ledger) Ledger {
	l.Fragments = cloneFragments(l.Fragments)
	l.Pending = slices.Clone(l.Pending)
	l.DeletedOn = slices.Clone(l.DeletedOn)
	for i := range l.Pending {
		l.Pending[i].Deadline = l.Pending[i].Deadline.Truncate(time.Millisecond)
	}
	return l
}

func sortedUUIDs(set map[entry.StorageUUID]bool) []entry.StorageUUID {
	all := make([]entry.StorageUUID, 0, len(set))
	for u := range set {
		all = append(all, u)
	}
	sort.Slice(all, func(i, j int) bool { return slices.Compare(all[i][:], all[j][:]) < 0 })
	return all
}
