package repair

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// relistEvery is how often the ledgers of an identity that is being relieved are listed anew, if nothing else asks for it.
const relistEvery = 30 * time.Second

// Census is the auditor's state machine: which identities are absent and since when, which are lost or to be emptied, which ledgers
// are on those, and which of them get a record next. It is the caller's, and has no clock.
//
//	c.Look(now, cookies, registered)
//	for _, u := range c.Relieved(view, now) { c.Listed(now, u, holdings of u) }
//	ids, waiting := c.ToNote(records, room)
type Census struct {
	delay  time.Duration
	absent map[entry.StorageUUID]*meta.AbsentBookie
	listed map[entry.StorageUUID]listing
	lost   map[entry.StorageUUID]bool
	// said is what bookies said to be damaged when it was noted last.
	said map[saying]string
}

type listing struct {
	at      time.Time
	ledgers []entry.LedgerID // sorted, without those that are being deleted
}

type saying struct {
	storage entry.StorageUUID
	ledger  entry.LedgerID
}

// censusLasts is how old what the auditor before knew may be: whoever is absent may have been there since.
const censusLasts = 2 * time.Minute

// NewCensus goes on from what the auditor before knew, unless that is old: who is absent since when.
func NewCensus(delay time.Duration, now time.Time, before meta.RepairCensus) *Census {
	c := &Census{
		delay: delay, absent: map[entry.StorageUUID]*meta.AbsentBookie{}, listed: map[entry.StorageUUID]listing{},
		lost: map[entry.StorageUUID]bool{}, said: map[saying]string{},
	}
	if now.Sub(before.At) < censusLasts {
		for _, a := range before.Absent {
			c.absent[a.UUID] = &a
		}
	}
	return c
}

// Look tells who is registered now. It returns those that are absent for the first time.
func (c *Census) Look(now time.Time, cookies []meta.Cookie, registered func(entry.StorageUUID) bool) (missed []entry.StorageUUID) {
	known := map[entry.StorageUUID]bool{}
	for _, k := range cookies {
		if k.Retired || registered(k.UUID) {
			continue
		}
		known[k.UUID] = true
		if c.absent[k.UUID] == nil {
			c.absent[k.UUID] = &meta.AbsentBookie{ID: k.ID, UUID: k.UUID, Since: now}
			missed = append(missed, k.UUID)
		}
		a := c.absent[k.UUID]
		a.Lost = a.Since.Add(c.delay)
	}
	maps.DeleteFunc(c.absent, func(u entry.StorageUUID, _ *meta.AbsentBookie) bool { return !known[u] })
	slices.SortFunc(missed, compareUUID)
	return missed
}

// Holds notes how many ledgers name an absent identity.
func (c *Census) Holds(u entry.StorageUUID, ledgers int) {
	if a := c.absent[u]; a != nil {
		a.Ledgers = uint64(ledgers)
	}
}

// Absent lists who is absent, lost or not.
func (c *Census) Absent() []meta.AbsentBookie {
	all := make([]meta.AbsentBookie, 0, len(c.absent))
	for _, a := range c.absent {
		all = append(all, *a)
	}
	slices.SortFunc(all, func(a, b meta.AbsentBookie) int { return compareUUID(a.UUID, b.UUID) })
	return all
}

// Relieved lists the identities whose copies are to be made elsewhere and whose ledgers are to be listed now. changed reports that
// others are lost than at the last call: what was counted before is out of date.
func (c *Census) Relieved(v View) (list []entry.StorageUUID, changed bool) {
	lost := map[entry.StorageUUID]bool{}
	for u := range v.Bookies {
		if v.lost(u) {
			lost[u] = true
		}
		if !v.leaves(u) {
			delete(c.listed, u)
			continue
		}
		l, ok := c.listed[u]
		if !ok || v.Now.Sub(l.at) >= relistEvery {
			list = append(list, u)
		}
	}
	maps.DeleteFunc(c.listed, func(u entry.StorageUUID, _ listing) bool { return !v.leaves(u) })
	changed = !maps.Equal(lost, c.lost)
	c.lost = lost
	slices.SortFunc(list, compareUUID)
	return list, changed
}

// Listed notes which ledgers are on an identity that is to be relieved.
func (c *Census) Listed(now time.Time, u entry.StorageUUID, h meta.Holdings) {
	going := map[entry.LedgerID]bool{}
	for _, id := range h.Deleting {
		going[id] = true
	}
	l := listing{at: now}
	for _, id := range h.Ledgers {
		if !going[id] {
			l.ledgers = append(l.ledgers, id)
		}
	}
	c.listed[u] = l
}

// ToNote chooses up to room ledgers that have no record and are to get one, by id, and tells how many have to wait. The caller notes
// them: they are not told again until they are listed anew.
func (c *Census) ToNote(recorded map[entry.LedgerID]bool, room int) (ids []entry.LedgerID, waiting uint64) {
	all := map[entry.LedgerID]bool{}
	for _, l := range c.listed {
		for _, id := range l.ledgers {
			if !recorded[id] {
				all[id] = true
			}
		}
	}
	ids = slices.Sorted(maps.Keys(all))
	if room = max(room, 0); len(ids) > room {
		waiting = uint64(len(ids) - room)
		ids = ids[:room]
	}
	noted := map[entry.LedgerID]bool{}
	for _, id := range ids {
		noted[id] = true
	}
	for u, l := range c.listed {
		rest := l.ledgers[:0]
		for _, id := range l.ledgers {
			if !noted[id] && !recorded[id] {
				rest = append(rest, id)
			}
		}
		l.ledgers = rest
		c.listed[u] = l
	}
	return ids, waiting
}

// Damaged notes what a bookie found unreadable, and returns what is new in it, by ledger.
func (c *Census) Damaged(u entry.StorageUUID, all []bookieclient.Damage) (fresh []bookieclient.Damage) {
	now := map[saying]string{}
	for _, d := range all {
		k, text := saying{u, d.Ledger}, d.Entries
		if d.Limbo {
			text += " limbo"
		}
		if now[k] = text; c.said[k] != text {
			fresh = append(fresh, d)
		}
	}
	maps.DeleteFunc(c.said, func(k saying, _ string) bool { return k.storage == u })
	maps.Copy(c.said, now)
	slices.SortFunc(fresh, func(a, b bookieclient.Damage) int { return cmp.Compare(a.Ledger, b.Ledger) })
	return fresh
}

func compareUUID(a, b entry.StorageUUID) int { return slices.Compare(a[:], b[:]) }
