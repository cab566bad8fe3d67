package ledgerstore

import (
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// truncate leaves nothing of a file but its name.
func truncate(tb testing.TB, fs vfs.FS, path string) {
	tb.Helper()
	f, err := fs.Open(path)
	must(tb, err)
	must(tb, f.Truncate(0))
	must(tb, f.Sync())
	must(tb, f.Close())
}

// Of the manifest and of each segment in turn nothing is left but its name, sealed or not.
func TestEmptyFileMeansLimboForAll(t *testing.T) {
	t.Parallel()
	before, _, _ := crashedStore(t)
	m, err := readManifest(before, "/data")
	must(t, err)
	names := []string{manifestName}
	for _, listed := range m.segments {
		names = append(names, segmentName(listed.sequence, listed.rewrite))
	}
	for _, name := range names {
		fs := before.Clone()
		truncate(t, fs, "/data/"+name)
		s := openStore(t, small(), fs)
		if !s.Loss().All {
			t.Fatalf("the loss of what was in %s is not noticed", name)
		}
		closeStore(t, s)
	}
}

// Nothing is left of the log of a store that was in use: only a start that may find nothing begins afresh.
func TestB22LostLogMeansLimboForAll(t *testing.T) {
	t.Parallel()
	for _, fresh := range []bool{false, true} {
		fs := withoutLog(t)
		if holds, err := Holds(fs, "/data"); err != nil || holds {
			t.Fatalf("holds a log: %v, %v", holds, err)
		}
		cfg := small()
		cfg.Fresh = fresh
		s := openStore(t, cfg, fs)
		for range 2 {
			if s.Loss().All == fresh {
				t.Fatalf("fresh %v: loss %+v", fresh, s.Loss())
			}
			want := map[bool]bookiewire.Code{false: bookiewire.Unknown, true: bookiewire.NoLedger}[fresh]
			_, err := readOne(s, 1, 1)
			wantCode(t, err, want)
			s = reopen(t, s)
		}
		if !fresh {
			wantCode(t, recoveryRead(s, 1, 1, 5), bookiewire.Unknown)
			wantCode(t, add(s, 1, 9), bookiewire.Fenced) // by the recovery
			must(t, s.SetLimbo(t.Context(), 2))
			must(t, s.EndLoss(t.Context()))
			wantCode(t, add(s, 2, 9), bookiewire.Fenced)
			_, err := readOne(s, 2, 0)
			wantCode(t, err, bookiewire.Unknown)
			must(t, add(s, 3, 0))
		}
		closeStore(t, s)
		if holds, err := Holds(fs, "/data"); err != nil || !holds {
			t.Fatalf("holds a log: %v, %v", holds, err)
		}
	}
}

// withoutLog is the disk of a store that was in use, of whose log nothing is left.
func withoutLog(tb testing.TB) *vfs.Mem {
	tb.Helper()
	fs, _, _ := crashedStore(tb)
	names, err := fs.List("/data")
	must(tb, err)
	for _, name := range names {
		if _, _, ok := parseSegmentName(name); ok || name == manifestName {
			must(tb, fs.Remove("/data/"+name))
		}
	}
	must(tb, fs.SyncDir("/data"))
	return fs
}

// The start that finds nothing is cut short at each of its changes: the next one knows as well that all is lost.
func TestLostLogIsNotForgotten(t *testing.T) {
	t.Parallel()
	before := withoutLog(t)
	cfg := small()
	cfg.Fresh = false
	for n, done := 0, false; !done; n++ {
		fs := before.Clone()
		fs.CutPowerAfter(n)
		s, err := Open(t.Context(), cfg, fs, quiet, nil)
		if done = err == nil; done {
			_ = s.Close()
		}
		fs.Crash(newRand(uint64(n)))
		s, err = Open(t.Context(), cfg, fs, quiet, nil)
		must(t, err)
		if !s.Loss().All {
			t.Fatalf("cut after %d changes: the loss is forgotten", n)
		}
		_, err = readOne(s, 1, 1)
		wantCode(t, err, bookiewire.Unknown)
		closeStore(t, s)
	}
}
