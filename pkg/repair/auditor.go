package repair

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// auditor keeps the census while this process has the key for it.
type auditor struct {
	*Runner
	census *Census // nil: it is another's turn
	totals meta.RepairCensus

	damageAt time.Time // when bookies were asked last
	compared time.Time // how far the comparison's time is used up
	reassess bool

	published meta.RepairCensus // as it was written last
}

func (r *Runner) newAuditor() *auditor { return &auditor{Runner: r} }

// comparePage is how many ledgers one round compares at most.
const comparePage = 256

// round is one look.
func (a *auditor) round(ctx context.Context) error {
	grant, err := a.env.Session.Wait(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	mine, err := a.env.Meta.ClaimAudit(ctx, a.cfg.Worker, grant.ID)
	if err != nil || !mine {
		if a.census != nil {
			a.log.Info("another process audits repairs now")
		}
		a.census = nil
		a.metrics.forget()
		return err //nolint:wrapcheck // likewise
	}
	if a.census == nil {
		if err := a.takeOver(ctx); err != nil {
			return err
		}
	}
	view, err := a.observe(ctx)
	if err != nil {
		return err
	}
	list, err := a.records(ctx)
	if err != nil {
		return err
	}
	noted, err := a.note(ctx, view, list)
	if err != nil {
		return err
	}
	if err := a.askForDamage(ctx, view); err != nil {
		return err
	}
	found, err := a.compare(ctx, view, list)
	if err != nil {
		return err
	}
	if noted+found > 0 {
		nudge(a.workKick)
	}
	a.totals.At = view.Now
	a.metrics.show(list, a.totals)
	return a.publish(ctx)
}

// publish writes the census, if it has changed or is old.
func (a *auditor) publish(ctx context.Context) error {
	same := a.totals.Waiting == a.published.Waiting && slices.Equal(a.totals.Absent, a.published.Absent) && a.totals.ComparedAll.Equal(a.published.ComparedAll)
	if same && a.totals.At.Sub(a.published.At) < publishEvery {
		return nil
	}
	if err := a.env.Meta.PutRepairCensus(ctx, a.totals); err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	a.published = a.totals
	return nil
}

// publishEvery is the time between two writings of a census that has not changed.
const publishEvery = 30 * time.Second

func (a *auditor) takeOver(ctx context.Context) error {
	before, err := a.env.Meta.GetRepairCensus(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	a.census = NewCensus(a.cfg.Delay, a.sched.Now(), before)
	a.totals = before
	a.totals.Auditor = a.cfg.Worker
	a.damageAt, a.compared = time.Time{}, a.sched.Now()
	a.published = meta.RepairCensus{}
	a.log.Info("this process audits repairs", "after", before.Auditor)
	return nil
}

// observe finds out who is there, and tells the workers by the census.
func (a *auditor) observe(ctx context.Context) (View, error) {
	cookies, err := a.env.Meta.ListCookies(ctx)
	if err != nil {
		return View{}, err //nolint:wrapcheck // it says what failed
	}
	live := map[entry.StorageUUID]bool{}
	for _, k := range a.env.Topology.Bookies() {
		live[k.UUID] = true
	}
	for _, k := range cookies {
		if k.Retired || live[k.UUID] {
			continue
		}
		if live[k.UUID], err = a.env.Meta.BookieRegistered(ctx, k.UUID); err != nil { // what is watched is late
			return View{}, err //nolint:wrapcheck // likewise
		}
	}
	now := a.sched.Now()
	missed := a.census.Look(now, cookies, func(u entry.StorageUUID) bool { return live[u] })
	for _, u := range missed {
		h, err := a.env.Meta.Holdings(ctx, u)
		if err != nil {
			return View{}, err //nolint:wrapcheck // likewise
		}
		a.census.Holds(u, len(h.Ledgers))
		a.log.Warn("bookie is absent", "storage", u.String(), "ledgers", len(h.Ledgers), "repaired_after", a.cfg.Delay)
	}
	a.totals.Absent = a.census.Absent()
	if len(missed) > 0 || a.anyLost(now) {
		// The workers go by it.
		if err := a.env.Meta.PutRepairCensus(ctx, a.totals); err != nil {
			return View{}, err //nolint:wrapcheck // likewise
		}
	}
	v := NewView(now, cookies, a.totals.Absent, a.env.Topology, int(a.workers()))
	a.setView(&v)
	return v, nil
}

func (a *auditor) anyLost(now time.Time) bool {
	for _, k := range a.totals.Absent {
		if !now.Before(k.Lost) {
			return true
		}
	}
	return false
}

// records reads what is noted.
func (a *auditor) records(ctx context.Context) (meta.RepairList, error) {
	return a.env.Meta.ListRepairs(ctx, 0, 4*a.cfg.MaxRecords) //nolint:wrapcheck // it says what failed
}

// note lists what is on the bookies that are lost or to be emptied, and notes as many ledgers as there is room for.
func (a *auditor) note(ctx context.Context, v View, list meta.RepairList) (noted int, err error) {
	relieved, changed := a.census.Relieved(v)
	for _, u := range relieved {
		h, err := a.env.Meta.Holdings(ctx, u)
		if err != nil {
			return 0, err //nolint:wrapcheck // it says what failed
		}
		a.census.Listed(v.Now, u, h)
		a.census.Holds(u, len(h.Ledgers))
		if err := a.bury(ctx, v, u, h); err != nil {
			return 0, err
		}
	}
	recorded := map[entry.LedgerID]bool{}
	for _, rec := range list.Repairs {
		recorded[rec.Ledger] = true
	}
	ids, waiting := a.census.ToNote(recorded, a.cfg.MaxRecords-list.Total)
	a.totals.Waiting = waiting
	if changed {
		a.reassess = true
	}
	if a.reassess { // what was counted before is out of date
		for _, rec := range list.Repairs {
			ids = append(ids, rec.Ledger)
		}
	}
	n, err := a.noteAll(ctx, v, ids)
	if err == nil {
		a.reassess = false
	}
	return n, err
}

// bury confirms the deletion of ledgers for a bookie that is dead for good, and does not do so itself.
func (a *auditor) bury(ctx context.Context, v View, u entry.StorageUUID, h meta.Holdings) error {
	b := v.Bookies[u]
	if b.Live || !b.Lost || !a.dead(u) {
		return nil
	}
	for _, id := range h.Deleting {
		if err := a.env.Meta.ConfirmDeleted(ctx, id, u); err != nil {
			return fmt.Errorf("confirm a deletion for a bookie that is dead: %w", err)
		}
	}
	return nil
}

func (a *auditor) dead(u entry.StorageUUID) bool {
	for _, m := range a.env.Topology.Marks() {
		if m.UUID == u && m.Kind == meta.MarkDead {
			return true
		}
	}
	return false
}

// noteAtOnce is how many ledgers are read at a time.
const noteAtOnce = 8

// noteAll reads ledgers, and notes what is wrong with them by their records.
func (a *auditor) noteAll(ctx context.Context, v View, ids []entry.LedgerID) (noted int, err error) {
	g := sched.NewGroup(a.sched)
	parts, counts, errs := min(noteAtOnce, len(ids)), [noteAtOnce]int{}, [noteAtOnce]error{}
	for i := range parts {
		g.Go(func() {
			for at := i; at < len(ids) && errs[i] == nil; at += parts {
				var one bool
				if one, errs[i] = a.noteOne(ctx, v, ids[at]); one {
					counts[i]++
				}
			}
		})
	}
	g.Wait()
	for i := range parts {
		noted += counts[i]
		if errs[i] != nil {
			err = errs[i]
		}
	}
	return noted, err
}

func (a *auditor) noteOne(ctx context.Context, v View, id entry.LedgerID) (bool, error) {
	l, err := a.env.Meta.GetLedger(ctx, id)
	if err != nil {
		return false, err //nolint:wrapcheck // it says what failed
	}
	f := NewSurvey(l, v).Assess()
	if f.Sound() {
		return false, nil
	}
	return true, a.env.Meta.NoteRepair(ctx, meta.Repair{ //nolint:wrapcheck // likewise
		Ledger: id, Causes: f.Causes, Since: v.Now, Storages: f.Storages, Counts: f.Counts,
	})
}

// askForDamage asks each bookie what it found unreadable, from time to time.
func (a *auditor) askForDamage(ctx context.Context, v View) error {
	if v.Now.Sub(a.damageAt) < a.cfg.DamageEvery {
		return nil
	}
	a.damageAt = v.Now
	for u, b := range v.Bookies {
		if !b.Live || b.Lost {
			continue
		}
		asking, cancel := a.sched.WithTimeout(ctx, askTimeout)
		all, err := a.env.Control.ListDamage(asking, u)
		cancel()
		if err != nil {
			a.log.Debug("bookie does not say what is damaged", "bookie", b.ID, "error", err)
			continue
		}
		for _, d := range a.census.Damaged(u, all) {
			l, err := a.env.Meta.GetLedger(ctx, d.Ledger)
			if err != nil || l.State == meta.LedgerDeleting || !names(l, u) {
				continue // it is nobody's any more, or the next look finds it
			}
			why := meta.CauseCorrupt
			if d.Limbo {
				why = meta.CauseMissing
			}
			if err := a.env.Meta.NoteRepair(ctx, meta.Repair{Ledger: d.Ledger, Causes: why, Since: v.Now}); err != nil {
				return err //nolint:wrapcheck // it says what failed
			}
			nudge(a.workKick)
		}
	}
	return nil
}

func names(l meta.Ledger, u entry.StorageUUID) bool {
	for _, f := range Stretches(l) {
		if f.slotOf(u) >= 0 {
			return true
		}
	}
	return false
}

// compare holds the next ledgers in turn against what their bookies have, as many as it is time for.
func (a *auditor) compare(ctx context.Context, v View, list meta.RepairList) (found int, err error) {
	if a.totals.Compared == 0 && v.Now.Sub(a.totals.ComparedAll) < a.cfg.CompareRound {
		a.compared = v.Now
		return 0, nil
	}
	n := int(v.Now.Sub(a.compared) / a.cfg.CompareEvery)
	a.compared = a.compared.Add(time.Duration(n) * a.cfg.CompareEvery)
	n = min(n, comparePage)
	if n == 0 {
		return 0, nil
	}
	recorded := map[entry.LedgerID]bool{}
	for _, rec := range list.Repairs {
		recorded[rec.Ledger] = true
	}
	page, err := a.env.Meta.ListLedgers(ctx, a.totals.Compared, n)
	if err != nil {
		return 0, err //nolint:wrapcheck // it says what failed
	}
	for _, l := range page {
		if l.State != meta.LedgerDeleting && !recorded[l.ID] {
			f := a.survey(ctx, l, v, nil).Assess()
			if f.Causes&^(meta.CauseLost|meta.CauseDecommission) != 0 && list.Total < 2*a.cfg.MaxRecords {
				found++
				err := a.env.Meta.NoteRepair(ctx, meta.Repair{
					Ledger: l.ID, Causes: f.Causes, Since: v.Now, Storages: f.Storages, Counts: f.Counts,
				})
				if err != nil {
					return found, err //nolint:wrapcheck // likewise
				}
			}
		}
		a.totals.Compared = l.ID
	}
	if len(page) < n {
		a.totals.Compared, a.totals.ComparedAll = 0, v.Now
	}
	return found, nil
}
