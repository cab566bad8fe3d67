package meta

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// maxBundles bounds the bundles of one namespace.
const maxBundles = 4096

// CreateTenant creates a tenant, or returns [ErrExists].
func (s *Store) CreateTenant(ctx context.Context, name string) error {
	const op = "create tenant"
	if err := topicname.CheckTenant(name); err != nil {
		return fmt.Errorf("%s: %w: %w", op, ErrInvalid, err)
	}
	value, err := encode(&metav1.Tenant{CreatedMs: millis(time.Now()), LastOp: newOp()})
	if err != nil {
		return err
	}
	var t txn
	t.compareRev(s.tenantKey(name), 0)
	t.put(s.tenantKey(name), value)
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return err
	}
	// The same bytes are an earlier attempt of this call, whose reply was lost.
	if !resp.Succeeded && string(t.results(resp)[s.tenantKey(name)].GetValue()) != value {
		return fmt.Errorf("%s %q: %w", op, name, ErrExists)
	}
	return nil
}

// ListTenants lists the tenants by name.
func (s *Store) ListTenants(ctx context.Context) ([]string, error) {
	resp, err := s.read(ctx, "list tenants", clientv3.OpGet(s.tenantsPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly()))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		names = append(names, string(kv.Key[len(s.tenantsPrefix()):]))
	}
	return names, nil
}

// DeleteTenant deletes a tenant. It returns [ErrNotFound], or [ErrNotEmpty] while it has namespaces.
func (s *Store) DeleteTenant(ctx context.Context, name string) error {
	const op = "delete tenant"
	if err := topicname.CheckTenant(name); err != nil {
		return fmt.Errorf("%s: %w: %w", op, ErrInvalid, err)
	}
	var t txn
	t.compareExists(s.tenantKey(name))
	t.compareEmpty(s.namespacesPrefix(name) + "/")
	t.del(s.tenantKey(name))
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return err
	}
	if resp.Succeeded {
		return nil
	}
	if t.results(resp)[s.tenantKey(name)] == nil {
		return fmt.Errorf("%s %q: %w", op, name, ErrNotFound)
	}
	return fmt.Errorf("%s %q: it has namespaces: %w", op, name, ErrNotEmpty)
}

// newNamespace splits all hashes evenly among bundles numbered from first.
func newNamespace(name string, p Policies, first uint32, bundles int, created time.Time) Namespace {
	ns := Namespace{Name: name, Policies: p, Created: created}
	var from uint64
	for i := range uint64(bundles) {
		next := (i + 1) << 32 / uint64(bundles)
		ns.Bundles = append(ns.Bundles, Bundle{
			ID:    bundleID(name, first+uint32(i)),
			First: uint32(from), Last: uint32(next - 1),
		})
		from = next
	}
	return ns
}

// putNewNamespace adds to t a namespace and the next free bundle number, which was last seen at numbersRev.
func (s *Store) putNewNamespace(t *txn, ns Namespace, numbersRev int64, lastOp uint64) error {
	_, last, err := ns.Bundles[len(ns.Bundles)-1].ID.Split()
	if err != nil {
		return err
	}
	numbers, err := encode(&metav1.BundleNumbers{Next: last + 1})
	if err != nil {
		return err
	}
	value, err := encodeNamespace(ns, lastOp)
	if err != nil {
		return err
	}
	t.compareRev(s.namespaceKey(ns.Name), 0)
	t.put(s.namespaceKey(ns.Name), value)
	t.compareRev(s.bundleNumbersKey(ns.Name), numbersRev)
	t.put(s.bundleNumbersKey(ns.Name), numbers)
	return nil
}

// CreateNamespace creates a namespace of a tenant that exists, with bundles bundles (0: [DefaultBundles]) whose
// numbers no earlier namespace of that name had. It returns [ErrExists], or [ErrNotFound] for the tenant.
func (s *Store) CreateNamespace(ctx context.Context, name string, p Policies, bundles int) (Namespace, error) {
	const op = "create namespace"
	fail := func(err error) (Namespace, error) { return Namespace{}, fmt.Errorf("%s %q: %w", op, name, err) }
	if bundles == 0 {
		bundles = DefaultBundles
	}
	if err := checkNamespace(name); err != nil {
		return fail(err)
	}
	if bundles < 1 || bundles > maxBundles {
		return fail(fmt.Errorf("%w: %d bundles, at most %d are allowed", ErrInvalid, bundles, maxBundles))
	}
	if err := p.Validate(); err != nil {
		return fail(err)
	}
	tenant, _, _ := strings.Cut(name, "/")
	mine := newOp()
	numbersKey := s.bundleNumbersKey(name)
	resp, err := s.read(ctx, op, clientv3.OpGet(numbersKey))
	if err != nil {
		return fail(err)
	}
	var kv *mvccpb.KeyValue
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		kv = kvs[0]
	}
	for {
		var numbers metav1.BundleNumbers
		var rev int64
		if kv != nil {
			if err := decode(numbersKey, kv.Value, &numbers); err != nil {
				return fail(err)
			}
			rev = kv.ModRevision
		}
		if numbers.Next > math.MaxUint32-maxBundles {
			return fail(fmt.Errorf("%w: its bundle numbers are used up", ErrInvalid))
		}
		ns := newNamespace(name, p, numbers.Next, bundles, time.Now().Truncate(time.Millisecond))
		var t txn
		t.compareExists(s.tenantKey(tenant))
		if err := s.putNewNamespace(&t, ns, rev, mine); err != nil {
			return fail(err)
		}
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return fail(err)
		}
		if resp.Succeeded {
			ns.Rev = resp.Header.Revision
			return ns, nil
		}
		now := t.results(resp)
		if there := now[s.namespaceKey(name)]; there != nil {
			ns, lastOp, err := decodeNamespace(string(there.Key), name, there.Value, there.ModRevision)
			if err == nil && lastOp == mine {
				return ns, nil
			}
			return fail(ErrExists)
		}
		if now[s.tenantKey(tenant)] == nil {
			return fail(fmt.Errorf("tenant %q: %w", tenant, ErrNotFound))
		}
		kv = now[numbersKey]
	}
}

// GetNamespace reads a namespace with its bundles' epochs, linearizably, or returns [ErrNotFound].
func (s *Store) GetNamespace(ctx context.Context, name string) (Namespace, error) {
	const op = "get namespace"
	if err := checkNamespace(name); err != nil {
		return Namespace{}, fmt.Errorf("%s: %w", op, err)
	}
	key := s.namespaceKey(name)
	resp, err := s.read(ctx, op, clientv3.OpGet(key), clientv3.OpGet(s.epochsPrefix(name), clientv3.WithPrefix()))
	if err != nil {
		return Namespace{}, err
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return Namespace{}, fmt.Errorf("%s %q: %w", op, name, ErrNotFound)
	}
	ns, _, err := decodeNamespace(key, name, kvs[0].Value, kvs[0].ModRevision)
	if err != nil {
		return Namespace{}, err
	}
	epochs := make(map[string]entry.Epoch)
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		e, err := decodeEpoch(string(kv.Key), kv.Value)
		if err != nil {
			return Namespace{}, err
		}
		epochs[string(kv.Key)] = e
	}
	for i := range ns.Bundles {
		ns.Bundles[i].Epoch = epochs[s.epochKey(ns.Bundles[i].ID)]
	}
	return ns, nil
}

// ListNamespaces lists the namespaces of a tenant by name, without epochs; an empty tenant means all.
func (s *Store) ListNamespaces(ctx context.Context, tenant string) ([]Namespace, error) {
	prefix := s.namespacesPrefix(tenant)
	if tenant != "" {
		prefix += "/"
	}
	resp, err := s.read(ctx, "list namespaces", clientv3.OpGet(prefix, clientv3.WithPrefix()))
	if err != nil {
		return nil, err
	}
	var all []Namespace
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		ns, _, err := decodeNamespace(string(kv.Key), string(kv.Key[len(s.namespaceKey("")):]), kv.Value, kv.ModRevision)
		if err != nil {
			return nil, err
		}
		all = append(all, ns)
	}
	return all, nil
}

// UpdateNamespace replaces a namespace's policies.
func (s *Store) UpdateNamespace(ctx context.Context, name string, p Policies) (Namespace, error) {
	if err := p.Validate(); err != nil {
		return Namespace{}, fmt.Errorf("update namespace %q: %w", name, err)
	}
	return s.changeNamespace(ctx, "update namespace", name, func(ns *Namespace, _ *txn) { ns.Policies = p })
}

// MarkNamespaceDeleting makes a namespace refuse new topics, for good.
func (s *Store) MarkNamespaceDeleting(ctx context.Context, name string) (Namespace, error) {
	return s.changeNamespace(ctx, "mark namespace deleting", name, func(ns *Namespace, t *txn) {
		ns.Deleting = true
		t.put(s.namespaceDeletingKey(name), "")
	})
}

func (s *Store) changeNamespace(ctx context.Context, op, name string, change func(*Namespace, *txn)) (Namespace, error) {
	mine := newOp()
	ns, err := s.GetNamespace(ctx, name)
	if err != nil {
		return Namespace{}, err
	}
	for {
		var t txn
		next := ns
		change(&next, &t)
		value, err := encodeNamespace(next, mine)
		if err != nil {
			return Namespace{}, fmt.Errorf("%s %q: %w", op, name, err)
		}
		key := s.namespaceKey(name)
		t.compareRev(key, ns.Rev)
		t.put(key, value)
		resp, err := s.commitTxn(ctx, op, &t)
		if err != nil {
			return Namespace{}, err
		}
		if resp.Succeeded {
			next.Rev = resp.Header.Revision
			return next, nil
		}
		kv := t.results(resp)[key]
		if kv == nil {
			return Namespace{}, fmt.Errorf("%s %q: %w", op, name, ErrNotFound)
		}
		found, lastOp, err := decodeNamespace(key, name, kv.Value, kv.ModRevision)
		if err != nil {
			return Namespace{}, err
		}
		if lastOp == mine {
			return found, nil
		}
		if found.Bundles[0].ID != ns.Bundles[0].ID { // no two namespaces have the same
			return Namespace{}, fmt.Errorf("%s %q: it was deleted and created anew: %w", op, name, ErrNotFound)
		}
		ns = found
	}
}

// DeleteNamespace deletes a namespace that is marked deleting, with its owners and epochs. It returns [ErrNotFound],
// [ErrConflict] for one that is not marked, as one is that was created in the place of another, or [ErrNotEmpty]
// while it has topics or its bundles have state logs. Its bundle numbers stay used.
func (s *Store) DeleteNamespace(ctx context.Context, name string) error {
	const op = "delete namespace"
	if err := checkNamespace(name); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	var t txn
	t.compareExists(s.namespaceKey(name))
	t.compareExists(s.namespaceDeletingKey(name))
	t.compareEmpty(s.topicsPrefix(name))
	t.compareEmpty(s.bundleChainsPrefix(name))
	t.del(s.namespaceKey(name))
	t.del(s.namespaceDeletingKey(name))
	t.del(s.ownersPrefix(name), clientv3.WithPrefix())
	t.del(s.epochsPrefix(name), clientv3.WithPrefix())
	resp, err := s.commitTxn(ctx, op, &t)
	if err != nil {
		return err
	}
	if resp.Succeeded {
		return nil
	}
	switch now := t.results(resp); {
	case now[s.namespaceKey(name)] == nil:
		return fmt.Errorf("%s %q: %w", op, name, ErrNotFound)
	case now[s.namespaceDeletingKey(name)] == nil:
		return fmt.Errorf("%s %q: it is not marked deleting: %w", op, name, ErrConflict)
	}
	return fmt.Errorf("%s %q: it has topics or state logs: %w", op, name, ErrNotEmpty)
}
