package client

// flow decides how many messages a broker may send to one consumer: a pure count of permits. Prefetch is
// bounded in messages exactly, and in bytes by the mean size of what came so far: the protocol counts messages
// only. It starts with few permits, so that a topic of large messages is learnt about before it fills memory.
//
// What stands here does not bound a single burst of messages that are all larger than those before; the runner
// does, by not reading its stream while more than the byte limit is buffered.
type flow struct {
	maxMessages int
	maxBytes    int64

	outstanding int // permits granted and not used; below zero by one batch at most
	buffered    int
	bytes       int64 // of what is buffered
	mean        int64 // bytes of a message, smoothed; 0 is not known
}

// firstMean is the size that a message is taken to have before the first one came.
const firstMean = 1 << 20

// connected says that a new stream is open: the broker holds no permits, and nothing of the old one is kept.
func (f *flow) connected() { f.outstanding, f.buffered, f.bytes = 0, 0, 0 }

// received says that an entry used up permits for charged messages, of which kept, with so many bytes, are
// buffered for the application.
func (f *flow) received(charged, kept int, bytes int64) {
	f.outstanding -= charged
	f.buffered += kept
	f.bytes += bytes
	if kept > 0 {
		size := max(1, bytes/int64(kept))
		if f.mean == 0 {
			f.mean = size
		} else {
			f.mean = max(1, f.mean+(size-f.mean)/4)
		}
	}
}

// consumed says that the application took one message.
func (f *flow) consumed(bytes int64) {
	f.buffered--
	f.bytes -= bytes
	if f.buffered < 0 || f.bytes < 0 {
		panic("client: more was consumed than was buffered")
	}
}

// full tells whether more bytes are buffered than prefetch allows.
func (f *flow) full() bool { return f.bytes > f.maxBytes }

// grant returns the permits to give now; 0 is none yet. Permits are given in halves of what is possible, so that
// one request covers many messages.
func (f *flow) grant() int {
	mean := f.mean
	if mean == 0 {
		mean = firstMean
	}
	possible := min(int64(f.maxMessages-f.buffered), (f.maxBytes-f.bytes)/mean)
	if possible < 1 && f.buffered == 0 {
		possible = 1 // one message larger than the whole limit must pass
	}
	want := int(possible) - f.outstanding
	limit := int(min(int64(f.maxMessages), max(1, f.maxBytes/mean)))
	starving := f.outstanding <= 0 && f.buffered == 0
	if want < 1 || !starving && want < (limit+1)/2 {
		return 0
	}
	f.outstanding += want
	return want
}
