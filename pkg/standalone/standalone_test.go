package standalone_test

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/standalone"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Data of bookies that would not run is not left behind in silence.
func TestFewerBookiesThanThereAreIsRefused(t *testing.T) {
	t.Parallel()
	cfg := standalone.Config{Dir: t.TempDir(), Bookies: 2, SegmentSize: 16 << 20, UnsafeNoFsync: true}
	start := func(bookies int) error {
		cfg.Bookies = bookies
		c, err := standalone.Start(t.Context(), cfg, nil)
		if err != nil {
			return err
		}
		return c.Close(t.Context())
	}
	if err := start(2); err != nil {
		t.Fatal(err)
	}
	var few *standalone.TooFewBookiesError
	if err := start(1); !errors.As(err, &few) || few.Exist != 2 || !strings.Contains(err.Error(), "--bookies 2") {
		t.Fatalf("one bookie of two: %v", err)
	}
	if err := start(3); err != nil { // and the directory was not left locked
		t.Fatal(err)
	}
}

// etcd is a part like the others: the cluster fails when it ends, and says which part it was.
func TestAnEtcdThatEndsIsAFailure(t *testing.T) {
	t.Parallel()
	c, err := standalone.Start(t.Context(), standalone.Config{Dir: t.TempDir(), SegmentSize: 16 << 20, UnsafeNoFsync: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.HaltEtcd()
	if err := <-c.Failed(); err == nil || !strings.Contains(err.Error(), "etcd") || !strings.Contains(err.Error(), "ended by itself") {
		t.Fatalf("failure: %v", err)
	}
	stop, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_ = c.Close(stop) // nothing can be handed over
}

// A second process on the same directory is told so at once, and the first one is not disturbed.
func TestADirectoryInUseIsRefused(t *testing.T) {
	t.Parallel()
	cfg := standalone.Config{Dir: t.TempDir(), SegmentSize: 16 << 20, UnsafeNoFsync: true}
	first, err := standalone.Start(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := standalone.Start(t.Context(), cfg, nil); !errors.Is(err, vfs.ErrLocked) || !strings.Contains(err.Error(), cfg.Dir) {
		t.Fatalf("second start: %v", err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := standalone.Start(t.Context(), cfg, nil)
	if err != nil {
		t.Fatalf("start after the first one ended: %v", err)
	}
	if err := again.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A developer's machine has other things on its disk: an empty cluster allocates little of it.
func TestAnEmptyClusterTakesLittleDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c, err := standalone.Start(t.Context(), standalone.Config{Dir: dir}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	var taken int64
	if err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // renamed meanwhile
		}
		if err == nil {
			taken += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if taken > 150<<20 {
		t.Errorf("an empty cluster takes %d MiB", taken>>20)
	}
}
