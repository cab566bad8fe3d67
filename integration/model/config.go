package model

import (
	"slices"

	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Config is one small cluster, what can happen in it, and how often.
type Config struct {
	Name    string
	Bookies int
	meta.Replication
	// Zones has a letter for each bookie; empty: unknown.
	Zones string
	// Levels has the level of each entry.
	Levels []ledger.AckLevel
	// Recoveries is how many attempts there may be, at any time and beside one another.
	Recoveries int
	// Failures is how many of the writer's adds may be given up without an answer, and RecoveryFailures of the recoveries' and
	// repairs'. FailAt, if not nil, names the bookies that this happens at: with ensembles that are not striped all are
	// alike before the first failure.
	Failures, RecoveryFailures int
	FailAt                     []int
	// OnlyNeeded: the writer replaces a bookie only if a quorum needs it. Otherwise each failure makes it try.
	OnlyNeeded bool
	// Close: the writer may close the ledger at any time. Crash: it may die at any time, by itself. Lossy: it may get no
	// answer to a transaction that was or will yet be applied.
	Close, Crash, Lossy bool
	// Dead: it dies at the latest when the first recovery begins.
	Dead bool
	// Patient: a recovery hears all bookies before it decides that an entry is absent. Pipelined: it reads ahead.
	Patient, Pipelined bool
	// Admission: a bookie's look at the record, and what it makes of it, are two events.
	Admission bool
	// Delete: the closed ledger may be deleted. Collect: garbage collection runs.
	Delete, Collect bool
	// Repairs is how many repairs there may be beside one another; Drops, how many intents end without a swap; Target, the only
	// bookie that repairs copy to, if not 0.
	Repairs, Drops, Target int
	// Retire: a bookie that nothing names may be retired, at any time.
	Retire bool
	// Lost is how many disks may be lost for good, Limbo how many come back with nothing on them.
	Lost, Limbo int
	// OneKept: what level `one` acknowledged must not be lost.
	OneKept bool
	// Known: each bookie knows the ledger from the start, so that admission has nothing to say.
	Known bool
	// Without are rules of the model's own parts that are left out.
	Without []string
	// Breaks is how what must break without it begins.
	Breaks string
	// Seed is that of placement.
	Seed uint64
	// Limit bounds the states; 0: no bound. A search that is cut short is not exhaustive.
	Limit int
}

func (c *Config) lacks(rule string) bool { return slices.Contains(c.Without, rule) }

func (c *Config) zone(b int) string {
	if b < len(c.Zones) {
		return c.Zones[b : b+1]
	}
	return ""
}

func (c *Config) mayFail(b int) bool { return c.FailAt == nil || slices.Contains(c.FailAt, b) }

// losses is how many copies of an entry may be gone.
func (c *Config) losses() int { return c.Lost + c.Limbo }
