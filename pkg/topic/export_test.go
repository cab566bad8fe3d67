package topic

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
)

// Victims is the pure part of Trim.
func (p TrimPolicy) Victims(runs []meta.Run, now time.Time) int { return p.victims(runs, now) }

// Known returns the number of producers that deduplication knows.
func (t *Topic) Known() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.dd.producers)
}
