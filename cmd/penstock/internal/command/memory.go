package command

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// After a load, a Go program keeps what it needed then for minutes. A standalone cluster shares its machine with
// everything else that a developer runs, and mostly idles: it gives that back as soon as it is quiet.
//
// A limit of the memory instead, or caches so small that none is needed, would cost throughput, the limit all of it once
// what is in use exceeds it.
const (
	memoryLook = 5 * time.Second
	// quietBytes is what an idle cluster allocates between two looks, at most; worthwhile is what makes giving back worth a
	// collection.
	quietBytes = 16 << 20
	worthwhile = 16 << 20
)

// memorySample is what decides: bytes allocated since the start of the process, and bytes that are held and not in use.
type memorySample struct{ allocated, unused uint64 }

func sampleMemory() memorySample {
	s := []metrics.Sample{
		{Name: "/gc/heap/allocs:bytes"},
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	allocated, live, objects, free := s[0].Value.Uint64(), s[1].Value.Uint64(), s[2].Value.Uint64(), s[3].Value.Uint64()
	return memorySample{allocated: allocated, unused: free + max(objects, live) - live}
}

func (now memorySample) worthGivingBack(before memorySample) bool {
	return now.allocated-before.allocated < quietBytes && now.unused >= worthwhile
}

// giveMemoryBack runs until ctx ends.
func giveMemoryBack(ctx context.Context) {
	ticker := time.NewTicker(memoryLook)
	defer ticker.Stop()
	for before := sampleMemory(); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := sampleMemory()
		if now.worthGivingBack(before) {
			debug.FreeOSMemory()
		}
		before = now
	}
}
