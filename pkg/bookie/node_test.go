package bookie

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// town is a cluster in the shared etcd, with one bundle owned by the test.
type town struct {
	t     *testing.T
	meta  *meta.Store
	cache *meta.Cache
	guard meta.Guard
	chain meta.ChainID
	topic meta.Topic
}

func newTown(t *testing.T) *town {
	t.Helper()
	w := &town{t: t, meta: meta.New(etcd.Client(), uniqueCluster(), nil)}
	_, err := w.meta.EnsureCluster(t.Context())
	w.check(err)
	grant, err := etcd.Client().Grant(t.Context(), 600)
	w.check(err)
	const bundle = meta.BundleID("public/default/3")
	owner, err := w.meta.TakeBundle(t.Context(), bundle, meta.BrokerInfo{ID: "broker", URL: "penstock://broker:7650"}, grant.ID, meta.ExpectNone())
	w.check(err)
	w.guard = meta.Guard{Bundle: bundle, Epoch: owner.Epoch}
	w.topic, err = w.meta.CreateTopic(t.Context(), "public/default/orders", 0)
	w.check(err)
	w.chain = meta.DataChain(w.topic.UUID, 0)
	w.cache = meta.NewCache(t.Context(), w.meta)
	t.Cleanup(w.cache.Close)
	w.check(w.cache.Synced(t.Context()))
	return w
}

func (w *town) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// open opens a ledger on one bookie, closing the one before, if any.
func (w *town) open(on entry.StorageUUID) meta.Ledger {
	w.t.Helper()
	id, err := w.meta.ReserveLedgerIDs(w.t.Context(), 1)
	w.check(err)
	c, err := w.meta.GetChain(w.t.Context(), w.chain)
	w.check(err)
	_, l, err := w.meta.OpenLedger(w.t.Context(), w.guard, c, meta.Ledger{
		ID: id, Nonce: nonce, Replication: meta.Replication{Ensemble: 1, WriteQuorum: 1, AckQuorum: 1},
		Fragments: []meta.Fragment{{Slots: []meta.Slot{{UUID: on}}}},
	}, nil)
	w.check(err)
	return l
}

func (w *town) close(l meta.Ledger, entries int64) {
	w.t.Helper()
	c, err := w.meta.GetChain(w.t.Context(), w.chain)
	w.check(err)
	first := c.Runs[len(c.Runs)-1].First
	_, _, err = w.meta.CloseLedger(w.t.Context(), w.guard, c, meta.Closing{
		Ledger: l, Last: entry.EntryID(entries - 1), Length: entries, End: first + entry.Offset(entries), MaxTime: 1,
	})
	w.check(err)
}

func (w *town) delete(l meta.Ledger) {
	w.t.Helper()
	c, err := w.meta.GetChain(w.t.Context(), w.chain)
	w.check(err)
	_, err = w.meta.DeleteLedger(w.t.Context(), w.guard, c, l.ID)
	w.check(err)
}

// await waits until the watched registration of u satisfies holds.
func (w *town) await(u entry.StorageUUID, holds func(info meta.BookieInfo, registered bool) bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	for {
		changed := w.cache.Changed(meta.KindBookies)
		if info, ok := w.cache.Bookie(u); holds(info, ok) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			info, ok := w.cache.Bookie(u)
			w.t.Fatalf("waited in vain; registered %t: %+v", ok, info)
		}
	}
}

func (w *town) config(dir string) Config {
	return Config{
		ID: "bookie-1", DataDir: dir, Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", HTTPListen: "127.0.0.1:0",
		Zone: "z1", HostLabel: "host-1", Version: "test",
		// The disk of the machine that tests may be as full as it likes.
		Store:                ledgerstore.Config{SegmentSize: 1 << 20, CompactBytesPerSecond: -1, LowRatio: 0.9999, HighRatio: 0.9999},
		RegistrationInterval: 20 * time.Millisecond,
	}
}

func (w *town) env(fs vfs.FS) Env {
	registry := prometheus.NewRegistry()
	return Env{
		Meta: w.meta, FS: fs, Log: quiet(), Registerer: registry, Gatherer: registry,
		NewSession: func(ctx context.Context) (*lease.Session, error) {
			return lease.NewSession(ctx, etcd.Client(), 5*time.Second, quiet())
		},
	}
}

func (w *town) start(cfg Config, fs vfs.FS) *Bookie {
	w.t.Helper()
	b, err := Start(w.t.Context(), cfg, w.env(fs))
	w.check(err)
	w.t.Cleanup(func() { _ = b.Shutdown(context.Background()) })
	return b
}

func (w *town) client() *bookieclient.Client {
	cluster, err := w.meta.GetCluster(w.t.Context())
	w.check(err)
	c := bookieclient.New(bookieclient.Config{Cluster: cluster.UUID, BackoffMin: time.Millisecond, BackoffMax: time.Millisecond},
		func(u entry.StorageUUID) (string, bool) {
			info, ok := w.cache.Bookie(u)
			return info.Data, ok
		}, quiet(), nil)
	w.t.Cleanup(c.Close)
	return c
}

func addTo(c *bookieclient.Client, u entry.StorageUUID, a *bookiewire.Add) bookiewire.Code {
	done := make(chan error, 1)
	c.Add(u, a, func(err error) { done <- err })
	return code(<-done)
}

func readFrom(t *testing.T, c *bookieclient.Client, u entry.StorageUUID, l entry.LedgerID, e entry.EntryID) (string, bookiewire.Code) {
	t.Helper()
	type result struct {
		body string
		code bookiewire.Code
	}
	done := make(chan result, 1)
	c.Read(t.Context(), u, bookiewire.Read{Ledger: l, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1}, func(r bookiewire.ReadReply, err error) {
		x := result{code: code(err)}
		if err == nil {
			x.body = string(r.Entries[0].Body)
		}
		done <- x
	})
	x := <-done
	return x.body, x.code
}

// What repair asks: which entries are here, what is damaged, and to look for damage now. A call that is meant for another bookie is refused.
func TestControlCallsOfRepair(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	b := w.start(w.config(t.TempDir()), vfs.OS())
	u := b.Storage()
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return ok })
	l := w.open(u)
	data := w.client()
	for _, e := range []entry.EntryID{0, 1, 5} {
		if c := addTo(data, u, makeAdd(l.ID, e, "body")); c != bookiewire.OK {
			t.Fatalf("add entry %d: %s", e, c)
		}
	}
	addr := b.GRPCAddr()
	control := bookieclient.NewControl(func(entry.StorageUUID) (string, bool) { return addr, true })
	t.Cleanup(control.Close)
	got, err := control.ListEntries(t.Context(), u, l.ID, 0, 8)
	w.check(err)
	if !got.Known || got.Limbo || len(got.Bits) != 2 || got.Bits[0] != 1|1<<1|1<<5 || got.Bits[1] != 0 {
		t.Errorf("listed %+v", got)
	}
	if got, err = control.ListEntries(t.Context(), u, l.ID+1, 0, 0); err != nil || got.Known || got.Bits[0] != 0 {
		t.Errorf("of a ledger that is not here: %+v, %v", got, err)
	}
	if _, err := control.ListEntries(t.Context(), u, l.ID, 0, bookieclient.MaxListed); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a range that is too long: %v", err)
	}
	if _, err := control.ListEntries(t.Context(), entry.StorageUUID{9}, l.ID, 0, 0); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a call for another bookie: %v", err)
	}
	if _, err := control.ListDamage(t.Context(), entry.StorageUUID{9}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("likewise: %v", err)
	}
	w.check(b.store.SetLimbo(t.Context(), l.ID))
	all, err := control.ListDamage(t.Context(), u)
	w.check(err)
	if len(all) != 1 || all[0] != (bookieclient.Damage{Ledger: l.ID, Limbo: true}) {
		t.Errorf("damage is %+v", all)
	}
	w.check(control.EndLimbo(t.Context(), u, l.ID))
	if all, err := control.ListDamage(t.Context(), u); err != nil || len(all) != 0 {
		t.Errorf("damage is %+v, %v", all, err)
	}
	if sum, err := w.control(b).Scrub(t.Context(), &bookiev1.ScrubRequest{}); err != nil || sum.GetDamaged() != 0 {
		t.Errorf("scrub: %v, %v", sum, err)
	}
	addr = ""
	if _, err := control.ListDamage(t.Context(), u); err == nil || !strings.Contains(err.Error(), "--grpc-listen") {
		t.Errorf("a bookie without control calls: %v", err)
	}
}

// A bookie's life with real etcd, real files and real sockets.
func TestBookieEndToEnd(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	dir := t.TempDir()
	b := w.start(w.config(dir), vfs.OS())
	u := b.Storage()
	w.await(u, func(i meta.BookieInfo, ok bool) bool { return ok })
	info, _ := w.cache.Bookie(u)
	if info.ID != "bookie-1" || info.Data != b.DataAddr() || info.GRPC != b.GRPCAddr() || info.HTTP != b.HTTPAddr() || info.Zone != "z1" ||
		info.Host != "host-1" || info.State != meta.BookieWritable || info.FreeBytes == 0 || info.TotalBytes < info.FreeBytes {
		t.Fatalf("registration %+v", info)
	}

	client := w.client()
	l := w.open(u)
	for i := range 10 {
		if c := addTo(client, u, makeAdd(l.ID, entry.EntryID(i), fmt.Sprint("body ", i))); c != bookiewire.OK {
			t.Fatalf("add %d: %s", i, c)
		}
	}
	if body, c := readFrom(t, client, u, l.ID, 4); body != "body 4" {
		t.Fatalf("read: %q %s", body, c)
	}

	for path, want := range map[string]string{
		"/livez": "ok", "/readyz": "ok", "/metrics": `penstock_bookie_adds_total{code="OK"} 10`, "/debug/pprof/cmdline": "",
	} {
		status, body := get(t, b.HTTPAddr(), path)
		if status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d %.200s", path, status, body)
		}
	}

	control := w.control(b)
	i, err := control.Info(t.Context(), &bookiev1.InfoRequest{})
	w.check(err)
	if i.Id != "bookie-1" || i.StorageUuid != u.String() || i.State != "WRITABLE" || i.Ledgers != 1 || i.Version != "test" || i.SegmentBytes == 0 {
		t.Errorf("info %v", i)
	}
	if got := w.ledgers(control); len(got) != 1 || got[0].Id != uint64(l.ID) || got[0].Entries != 10 || got[0].Bytes == 0 || got[0].Lac != 8 {
		t.Errorf("ledgers %v", got)
	}

	// It comes back with the same identity and data, at another address; writers find it.
	w.check(b.Shutdown(t.Context()))
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return !ok })
	b = w.start(w.config(dir), vfs.OS())
	if b.Storage() != u {
		t.Fatal("another identity after a restart")
	}
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return ok })
	if body, c := readFrom(t, client, u, l.ID, 9); body != "body 9" {
		t.Fatalf("read after the restart: %q %s", body, c)
	}
	if c := addTo(client, u, makeAdd(l.ID, 10, "more")); c != bookiewire.OK {
		t.Fatalf("add after the restart: %s", c)
	}

	// Its ledger is deleted, and never comes back.
	w.close(l, 11)
	w.delete(l)
	control = w.control(b)
	gc, err := control.CollectGarbage(t.Context(), &bookiev1.CollectGarbageRequest{})
	w.check(err)
	if gc.LedgersDeleted != 1 || gc.Quarantined != 0 {
		t.Errorf("collected %v", gc)
	}
	if tomb, err := w.meta.GetLedger(t.Context(), l.ID); err != nil || tomb.State != meta.LedgerDeleting || len(tomb.Fragments) != 0 {
		t.Errorf("tombstone: %+v %v", tomb, err)
	}
	if c := addTo(client, u, makeAdd(l.ID, 11, "zombie")); c != bookiewire.NotAdmitted {
		t.Errorf("zombie's add: %s", c)
	}
	if got := w.ledgers(control); len(got) != 0 {
		t.Errorf("ledgers after the deletion: %v", got)
	}
	// The same disk under another cluster's metadata, and another disk under this name, are refused.
	w.check(b.Shutdown(t.Context()))
	other := newTown(t)
	_, err = Start(t.Context(), other.config(dir), other.env(vfs.OS()))
	refused(t, "another cluster", err, "cluster")
	_, err = Start(t.Context(), w.config(t.TempDir()), w.env(vfs.OS()))
	refused(t, "wiped disk", err, "is empty")
}

func get(t *testing.T, addr, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func (w *town) control(b *Bookie) bookiev1.BookieClient {
	w.t.Helper()
	conn, err := grpc.NewClient(b.GRPCAddr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	w.check(err)
	w.t.Cleanup(func() { _ = conn.Close() })
	return bookiev1.NewBookieClient(conn)
}

func (w *town) ledgers(c bookiev1.BookieClient) []*bookiev1.ListLedgersResponse {
	w.t.Helper()
	stream, err := c.ListLedgers(w.t.Context(), &bookiev1.ListLedgersRequest{})
	w.check(err)
	var all []*bookiev1.ListLedgersResponse
	for {
		l, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		w.check(err)
		all = append(all, l)
	}
}

func TestBookieRegistersAgainAfterLosingItsLease(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	fs := vfs.NewMem()
	b := w.start(w.config("data"), fs)
	w.await(b.Storage(), func(_ meta.BookieInfo, ok bool) bool { return ok })
	first := b.session.ID()
	_, err := etcd.Client().Revoke(t.Context(), first)
	w.check(err)
	w.await(b.Storage(), func(_ meta.BookieInfo, ok bool) bool {
		return ok && b.session.ID() != first && b.session.ID() != clientv3.NoLease
	})
	// The data path did not care.
	l := w.open(b.Storage())
	if c := addTo(w.client(), b.Storage(), makeAdd(l.ID, 0, "x")); c != bookiewire.OK {
		t.Fatal(c)
	}
}

// A disk that fills up takes no new ledgers and says so; it ends by itself.
func TestBookieReportsReadOnlyAndBack(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	fs := vfs.NewMem()
	fs.SetCapacity(100 << 20)
	cfg := w.config("data")
	cfg.Store.LowRatio, cfg.Store.HighRatio = 0.90, 0.95
	b := w.start(cfg, fs)
	u := b.Storage()
	w.await(u, func(i meta.BookieInfo, ok bool) bool { return ok && i.State == meta.BookieWritable })
	client := w.client()
	l := w.open(u)
	if c := addTo(client, u, makeAdd(l.ID, 0, "x")); c != bookiewire.OK {
		t.Fatal(c)
	}
	fs.Occupy(93 << 20)
	w.await(u, func(i meta.BookieInfo, _ bool) bool { return i.State != meta.BookieWritable })
	w.close(l, 1)
	if c := addTo(client, u, makeAdd(w.open(u).ID, 0, "x")); c != bookiewire.ReadOnly {
		t.Fatalf("new ledger: %s", c)
	}
	if body, c := readFrom(t, client, u, l.ID, 0); body != "x" {
		t.Fatalf("read: %s", c)
	}
	fs.Occupy(0)
	w.await(u, func(i meta.BookieInfo, _ bool) bool { return i.State == meta.BookieWritable })
}

// A failed sync is the end of the process, and says so.
func TestBookieFailsWithItsDisk(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	mem := vfs.NewMem()
	b := w.start(w.config("data"), mem)
	w.await(b.Storage(), func(_ meta.BookieInfo, ok bool) bool { return ok })
	l := w.open(b.Storage())
	mem.CutPowerAfter(0)
	if c := addTo(w.client(), b.Storage(), makeAdd(l.ID, 0, "x")); c != bookiewire.Unknown {
		t.Errorf("add: %s", c)
	}
	if err := <-b.Failed(); err == nil {
		t.Error("no reason")
	}
	if status, _ := get(t, b.HTTPAddr(), "/livez"); status != http.StatusServiceUnavailable {
		t.Errorf("livez: %d", status)
	}
}

func TestStartRefusesBadCircumstances(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	w.check(err)
	defer taken.Close()
	cfg := w.config("data")
	cfg.HTTPListen = taken.Addr().String()
	_, err = Start(t.Context(), cfg, w.env(vfs.NewMem()))
	var le *ListenError
	if !errors.As(err, &le) || le.What != "HTTP" || !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("port in use: %v", err)
	}

	fs := vfs.NewMem()
	w.start(w.config("data"), fs)
	if _, err = Start(t.Context(), w.config("data"), w.env(fs)); !errors.Is(err, vfs.ErrLocked) {
		t.Errorf("directory in use: %v", err)
	}

	// etcd away: it waits, and gives up when it is told to.
	dead, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:1"}, Logger: zap.NewNop()})
	w.check(err)
	defer dead.Close()
	env := w.env(vfs.NewMem())
	env.Meta = meta.New(dead, "dead", quiet())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err = Start(ctx, w.config("data"), env); !errors.Is(err, meta.ErrUnavailable) {
		t.Errorf("etcd away: %v", err)
	}
}

// Garbage on any port ends its connection, and nothing else.
func TestGarbageOnEveryPort(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	b := w.start(w.config("data"), vfs.NewMem())
	u := b.Storage()
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return ok })
	rng := rand.NewChaCha8([32]byte{7})
	for what, addr := range map[string]string{"data": b.DataAddr(), "control": b.GRPCAddr(), "http": b.HTTPAddr()} {
		for _, size := range []int{1 << 10, 1 << 20} {
			c, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
			w.check(err)
			w.check(c.SetDeadline(time.Now().Add(2 * time.Minute)))
			garbage := make([]byte, size)
			_, _ = rng.Read(garbage)
			garbage = append(garbage, "\r\n\r\n"...) // the end of a header, for HTTP
			go func() { _, _ = c.Write(garbage) }()
			expectEnd(t, fmt.Sprintf("%d bytes to %s", size, what), c)
			w.check(c.Close())
		}
	}
	if status, text := get(t, b.HTTPAddr(), "/readyz"); status != http.StatusOK {
		t.Errorf("readyz: %d %s", status, text)
	}
	if _, err := w.control(b).Info(t.Context(), &bookiev1.InfoRequest{}); err != nil {
		t.Error(err)
	}
	if c := addTo(w.client(), u, makeAdd(w.open(u).ID, 0, "x")); c != bookiewire.OK {
		t.Errorf("add: %s", c)
	}
}

func TestAdvertisedAddress(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, c := range []struct {
		advertise  string
		data       bool
		want, host string
	}{
		{"", true, "host-1:" + port, "host-1"},
		{"b1.example", true, "b1.example:" + port, ""},
		{"b1.example:17651", true, "b1.example:17651", ""},
		{"b1.example:17651", false, "b1.example:" + port, ""},
	} {
		b := &Bookie{cfg: Config{Advertise: c.advertise, HostLabel: c.host}}
		if got := b.advertised(l, c.data); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
