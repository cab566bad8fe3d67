package statelog

import "context"

// RewriteOldest writes the oldest live records of the log's first ledger again, however short the log is.
func (l *Log) RewriteOldest() error {
	id := l.c.Runs()[0].Ledger
	l.mu.Lock()
	batch, _ := l.index.toRewrite(id, flushBytes)
	l.mu.Unlock()
	return l.writeAgain(batch)
}

// Gathered returns the number of entries under way.
func (l *Log) Gathered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inFlight
}

// Rewriting tells whether the log is being shortened.
func (l *Log) Rewriting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rewriting
}

// Replay replays the log beside itself. When that is at the end, and before its outcome takes the log's place, it calls
// meanwhile.
func (l *Log) Replay(ctx context.Context, meanwhile func()) error {
	r := l.startRebuild()
	fresh := newState()
	err := l.replay(ctx, &fresh)
	meanwhile()
	return l.endRebuild(r, &fresh, err)
}

// LastOwners returns the hashes of the owners of the last entry.
func (l *Log) LastOwners() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// Lose tells the log that it is lost, as its chain does.
func (l *Log) Lose(err error) { l.onLost(err) }
