package meta

import (
	"context"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// BrokerRegisteredError says that a broker id is registered under another lease that is alive: by another process, or
// by an earlier life of the caller's that died less than its lease's TTL ago.
type BrokerRegisteredError struct {
	Info  BrokerInfo
	Lease clientv3.LeaseID
}

// Error implements error.
func (e *BrokerRegisteredError) Error() string {
	return fmt.Sprintf("broker %s is registered at %s", e.Info.ID, e.Info.Peer)
}

// RegisterBroker announces a live broker under its lease. Its id must not be registered under another lease
// ([*BrokerRegisteredError]). over, if not 0, is the lease of such a registration whose process the caller knows to be
// gone.
func (s *Store) RegisterBroker(ctx context.Context, b BrokerInfo, lease, over clientv3.LeaseID) error {
	const op = "register broker"
	if err := checkID("broker", b.ID); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	value, err := encodeBroker(b)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	key := s.brokerKey(b.ID)
	holder, err := s.register(ctx, op, key, value, lease, over, func(*txn) {}, func(*txn, map[string]*mvccpb.KeyValue) error { return nil })
	if holder == nil {
		return err
	}
	info, err := decodeBroker(key, holder.Value)
	if err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", op, &BrokerRegisteredError{Info: info, Lease: clientv3.LeaseID(holder.Lease)})
}

// register puts a registration under lease, unless it is there under another one than lease and over, and returns that
// holder then. guard adds what must be so besides; refused says what of that is not.
func (s *Store) register(
	ctx context.Context, op, key, value string, lease, over clientv3.LeaseID, guard func(*txn), refused func(*txn, map[string]*mvccpb.KeyValue) error,
) (*mvccpb.KeyValue, error) {
	for seen := int64(0); ; {
		var t txn
		guard(&t)
		t.compareRev(key, seen)
		t.put(key, value, clientv3.WithLease(lease))
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil || resp.Succeeded {
			return nil, err
		}
		now := t.results(resp)
		if err := refused(&t, now); err != nil {
			return nil, err
		}
		kv := now[key]
		if holder := clientv3.LeaseID(kv.GetLease()); kv != nil && holder != lease && (holder != over || over == 0) {
			return kv, nil
		}
		seen = kv.GetModRevision() // 0: its lease has just ended
	}
}

// DeregisterBroker withdraws the registration made under lease. One that is gone, or another's, is no error.
func (s *Store) DeregisterBroker(ctx context.Context, id string, lease clientv3.LeaseID) error {
	return s.deregister(ctx, "deregister broker", s.brokerKey(id), lease)
}

// BookieRegisteredError says that a storage identity is registered under another lease that is alive: by another
// process, or by an earlier life of the caller's that died less than its lease's TTL ago.
type BookieRegisteredError struct {
	Info  BookieInfo
	Lease clientv3.LeaseID
}

// Error implements error.
func (e *BookieRegisteredError) Error() string {
	return fmt.Sprintf("storage %s is registered at %s", e.Info.UUID, e.Info.Data)
}

// RegisterBookie announces a live bookie under its lease. Its cookie must be there ([ErrNotFound]) and name that
// identity ([ErrConflict]), which must not be retired ([ErrRetired]) nor be registered under another lease
// ([*BookieRegisteredError]): two processes that answer for one identity would each deny what the other has
// acknowledged. over, if not 0, is the lease of such a registration whose process the caller knows to be gone.
func (s *Store) RegisterBookie(ctx context.Context, b BookieInfo, lease, over clientv3.LeaseID) error {
	const op = "register bookie"
	fail := func(err error) error { return fmt.Errorf("%s %s: %w", op, b.ID, err) }
	cookie, rev, err := s.getCookie(ctx, b.ID)
	if err != nil {
		return fail(err)
	}
	if cookie.UUID != b.UUID {
		return fail(fmt.Errorf("%w: its cookie names %s, its disk %s", ErrConflict, cookie.UUID, b.UUID))
	}
	value, err := encodeBookie(b)
	if err != nil {
		return fail(err)
	}
	key := s.bookieKey(b.UUID)
	holder, err := s.register(ctx, op, key, value, lease, over, func(t *txn) {
		t.compareRev(s.cookieKey(b.ID), rev)
		t.compareUnretired(s, b.UUID)
	}, func(t *txn, now map[string]*mvccpb.KeyValue) error {
		if err := t.retirement(s, now); err != nil {
			return fail(err)
		}
		if now[s.cookieKey(b.ID)].GetModRevision() != rev {
			return fail(fmt.Errorf("cookie: %w", ErrConflict))
		}
		return nil
	})
	if holder == nil {
		return err
	}
	info, err := decodeBookie(key, holder.Value)
	if err != nil {
		return err
	}
	return fail(&BookieRegisteredError{Info: info, Lease: clientv3.LeaseID(holder.Lease)})
}

// BookieLease returns the lease that a storage identity is registered under, or [ErrNotFound].
func (s *Store) BookieLease(ctx context.Context, u entry.StorageUUID) (clientv3.LeaseID, error) {
	const op = "read registration"
	resp, err := s.read(ctx, op, clientv3.OpGet(s.bookieKey(u)))
	if err != nil {
		return 0, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return 0, fmt.Errorf("%s of storage %s: %w", op, u, ErrNotFound)
	}
	return clientv3.LeaseID(kvs[0].Lease), nil
}

// UpdateBookie replaces a bookie's registration under the same lease, or returns [ErrLease] when there is none.
func (s *Store) UpdateBookie(ctx context.Context, b BookieInfo, lease clientv3.LeaseID) error {
	const op = "update bookie"
	if lease == clientv3.NoLease {
		// To etcd that is what a key that is not there has: the update would make a registration that never ends.
		return fmt.Errorf("%s %s: %w", op, b.ID, ErrLease)
	}
	value, err := encodeBookie(b)
	if err != nil {
		return fmt.Errorf("%s %s: %w", op, b.ID, err)
	}
	key := s.bookieKey(b.UUID)
	resp, err := s.commit(ctx, op, []clientv3.Cmp{clientv3.Compare(clientv3.LeaseValue(key), "=", lease)},
		[]clientv3.Op{clientv3.OpPut(key, value, clientv3.WithLease(lease))}, nil)
	if err != nil {
		return err
	}
	if !resp.Succeeded {
		return fmt.Errorf("%s %s: %w", op, b.ID, ErrLease)
	}
	return nil
}

// DeregisterBookie withdraws the registration made under lease. One that is gone, or another's, is no error.
func (s *Store) DeregisterBookie(ctx context.Context, u entry.StorageUUID, lease clientv3.LeaseID) error {
	return s.deregister(ctx, "deregister bookie", s.bookieKey(u), lease)
}

func (s *Store) deregister(ctx context.Context, op, key string, lease clientv3.LeaseID) error {
	_, err := s.commit(ctx, op, []clientv3.Cmp{clientv3.Compare(clientv3.LeaseValue(key), "=", lease)},
		[]clientv3.Op{clientv3.OpDelete(key)}, nil)
	return err
}

// CreateCookie ties a bookie id to the identity of a new disk. Repeating it is no error. It returns
// [ErrExists] when the id has another identity, [ErrRetired] for an identity that is gone for good.
func (s *Store) CreateCookie(ctx context.Context, c Cookie) error {
	const op = "create cookie"
	fail := func(err error) error { return fmt.Errorf("%s of bookie %s: %w", op, c.ID, err) }
	if err := checkID("bookie", c.ID); err != nil {
		return fail(err)
	}
	if c.UUID.IsZero() {
		return fail(fmt.Errorf("%w: no storage identity", ErrInvalid))
	}
	value, err := encode(&metav1.Cookie{Id: c.ID, Storage: c.UUID[:], CreatedMs: millis(c.Created)})
	if err != nil {
		return fail(err)
	}
	key := s.cookieKey(c.ID)
	var t txn
	t.compareRev(key, 0)
	t.compareUnretired(s, c.UUID)
	t.put(key, value)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return err
	}
	if resp.Succeeded {
		return nil
	}
	now := t.results(resp)
	if err := t.retirement(s, now); err != nil {
		return fail(err)
	}
	found, err := decodeCookie(key, now[key].GetValue())
	if err != nil {
		return err
	}
	if found.UUID != c.UUID {
		return fail(fmt.Errorf("%w with identity %s", ErrExists, found.UUID))
	}
	return nil
}

// CountStart notes that a bookie starts on its disk for the nth time, as the disk counts; starts may have been missed. It
// returns [ErrNotFound] without a cookie, and [ErrConflict] when the cookie names another identity, or as many starts
// already: then another copy of that disk was started.
func (s *Store) CountStart(ctx context.Context, id string, u entry.StorageUUID, n uint64) error {
	const op = "count start"
	fail := func(err error) error { return fmt.Errorf("%s %d of bookie %s: %w", op, n, id, err) }
	cookie, rev, err := s.getCookie(ctx, id)
	switch {
	case err != nil:
		return fail(err)
	case cookie.UUID != u:
		return fail(fmt.Errorf("%w: its cookie names %s, its disk %s", ErrConflict, cookie.UUID, u))
	case cookie.Starts >= n:
		return fail(fmt.Errorf("%w: it has started %d times", ErrConflict, cookie.Starts))
	}
	m := &metav1.Cookie{Id: id, Storage: u[:], CreatedMs: millis(cookie.Created), Starts: n, LastOp: newOp()}
	value, err := encode(m)
	if err != nil {
		return fail(err)
	}
	key := s.cookieKey(id)
	var t txn
	t.compareRev(key, rev)
	t.put(key, value)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil || resp.Succeeded {
		return err
	}
	kv := t.results(resp)[key]
	if kv == nil {
		return fail(ErrNotFound)
	}
	var found metav1.Cookie
	if err := decode(key, kv.Value, &found); err != nil {
		return err
	}
	if found.LastOp != m.LastOp { // not an earlier attempt of this call
		return fail(fmt.Errorf("%w: it has started %d times", ErrConflict, found.Starts))
	}
	return nil
}

// GetCookie reads a bookie's cookie, linearizably, or returns [ErrNotFound].
func (s *Store) GetCookie(ctx context.Context, id string) (Cookie, error) {
	c, _, err := s.getCookie(ctx, id)
	return c, err
}

func (s *Store) getCookie(ctx context.Context, id string) (Cookie, int64, error) {
	const op = "get cookie"
	if err := checkID("bookie", id); err != nil {
		return Cookie{}, 0, fmt.Errorf("%s: %w", op, err)
	}
	key := s.cookieKey(id)
	resp, err := s.read(ctx, op, clientv3.OpGet(key))
	if err != nil {
		return Cookie{}, 0, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Cookie{}, 0, fmt.Errorf("%s of bookie %s: %w", op, id, ErrNotFound)
	}
	c, err := decodeCookie(key, kvs[0].Value)
	return c, kvs[0].ModRevision, err
}

// ListCookies lists every identity the cluster knows, by bookie id, and those that are retired after them.
func (s *Store) ListCookies(ctx context.Context) ([]Cookie, error) {
	resp, err := s.read(ctx, "list cookies", clientv3.OpGet(s.cookiesPrefix(), clientv3.WithPrefix()),
		clientv3.OpGet(s.retiredPrefix(), clientv3.WithPrefix()))
	if err != nil {
		return nil, err
	}
	var all []Cookie
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		c, err := decodeCookie(string(kv.Key), kv.Value)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		c, err := s.decodeRetired(kv)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

func (s *Store) decodeRetired(kv *mvccpb.KeyValue) (Cookie, error) {
	key := string(kv.Key)
	var m metav1.Retired
	if err := decode(key, kv.Value, &m); err != nil {
		return Cookie{}, err
	}
	u, err := entry.ParseUUID(key[len(s.retiredPrefix()):])
	if err != nil {
		return Cookie{}, &CorruptRecordError{Key: key, Err: err}
	}
	return Cookie{ID: m.Id, UUID: u, Created: fromMillis(m.RetiredMs), Retired: true}, nil
}

// RetireStorage declares that the identity of bookie id is gone for good, in one transaction that proves that
// no ledger and no intent names it; it returns [ErrNotEmpty] while one does. The id is free for a new disk
// then; the identity's registration and mark are gone. Repeating it is no error.
func (s *Store) RetireStorage(ctx context.Context, id string, u entry.StorageUUID) error {
	const op = "retire storage"
	fail := func(err error) error { return fmt.Errorf("%s %s of bookie %s: %w", op, u, id, err) }
	if err := checkID("bookie", id); err != nil {
		return fail(err)
	}
	value, err := encode(&metav1.Retired{Id: id, RetiredMs: millis(time.Now())})
	if err != nil {
		return fail(err)
	}
	cookie, rev, err := s.getCookie(ctx, id)
	if err != nil || cookie.UUID != u {
		// Done before, perhaps by an attempt whose reply was lost.
		resp, readErr := s.read(ctx, op, clientv3.OpGet(s.retiredKey(u)))
		switch {
		case readErr != nil:
			return readErr
		case len(resp.Responses[0].GetResponseRange().Kvs) > 0:
			return nil
		case err != nil:
			return fail(err)
		}
		return fail(fmt.Errorf("%w: its cookie names %s", ErrConflict, cookie.UUID))
	}
	var t txn
	s.retire(&t, id, u, rev, value)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return err
	}
	now := t.results(resp)
	switch {
	case resp.Succeeded, now[s.retiredKey(u)] != nil:
		return nil
	case now[s.cookieKey(id)].GetModRevision() != rev:
		return fail(fmt.Errorf("cookie: %w", ErrConflict))
	}
	return fail(fmt.Errorf("ledgers name it: %w", ErrNotEmpty))
}

// retire adds to t what [Store.RetireStorage] compares and does; the cookie was seen at revision cookie.
func (s *Store) retire(t *txn, id string, u entry.StorageUUID, cookie int64, value string) {
	t.compareRev(s.cookieKey(id), cookie)
	t.compareEmpty(s.holderPrefix(u))
	t.compareUnretired(s, u)
	t.put(s.retiredKey(u), value)
	t.del(s.cookieKey(id))
	t.del(s.bookieKey(u))
	t.del(s.markKey(u))
}
