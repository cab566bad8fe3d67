package rawdisk

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestGroupsAreCounted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d, err := Open(t.Context(), Config{Dir: dir, Files: 2, FileBytes: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ files, group int }{{2, 24 << 10}, {1, 4 << 10}, {2, 64 << 10}} { // also past the end, which is the beginning
		m, err := d.Write(t.Context(), c.files, c.group, 20*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if m.Groups < uint64(c.files) || m.Bytes != m.Groups*uint64(c.group) || m.Latency.TotalCount() != int64(m.Groups) ||
			m.Elapsed < 20*time.Millisecond || m.BytesPerSecond() <= 0 || m.GroupsPerSecond() <= 0 {
			t.Fatalf("measured %+v", m)
		}
	}
	for _, f := range d.files {
		if size, err := f.file.Size(); err != nil || size != 64<<10 {
			t.Fatalf("a file of %d bytes, %v: it grew while it was measured", size, err)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("left behind: %v, %v", left, err)
	}
}

// New files hold what was measured and nothing else.
func TestNewFilesGrow(t *testing.T) {
	t.Parallel()
	d, err := Open(t.Context(), Config{Dir: t.TempDir(), Files: 1, FileBytes: 1 << 40, New: true})
	if err != nil {
		t.Fatal(err)
	}
	var written int64
	for range 2 {
		if size, err := d.files[0].file.Size(); err != nil || size != written {
			t.Fatalf("%d bytes, %v, after %d were written", size, err, written)
		}
		m, err := d.Write(t.Context(), 1, 4<<10, 5*time.Millisecond)
		if err != nil || m.Groups == 0 {
			t.Fatal(m.Groups, err)
		}
		written += int64(m.Bytes)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestWhatCannotBeWrittenSaysWhy(t *testing.T) {
	t.Parallel()
	if _, err := Open(t.Context(), Config{Dir: t.TempDir() + "/none"}); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("a directory that is not there: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	dir := t.TempDir()
	d, err := Open(ctx, Config{Dir: dir, Files: 1, FileBytes: 8 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for want, c := range map[string]struct {
		files, group int
		duration     time.Duration
	}{
		"2 files: want 1 to 1": {2, 4096, time.Second}, "groups of 9000 bytes": {1, 9000, time.Second},
		"groups of 0 bytes": {1, 0, time.Second}, "for 0s": {1, 4096, 0},
	} {
		if _, err := d.Write(t.Context(), c.files, c.group, c.duration); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	cancel()
	if _, err := d.Write(ctx, 1, 4096, time.Hour); !errors.Is(err, context.Canceled) {
		t.Fatalf("interrupted: %v", err)
	}
	other := t.TempDir()
	if _, err := Open(ctx, Config{Dir: other}); !errors.Is(err, context.Canceled) {
		t.Fatalf("interrupted: %v", err)
	}
	if left, err := os.ReadDir(other); err != nil || len(left) > 0 {
		t.Fatalf("left behind: %v, %v", left, err)
	}
}

func TestProbe(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p, err := StartProbe(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	for p.Take().TotalCount() == 0 {
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("left behind: %v, %v", left, err)
	}
}
