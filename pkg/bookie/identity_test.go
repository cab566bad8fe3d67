package bookie

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// cookieJar keeps the cluster's records of identities in memory.
type cookieJar struct {
	cookies map[string]entry.UUID
	starts  map[string]uint64
	retired map[entry.UUID]bool
	err     error
	// crash, if set, is returned after the record was made.
	crash error
}

func newJar() *cookieJar {
	return &cookieJar{cookies: make(map[string]entry.UUID), starts: make(map[string]uint64), retired: make(map[entry.UUID]bool)}
}

func (j *cookieJar) GetCookie(_ context.Context, id string) (meta.Cookie, error) {
	u, ok := j.cookies[id]
	switch {
	case j.err != nil:
		return meta.Cookie{}, j.err
	case !ok:
		return meta.Cookie{}, meta.ErrNotFound
	}
	return meta.Cookie{ID: id, UUID: u, Starts: j.starts[id]}, nil
}

func (j *cookieJar) CountStart(_ context.Context, id string, u entry.StorageUUID, n uint64) error {
	if j.cookies[id] != u || j.starts[id] >= n {
		return meta.ErrConflict
	}
	j.starts[id] = n
	return j.crash
}

func (j *cookieJar) CreateCookie(_ context.Context, c meta.Cookie) error {
	u, ok := j.cookies[c.ID]
	switch {
	case j.retired[c.UUID]:
		return meta.ErrRetired
	case ok && u != c.UUID:
		return meta.ErrExists
	}
	j.cookies[c.ID] = c.UUID
	return j.crash
}

func identify(fs vfs.FS, jar *cookieJar) (Identity, error) {
	who, confirm, err := Identify(context.Background(), fs, "data", "b1", me.Cluster, jar)
	if err == nil && confirm != nil {
		// What opening the store does.
		if err := fs.MkdirAll("data/ledgers"); err != nil {
			return who, err
		}
		if f, err := fs.Create("data/ledgers/MANIFEST"); err == nil {
			_ = f.Sync()
			_ = f.Close()
		}
		if err := errors.Join(fs.SyncDir("data/ledgers"), fs.SyncDir("data")); err != nil {
			return who, err
		}
		err = confirm()
	}
	return who, err
}

func emptyDisk(t *testing.T) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	if err := makeDirs(fs, "data"); err != nil {
		t.Fatal(err)
	}
	return fs
}

func refused(t *testing.T, what string, err error, words ...string) {
	t.Helper()
	var ie *IdentityError
	if !errors.As(err, &ie) {
		t.Errorf("%s: not refused: %v", what, err)
		return
	}
	if ie.Advice == "" || strings.Contains(err.Error(), "\n") {
		t.Errorf("%s: %q", what, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%s: %q does not mention %q", what, err, w)
		}
	}
}

func TestIdentityOfAnEmptyDiskIsNewAndStays(t *testing.T) {
	t.Parallel()
	fs, jar := emptyDisk(t), newJar()
	who, err := identify(fs, jar)
	if err != nil || who.Storage.IsZero() || who.ID != "b1" || who.Cluster != me.Cluster || jar.cookies["b1"] != who.Storage {
		t.Fatalf("%+v %v", who, err)
	}
	fs.Crash(nil)
	again, err := identify(fs, jar)
	if err != nil || again != who {
		t.Fatalf("after a restart: %+v %v", again, err)
	}
	other, err := identify(emptyDisk(t), newJar())
	if err != nil || other.Storage == who.Storage {
		t.Fatalf("another disk: %+v %v", other, err)
	}
}

// B22: a wiped disk must not come back under its name; nothing it would answer is true.
func TestB22WipedDiskIsRefused(t *testing.T) {
	t.Parallel()
	jar := newJar()
	fs := emptyDisk(t)
	if _, err := identify(fs, jar); err != nil {
		t.Fatal(err)
	}
	_, err := identify(emptyDisk(t), jar)
	refused(t, "wiped disk", err, "is empty", "--bookie-id")
	// Only the data are gone.
	if err := errors.Join(fs.Remove("data/ledgers/MANIFEST"), fs.Remove("data/ledgers")); err != nil {
		t.Fatal(err)
	}
	_, err = identify(fs, jar)
	refused(t, "wiped data beside a cookie", err, "none of its data")
	// The log is gone, and what else is in its directory does not count. A manifest or a segment alone does: the store
	// finds out what is missing.
	for name, counts := range map[string]bool{
		"LOCK": false, "spare-1.seg": false, "MANIFEST.tmp": false, "0000000000000001-0000.seg.lost": false,
		"0000000000000001-0000.seg": true, "MANIFEST": true,
	} {
		fs := fs.Clone()
		if err := fs.MkdirAll("data/ledgers"); err != nil {
			t.Fatal(err)
		}
		f, err := fs.Create("data/ledgers/" + name)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		who, err := identify(fs, jar)
		if counts {
			if err != nil || who.Storage != jar.cookies["b1"] {
				t.Errorf("%s is there: %v", name, err)
			}
			continue
		}
		refused(t, "there is only "+name, err, "none of its data", "--bookie-id")
	}
}

// The first start is cut at each of its changes: no later one takes the disk for lost, or for fresh once it was confirmed.
func TestFirstStoreSurvivesEveryCrash(t *testing.T) {
	t.Parallel()
	start := func(fs vfs.FS, jar *cookieJar) (fresh bool, loss ledgerstore.Loss, err error) {
		who, confirm, err := Identify(t.Context(), fs, "data", "b1", me.Cluster, jar)
		if err != nil {
			return false, loss, err
		}
		fresh = confirm != nil
		store, err := ledgerstore.Open(t.Context(), ledgerstore.Config{
			Dir: "data/ledgers", Cluster: who.Cluster, Storage: who.Storage, Fresh: fresh, SegmentSize: 32 << 10, Spares: 1, CompactBytesPerSecond: -1,
		}, fs, quiet(), nil)
		if err != nil {
			return fresh, loss, err
		}
		loss = store.Loss()
		if fresh {
			err = confirm()
		}
		return fresh, loss, errors.Join(err, store.Close())
	}
	for cut := range 200 {
		fs, jar := emptyDisk(t), newJar()
		fs.CutPowerAfter(cut)
		_, _, first := start(fs, jar)
		fs.CutPowerAfter(-1)
		fs.Crash(rand.New(rand.NewPCG(1, uint64(cut))))
		for again := range 2 {
			fresh, loss, err := start(fs, jar)
			if err != nil || loss.All || len(loss.Ledgers) > 0 || fresh && (first == nil || again > 0) {
				t.Fatalf("cut %d, start %d: fresh %v, loss %+v, %v", cut, again+2, fresh, loss, err)
			}
		}
		if first == nil {
			return
		}
	}
	t.Fatal("200 changes were not enough")
}

// B24: a disk with data and without a cookie is not a new one; nor is a cookie without a record.
func TestB24MissingCookieIsRefused(t *testing.T) {
	t.Parallel()
	fs, jar := emptyDisk(t), newJar()
	if _, err := identify(fs, jar); err != nil {
		t.Fatal(err)
	}
	_, err := identify(fs, newJar())
	refused(t, "no record", err, "no record")
	if err := fs.Remove("data/COOKIE"); err != nil {
		t.Fatal(err)
	}
	_, err = identify(fs, jar)
	refused(t, "no cookie, record", err, "no cookie")
	_, err = identify(fs, newJar())
	refused(t, "no cookie, no record", err, "no cookie")
}

func TestIdentityRefusesWhatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	fs, jar := emptyDisk(t), newJar()
	if _, err := identify(fs, jar); err != nil {
		t.Fatal(err)
	}
	_, _, err := Identify(t.Context(), fs, "data", "b1", entry.UUID{7}, jar)
	refused(t, "another cluster", err, "cluster", "--cluster")
	jar.cookies["b2"] = entry.UUID{8}
	_, _, err = Identify(t.Context(), fs, "data", "b2", me.Cluster, jar)
	refused(t, "another bookie", err, `"b1"`, "--bookie-id")
	other := newJar()
	other.cookies["b1"] = entry.UUID{9}
	_, err = identify(fs, other)
	refused(t, "swapped disk", err, "knows bookie")
	jar.err = meta.ErrUnavailable
	if _, err = identify(fs, jar); !errors.Is(err, meta.ErrUnavailable) {
		t.Errorf("etcd away: %v", err)
	}
	jar.err = nil

	f, err := fs.Open("data/COOKIE")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xff}, 30); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	_, err = identify(fs, jar)
	refused(t, "damaged cookie", err, "checksum", "do not delete")
}

// Whatever moment the first start is cut at, a later one completes it, with one identity in the end.
func TestIdentityFirstStartSurvivesEveryCrash(t *testing.T) {
	t.Parallel()
	for cut := range 60 {
		for seed := range uint64(4) {
			fs, jar := emptyDisk(t), newJar()
			fs.CutPowerAfter(cut)
			_, first := identify(fs, jar)
			fs.CutPowerAfter(-1)
			fs.Crash(rand.New(rand.NewPCG(seed, uint64(cut))))
			who, err := identify(fs, jar)
			if err != nil {
				t.Fatalf("cut %d, seed %d: %v\n%s", cut, seed, err, fs)
			}
			if jar.cookies["b1"] != who.Storage {
				t.Fatalf("cut %d, seed %d: two identities", cut, seed)
			}
			if first == nil && cut > 40 {
				return
			}
		}
	}
	t.Fatal("60 changes were not enough")
}

func TestIdentityRecordMadeAndProcessGone(t *testing.T) {
	t.Parallel()
	fs, jar := emptyDisk(t), newJar()
	jar.crash = errors.New("killed")
	if _, err := identify(fs, jar); err == nil {
		t.Fatal("not killed")
	}
	jar.crash = nil
	fs.Crash(nil)
	who, err := identify(fs, jar)
	if err != nil || jar.cookies["b1"] != who.Storage {
		t.Fatalf("%+v %v", who, err)
	}
	// Two empty disks under one name: the second is refused.
	second, contested := emptyDisk(t), newJar()
	d := disk{fs: second, dir: "data"}
	if err := d.create(Cookie{Identity: Identity{Cluster: me.Cluster, Storage: entry.UUID{3}, ID: "b1"}}); err != nil {
		t.Fatal(err)
	}
	contested.cookies["b1"] = entry.UUID{4}
	_, err = identify(second, contested)
	refused(t, "second disk", err)
	contested.cookies = map[string]entry.UUID{}
	contested.retired[entry.UUID{3}] = true
	_, err = identify(second, contested)
	refused(t, "retired", err, "retired")
}

func testCookie() Cookie {
	cluster, _ := entry.ParseUUID("11111111-2222-3333-4444-555555555555")
	storage, _ := entry.ParseUUID("aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
	return Cookie{Identity: Identity{Cluster: cluster, Storage: storage, ID: "b1"}, Created: time.UnixMilli(1_700_000_000_000)}
}

func TestCookieBytes(t *testing.T) {
	t.Parallel()
	b, err := encodeCookie(testCookie())
	if err != nil {
		t.Fatal(err)
	}
	checkDocumented(t, "bookie-cookie", b)
	got, err := decodeCookie(b)
	if err != nil || got != testCookie() {
		t.Fatalf("%+v %v", got, err)
	}
	for i := range b {
		if _, err := decodeCookie(b[:i]); err == nil {
			t.Fatalf("cut at %d is accepted", i)
		}
		bad := bytes.Clone(b)
		bad[i] ^= 0x10
		if _, err := decodeCookie(bad); err == nil {
			t.Fatalf("damage at %d is accepted", i)
		}
	}
	if _, err := encodeCookie(Cookie{}); err == nil {
		t.Fatal("a cookie without a bookie id was encoded")
	}
}

// checkDocumented compares bytes with the example of that name in docs/formats.md.
func checkDocumented(t *testing.T, name string, b []byte) {
	t.Helper()
	page, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "```hex "+name+"\n")
	if !found {
		t.Fatalf("docs/formats.md has no block hex %s", name)
	}
	block, _, _ := strings.Cut(rest, "```")
	var digits strings.Builder
	for line := range strings.Lines(block) {
		code, _, _ := strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(code), ""))
	}
	if got := digits.String(); got != hex.EncodeToString(b) {
		t.Fatalf("docs/formats.md, hex %s:\n page %s\n code %x", name, got, b)
	}
}

func FuzzCookie(f *testing.F) {
	good, err := encodeCookie(testCookie())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte("PNSTCOOK"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 4 {
			// Make the checksum good, so that the fuzzer gets behind it.
			fixed := bytes.Clone(b)
			crc := entry.CRC32C(fixed[:len(fixed)-4])
			fixed[len(fixed)-4], fixed[len(fixed)-3], fixed[len(fixed)-2], fixed[len(fixed)-1] = byte(crc>>24), byte(crc>>16), byte(crc>>8), byte(crc)
			b = fixed
		}
		c, err := decodeCookie(b)
		if err != nil {
			return
		}
		again, err := encodeCookie(c)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := decodeCookie(again); err != nil || got != c {
			t.Fatalf("%+v became %+v, %v", c, got, err)
		}
		_ = fmt.Sprint(c)
	})
}
