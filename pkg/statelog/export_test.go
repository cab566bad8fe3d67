package statelog

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
