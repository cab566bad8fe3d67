package bookie

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// started is a disk on which a bookie has started so often, and the cluster's record of it.
func started(t *testing.T, times int) (*vfs.Mem, *cookieJar, Identity) {
	t.Helper()
	fs, jar := emptyDisk(t), newJar()
	who, err := identify(fs, jar)
	if err != nil {
		t.Fatal(err)
	}
	for range times {
		if err := start(fs, jar, who); err != nil {
			t.Fatal(err)
		}
	}
	return fs, jar, who
}

func start(fs vfs.FS, jar *cookieJar, who Identity) error {
	s, err := disk{fs: fs, dir: "data"}.loadStarts(context.Background(), who, jar)
	if err != nil {
		return err
	}
	return s.count(context.Background())
}

// A disk that the bookie has not run on last would deny what was acknowledged since.
func TestAnOldCopyOfADiskIsRefused(t *testing.T) {
	t.Parallel()
	fs, jar, who := started(t, 3)
	old := fs.Clone()
	for range 2 { // the same directory elsewhere is no old copy, as long as it is the only one that is used
		fs = fs.Clone()
		if err := start(fs, jar, who); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, "old copy", start(old, jar, who), "old copy", "5 times", "knows of 3", "--bookie-id")
	refused(t, "old copy, again", start(old, jar, who), "old copy")
	if err := fs.Remove("data/START"); err != nil {
		t.Fatal(err)
	}
	refused(t, "without the count", start(fs, jar, who), "5 times", "knows of 0")
	if jar.starts["b1"] != 5 {
		t.Errorf("a refused start was counted: %d", jar.starts["b1"])
	}
}

// Of two copies that start at once, one is let in.
func TestTwinsStartAtOnce(t *testing.T) {
	t.Parallel()
	fs, jar, who := started(t, 3)
	twin := fs.Clone()
	late, err := disk{fs: twin, dir: "data"}.loadStarts(t.Context(), who, jar)
	if err != nil {
		t.Fatal(err)
	}
	if err := start(fs, jar, who); err != nil {
		t.Fatal(err)
	}
	refused(t, "twin", late.count(t.Context()), "old copy")
}

// A start that is cut short anywhere is followed by one that succeeds.
func TestAStartThatIsCutShort(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 0))
		fs, jar, who := started(t, rng.IntN(4))
		for range 20 {
			switch rng.IntN(3) {
			case 0:
				jar.crash = errors.New("the answer is lost") // the cluster has counted, and the bookie is not told
			case 1:
				fs.CutPowerAfter(rng.IntN(4))
			}
			_ = start(fs, jar, who)
			jar.crash = nil
			fs.Crash(rng)
			if err := start(fs, jar, who); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			fs.Crash(rng)
		}
	}
}

// etcd's data may be older than the disk: then something else is to be done, and not to lose the disk as well.
func TestEtcdKnowsOfFewerStarts(t *testing.T) {
	t.Parallel()
	fs, jar, who := started(t, 7)
	jar.starts["b1"] = 2
	if err := start(fs, jar, who); err != nil || jar.starts["b1"] != 8 {
		t.Errorf("%v, %d", err, jar.starts["b1"])
	}
}

// A bookie starts on a full disk, where it is to delete.
func TestStartsAreCountedOnAFullDisk(t *testing.T) {
	t.Parallel()
	fs, jar, who := started(t, 1)
	fs.SetCapacity(1)
	for range 3 {
		if err := start(fs, jar, who); err != nil {
			t.Fatal(err)
		}
	}
}

func TestADamagedCountIsRefused(t *testing.T) {
	t.Parallel()
	fs, jar, who := started(t, 4)
	f, err := fs.Open("data/START")
	if err != nil {
		t.Fatal(err)
	}
	damage := func(at int64) {
		if _, err := f.WriteAt([]byte{0xff}, at); err != nil {
			t.Fatal(err)
		}
	}
	damage(secondSlot + 20)
	if _, err := f.WriteAt(encodeStart(4), 0); err != nil {
		t.Fatal(err)
	}
	if err := start(fs, jar, who); err != nil { // one slot is enough
		t.Fatal(err)
	}
	damage(20)
	damage(secondSlot + 20)
	refused(t, "damaged", start(fs, jar, who), "damaged", "START")
	jar.err = errors.New("etcd is away")
	if err := start(fs, jar, who); err == nil {
		t.Error("counted without etcd")
	}
}

func TestStartBytes(t *testing.T) {
	t.Parallel()
	b := encodeStart(12)
	checkDocumented(t, "bookie-start", b)
	if n, err := decodeStart(b); err != nil || n != 12 {
		t.Fatal(n, err)
	}
	for i := range b {
		bad := bytes.Clone(b)
		bad[i] ^= 4
		if _, err := decodeStart(bad); err == nil {
			t.Errorf("damage at %d is accepted", i)
		}
	}
}

func FuzzStart(f *testing.F) {
	f.Add(encodeStart(0))
	f.Add(encodeStart(1 << 40))
	f.Add([]byte("PNSTSTRT"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := decodeStart(b); err == nil && b[10]|b[11]|b[12]|b[13]|b[14]|b[15] == 0 && !bytes.Equal(encodeStart(n), b) {
			t.Fatalf("%x decodes to %d", b, n)
		}
	})
}
