package command

import (
	"runtime"
	"runtime/debug"
	"testing"
)

func TestMemoryIsGivenBackWhenItIsQuiet(t *testing.T) {
	t.Parallel()
	before := memorySample{allocated: 1 << 40}
	for name, c := range map[string]struct {
		allocated, unused uint64
		want              bool
	}{
		"after a load":             {1 << 20, 90 << 20, true},
		"under load":               {500 << 20, 90 << 20, false},
		"nothing to be given back": {1 << 20, 2 << 20, false},
	} {
		if got := (memorySample{before.allocated + c.allocated, c.unused}).worthGivingBack(before); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// What a load leaves behind is seen, and can be given back. Nothing is collected meanwhile: what is, the runtime may give back by itself
// while the test looks.
func TestUnusedMemoryIsSeen(t *testing.T) { //nolint:paralleltest // it looks at the whole process
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	debug.FreeOSMemory()
	low := sampleMemory().unused
	func() {
		var used [][]byte
		for range 256 {
			used = append(used, make([]byte, 1<<20))
		}
		runtime.KeepAlive(used)
	}()
	if high := sampleMemory().unused; high < low+200<<20 {
		t.Fatalf("%d MiB unused after a load, %d before", high>>20, low>>20)
	}
	debug.FreeOSMemory()
	if left := sampleMemory().unused; left > low+16<<20 {
		t.Fatalf("%d MiB are kept", left>>20)
	}
}
