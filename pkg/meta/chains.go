package meta

import (
	"context"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// A chain's head record holds its newest runs. When there are more than maxHeadRuns, the oldest pageRuns of
// them move to a page of their own, in the same transaction; so a roll of a very long chain stays small.
const (
	maxHeadRuns = 1000
	pageRuns    = 500
)

// GetChain reads a chain's record, linearizably. A chain that does not exist yet is a Chain with its ID and
// Rev 0, which [Store.OpenLedger] creates.
func (s *Store) GetChain(ctx context.Context, id ChainID) (Chain, error) {
	if err := checkChain(id); err != nil {
		return Chain{}, fmt.Errorf("get chain: %w", err)
	}
	resp, err := s.read(ctx, "get chain", clientv3.OpGet(s.chainKey(id)),
		clientv3.OpGet(s.chainPagesPrefix(id), clientv3.WithPrefix()))
	if err != nil {
		return Chain{}, err
	}
	head := resp.Responses[0].GetResponseRange().Kvs
	if len(head) == 0 {
		return Chain{ID: id}, nil
	}
	pages := make(map[string][]byte)
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		pages[string(kv.Key)] = kv.Value
	}
	return s.decodeChain(id, head[0], pages)
}

func (s *Store) decodeChain(id ChainID, head *mvccpb.KeyValue, pages map[string][]byte) (Chain, error) {
	key := string(head.Key)
	var m metav1.Chain
	if err := decode(key, head.Value, &m); err != nil {
		return Chain{}, err
	}
	c := Chain{
		ID: id, Bundle: BundleID(m.Bundle), NextOffset: entry.Offset(m.NextOffset), LastLedger: entry.LedgerID(m.LastLedger),
		Rev: head.ModRevision, nextPage: m.NextPage,
	}
	add := func(key string, runs []*metav1.Run) error {
		for _, r := range runs {
			run, err := runFromProto(r)
			if err != nil {
				return &CorruptRecordError{Key: key, Err: err}
			}
			c.Runs = append(c.Runs, run)
		}
		return nil
	}
	for _, number := range m.Pages {
		pageKey := s.chainPageKey(id, number)
		value, ok := pages[pageKey]
		if !ok {
			return Chain{}, corrupt(pageKey, "the chain's head names it, but it is missing")
		}
		var page metav1.ChainPage
		if err := decode(pageKey, value, &page); err != nil {
			return Chain{}, err
		}
		if number >= c.nextPage || len(page.Runs) == 0 {
			return Chain{}, corrupt(pageKey, "page of %d runs, next page is %d", len(page.Runs), c.nextPage)
		}
		if err := add(pageKey, page.Runs); err != nil {
			return Chain{}, err
		}
		c.pages = append(c.pages, chainPage{number: number, runs: len(page.Runs)})
	}
	if err := add(key, m.Runs); err != nil {
		return Chain{}, err
	}
	if err := checkRuns(c); err != nil {
		return Chain{}, &CorruptRecordError{Key: key, Err: err}
	}
	return c, nil
}

// pagedRuns is how many of the oldest runs lie in pages.
func (c *Chain) pagedRuns() int {
	n := 0
	for _, p := range c.pages {
		n += p.runs
	}
	return n
}

// change is a chain on its way to its next record: the pages to write or delete besides the head.
type chainChange struct {
	Chain
	dirty   map[uint64]bool
	dropped []uint64
	lastOp  uint64
}

func newChainChange(c Chain, g Guard) *chainChange {
	c.Bundle = g.Bundle
	c.Runs = slices.Clone(c.Runs)
	c.pages = slices.Clone(c.pages)
	return &chainChange{Chain: c, dirty: make(map[uint64]bool), lastOp: newOp()}
}

// open appends the run of a new ledger.
func (c *chainChange) open(id entry.LedgerID) {
	c.Runs = append(c.Runs, Run{Ledger: id, First: c.NextOffset})
	c.LastLedger = id
	if len(c.Runs)-c.pagedRuns() > maxHeadRuns {
		c.pages = append(c.pages, chainPage{number: c.nextPage, runs: pageRuns})
		c.dirty[c.nextPage] = true
		c.nextPage++
	}
}

// closeRun ends the open run.
func (c *chainChange) closeRun(cl *Closing) error {
	i := len(c.Runs) - 1
	if i < 0 || c.Runs[i].Ledger != cl.Ledger.ID || c.Runs[i].Closed {
		return fmt.Errorf("%w: ledger %d is not the chain's open one", ErrInvalid, cl.Ledger.ID)
	}
	r := &c.Runs[i]
	if cl.End < r.First || cl.Length < 0 || cl.Last < entry.NoEntry {
		return fmt.Errorf("%w: ledger %d closed at entry %d, offset %d, %d bytes; its first offset is %d",
			ErrInvalid, cl.Ledger.ID, cl.Last, cl.End, cl.Length, r.First)
	}
	r.Closed, r.End, r.MaxTime, r.Bytes = true, cl.End, cl.MaxTime, cl.Length
	c.NextOffset = cl.End
	return nil
}

// remove takes a closed run out, from wherever it lies.
func (c *chainChange) remove(id entry.LedgerID) error {
	i := slices.IndexFunc(c.Runs, func(r Run) bool { return r.Ledger == id })
	if i < 0 {
		return fmt.Errorf("ledger %d in chain %s: %w", id, c.ID, ErrNotFound)
	}
	if !c.Runs[i].Closed {
		return fmt.Errorf("%w: ledger %d is open", ErrInvalid, id)
	}
	c.Runs = slices.Delete(c.Runs, i, i+1)
	for k, p := range c.pages {
		if i >= p.runs {
			i -= p.runs
			continue
		}
		c.pages[k].runs--
		c.dirty[p.number] = true
		if p.runs == 1 {
			delete(c.dirty, p.number)
			c.dropped = append(c.dropped, p.number)
			c.pages = slices.Delete(c.pages, k, k+1)
		}
		break
	}
	return nil
}

// addTo puts the chain's records into t, guarded by the head's revision.
func (c *chainChange) addTo(s *Store, t *txn) error {
	paged := c.pagedRuns()
	if paged > len(c.Runs) {
		return fmt.Errorf("%w: chain %s has fewer runs than its pages", ErrInvalid, c.ID)
	}
	head := &metav1.Chain{
		Bundle: string(c.Bundle), NextOffset: uint64(c.NextOffset), LastLedger: uint64(c.LastLedger),
		LastOp: c.lastOp, NextPage: c.nextPage,
	}
	at := 0
	for _, p := range c.pages {
		head.Pages = append(head.Pages, p.number)
		if c.dirty[p.number] {
			page := new(metav1.ChainPage)
			for _, r := range c.Runs[at : at+p.runs] {
				page.Runs = append(page.Runs, runToProto(r))
			}
			value, err := encode(page)
			if err != nil {
				return err
			}
			t.put(s.chainPageKey(c.ID, p.number), value)
		}
		at += p.runs
	}
	for _, r := range c.Runs[at:] {
		head.Runs = append(head.Runs, runToProto(r))
	}
	for _, number := range c.dropped {
		t.del(s.chainPageKey(c.ID, number))
	}
	value, err := encode(head)
	if err != nil {
		return err
	}
	t.compareRev(s.chainKey(c.ID), c.Rev)
	t.put(s.chainKey(c.ID), value)
	return nil
}

// OpenLedger is T1: it creates l's record OPEN and appends its run to the chain c, which the caller read under
// the guard. l has an ID above the chain's last ledger ([ErrLedgerOrder] else), a Replication, and one
// fragment from entry 0; a zero Nonce is replaced by a random one. The chain's previous ledger must be closed,
// or is closed in the same transaction by closing (T3, or T5 of a recovery).
//
// It returns the records as written, or [ErrEpoch], [ErrConflict] (the chain is not as c says: drop it and
// read it again), a [*LedgerStateError] about the ledger that closing closes, [ErrRetired], [ErrExists]; and
// [ErrNotFound] or [ErrDeleting] when the guard's topic is gone or about to go.
func (s *Store) OpenLedger(ctx context.Context, g Guard, c Chain, l Ledger, closing *Closing) (Chain, Ledger, error) {
	const op = "open ledger"
	fail := func(err error) (Chain, Ledger, error) {
		return Chain{}, Ledger{}, fmt.Errorf("%s %d of chain %s: %w", op, l.ID, c.ID, err)
	}
	l = cloneLedger(l)
	l.State, l.Term, l.Last, l.Length, l.Pending, l.DeletedOn, l.Chain = LedgerOpen, 0, entry.NoEntry, 0, nil, nil, c.ID
	if l.Nonce == 0 {
		l.Nonce = newOp()
	}
	if err := l.Replication.Validate(); err != nil {
		return fail(err)
	}
	if err := checkFragments(l.Replication, l.Fragments); err != nil {
		return fail(err)
	}
	if g.Topic != nil {
		if u, _, ok := c.ID.data(); !ok || u != g.Topic.UUID {
			return fail(fmt.Errorf("%w: it is no chain of topic %q", ErrInvalid, g.Topic.Name))
		}
	}
	if l.ID <= c.LastLedger {
		return fail(fmt.Errorf("%w, %d", ErrLedgerOrder, c.LastLedger))
	}
	next, _, opened, err := s.changeChain(ctx, op, g, c, closing, &l)
	if err != nil {
		return fail(err)
	}
	return next, opened, nil
}

// CloseLedger is T3 (closing.Recovery false) or T5: it closes the chain's open ledger and its run in one
// transaction. Errors are those of [Store.OpenLedger]; a [*LedgerStateError] with a CLOSED ledger tells the
// end that somebody else decided.
func (s *Store) CloseLedger(ctx context.Context, g Guard, c Chain, closing Closing) (Chain, Ledger, error) {
	const op = "close ledger"
	next, closed, _, err := s.changeChain(ctx, op, g, c, &closing, nil)
	if err != nil {
		return Chain{}, Ledger{}, fmt.Errorf("%s %d of chain %s: %w", op, closing.Ledger.ID, c.ID, err)
	}
	return next, closed, nil
}

// changeChain closes a ledger, opens one, or both. It starts anew only when a replica swap or intent (T6)
// came between; anything else that changed is the answer.
func (s *Store) changeChain(ctx context.Context, op string, g Guard, c Chain, closing *Closing, open *Ledger) (Chain, Ledger, Ledger, error) {
	fail := func(err error) (Chain, Ledger, Ledger, error) { return Chain{}, Ledger{}, Ledger{}, err }
	if err := checkChain(c.ID); err != nil {
		return fail(err)
	}
	next := newChainChange(c, g)
	if closing != nil {
		if err := next.closeRun(closing); err != nil {
			return fail(err)
		}
	}
	if open != nil {
		if n := len(next.Runs); n > 0 && !next.Runs[n-1].Closed {
			return fail(fmt.Errorf("%w: ledger %d is still open", ErrInvalid, next.Runs[n-1].Ledger))
		}
		next.open(open.ID)
		open.LastOp = next.lastOp
	}
	var before Ledger // the ledger to close, as last seen
	if closing != nil {
		before = cloneLedger(closing.Ledger)
	}
	var topic Topic // whose chain it is, as last seen; its name is empty when nothing is opened for it
	if open != nil && g.Topic != nil {
		topic = *g.Topic
	}
	for {
		t := txn{guard: &g}
		if err := next.addTo(s, &t); err != nil {
			return fail(err)
		}
		var closed Ledger
		if closing != nil {
			var err error
			if closed, err = applyClosing(op, before, *closing); err != nil {
				return fail(err)
			}
			closed.LastOp = next.lastOp
			if err := s.replaceLedger(&t, before, closed); err != nil {
				return fail(err)
			}
		}
		if open != nil {
			if err := s.replaceLedger(&t, Ledger{}, *open); err != nil {
				return fail(err)
			}
		}
		if topic.Name != "" {
			t.compareRev(s.topicKey(topic.Name), topic.Rev)
		}
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return fail(err)
		}
		done := func(rev int64) (Chain, Ledger, Ledger, error) {
			result := next.Chain
			result.Rev, closed.Rev = rev, rev
			var opened Ledger
			if open != nil {
				opened = *open
				opened.Rev = rev
			}
			return result, cloneLedger(closed), cloneLedger(opened), nil
		}
		if resp.Succeeded {
			return done(resp.Header.Revision)
		}
		now := t.results(resp)
		if kv := now[s.chainKey(c.ID)]; kv != nil && chainLastOp(kv) == next.lastOp {
			return done(kv.ModRevision) // an earlier attempt of this call, whose reply was lost
		}
		if err := t.ownership(s, now); err != nil {
			return fail(err)
		}
		if closing != nil {
			current, err := s.ledgerIn(now, before.ID)
			if err != nil {
				return fail(err)
			}
			if _, err := applyClosing(op, current, *closing); err != nil {
				return fail(err)
			}
			before = current
		}
		if err := t.retirement(s, now); err != nil {
			return fail(err)
		}
		if open != nil && now[s.ledgerKey(open.ID)] != nil {
			return fail(ErrExists)
		}
		if topic.Name != "" {
			if topic, err = s.sameTopic(now, topic); err != nil {
				return fail(err)
			}
		}
		if kv := now[s.chainKey(c.ID)]; (kv == nil) != (c.Rev == 0) || kv != nil && kv.ModRevision != c.Rev {
			return fail(fmt.Errorf("chain: %w", ErrConflict))
		}
	}
}

// sameTopic returns a topic's record from what a failed transaction read, if it is still the topic that was seen and is
// to stay.
func (s *Store) sameTopic(now map[string]*mvccpb.KeyValue, seen Topic) (Topic, error) {
	key := s.topicKey(seen.Name)
	kv := now[key]
	if kv == nil {
		return seen, fmt.Errorf("topic %q: %w", seen.Name, ErrNotFound)
	}
	found, err := decodeTopic(key, seen.Name, kv.Value, kv.ModRevision)
	switch {
	case err != nil:
		return seen, err
	case found.UUID != seen.UUID:
		return seen, fmt.Errorf("topic %q: it was deleted and created anew: %w", seen.Name, ErrNotFound)
	case found.Deleting:
		return seen, fmt.Errorf("topic %q: %w", seen.Name, ErrDeleting)
	}
	return found, nil
}

// applyClosing is the guards of T3 and T5 and what they make of a ledger.
func applyClosing(op string, cur Ledger, cl Closing) (Ledger, error) {
	seen := cl.Ledger
	refuse := func() (Ledger, error) { return Ledger{}, &LedgerStateError{Op: op, Current: cloneLedger(cur)} }
	if cl.Recovery {
		if cur.State != LedgerInRecovery || cur.Term != cl.Term {
			return refuse()
		}
	} else if cur.State != LedgerOpen || cur.Nonce != seen.Nonce {
		return refuse()
	}
	if len(cur.Fragments) == 0 || len(seen.Fragments) == 0 {
		return Ledger{}, fmt.Errorf("%w: ledger %d has no fragments", ErrInvalid, cur.ID)
	}
	lastNow, lastSeen := cur.Fragments[len(cur.Fragments)-1], seen.Fragments[len(seen.Fragments)-1]
	if cl.Recovery && !equalFragment(lastNow, lastSeen) {
		return refuse()
	}
	next := cloneLedger(cur)
	if len(cl.Tail) > 0 {
		first := cl.Tail[0].First
		if !cl.Recovery || first < lastSeen.First {
			return Ledger{}, fmt.Errorf("%w: fragments from entry %d replace what is settled", ErrInvalid, first)
		}
		keep := len(next.Fragments)
		if first == lastNow.First {
			keep--
		}
		next.Fragments = append(next.Fragments[:keep], cloneFragments(cl.Tail)...)
		if err := checkFragments(next.Replication, next.Fragments); err != nil {
			return Ledger{}, err
		}
	}
	next.State, next.Last, next.Length = LedgerClosed, cl.Last, cl.Length
	return next, nil
}

// DeleteLedger is T7: it turns a CLOSED ledger into DELETING and removes its run from the chain, any closed
// one, in one transaction. What the chain keeps of it is its floor of offsets and its last ledger id. A ledger
// that the chain does not have is [ErrNotFound].
func (s *Store) DeleteLedger(ctx context.Context, g Guard, c Chain, id entry.LedgerID) (Chain, error) {
	const op = "delete ledger"
	fail := func(err error) (Chain, error) {
		return Chain{}, fmt.Errorf("%s %d of chain %s: %w", op, id, c.ID, err)
	}
	if err := checkChain(c.ID); err != nil {
		return fail(err)
	}
	next := newChainChange(c, g)
	if err := next.remove(id); err != nil {
		return fail(err)
	}
	before, err := s.GetLedger(ctx, id)
	if err != nil {
		return fail(err)
	}
	for {
		if before.State != LedgerClosed {
			return fail(&LedgerStateError{Op: op, Current: before})
		}
		after := cloneLedger(before)
		after.State, after.LastOp = LedgerDeleting, next.lastOp
		t := txn{guard: &g}
		if err := next.addTo(s, &t); err != nil {
			return fail(err)
		}
		if err := s.replaceLedger(&t, before, after); err != nil {
			return fail(err)
		}
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return fail(err)
		}
		result := next.Chain
		if resp.Succeeded {
			result.Rev = resp.Header.Revision
			return result, nil
		}
		now := t.results(resp)
		kv := now[s.chainKey(c.ID)]
		if kv != nil && chainLastOp(kv) == next.lastOp {
			result.Rev = kv.ModRevision
			return result, nil
		}
		if err := t.ownership(s, now); err != nil {
			return fail(err)
		}
		if kv == nil || kv.ModRevision != c.Rev {
			return fail(fmt.Errorf("chain: %w", ErrConflict))
		}
		if before, err = s.ledgerIn(now, id); err != nil {
			return fail(err)
		}
	}
}

// DeleteChain removes a chain without runs, with its floor: for a topic or bundle that goes for good. A chain
// that is gone already is no error.
func (s *Store) DeleteChain(ctx context.Context, g Guard, c Chain) error {
	const op = "delete chain"
	if len(c.Runs) > 0 {
		return fmt.Errorf("%s %s: %w: %d ledgers", op, c.ID, ErrNotEmpty, len(c.Runs))
	}
	if c.Rev == 0 {
		return nil
	}
	t := txn{guard: &g}
	t.compareRev(s.chainKey(c.ID), c.Rev)
	t.del(s.chainKey(c.ID))
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return fmt.Errorf("%s %s: %w", op, c.ID, err)
	}
	if resp.Succeeded {
		return nil
	}
	now := t.results(resp)
	if now[s.chainKey(c.ID)] == nil {
		return nil
	}
	if err := t.ownership(s, now); err != nil {
		return fmt.Errorf("%s %s: %w", op, c.ID, err)
	}
	return fmt.Errorf("%s %s: %w", op, c.ID, ErrConflict)
}

// ledgerIn decodes a ledger that a failed transaction read.
func (s *Store) ledgerIn(now map[string]*mvccpb.KeyValue, id entry.LedgerID) (Ledger, error) {
	key := s.ledgerKey(id)
	kv := now[key]
	if kv == nil {
		return Ledger{}, fmt.Errorf("ledger %d: %w", id, ErrNotFound)
	}
	return decodeLedger(key, id, kv.Value, kv.ModRevision)
}

// chainLastOp reads which transaction wrote a chain's head; 0 when that can't be told.
func chainLastOp(kv *mvccpb.KeyValue) uint64 {
	var m metav1.Chain
	if decode(string(kv.Key), kv.Value, &m) != nil {
		return 0
	}
	return m.LastOp
}
