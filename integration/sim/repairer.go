package sim

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// repairer is a process that gives slots of fragments to other disks, by the product's transactions, reader and adds. It sees to
// it that each intent ends, others' too. Some seeds have one or two; whether this one does is drawn from a stream of its own, so
// that the others' runs are what they would be if there were no repair.
type repairer struct {
	*broker // of which it is the process, with its connections to bookies and etcd; it serves nothing
}

const (
	// repairPatience is how long an intent lasts at most.
	repairPatience = 20 * time.Second
	// intentsEndWithin leaves time for clocks that are behind.
	intentsEndWithin = repairPatience + 25*time.Second
)

// addRepairers has a seed in four have repairers.
func (w *world) addRepairers() {
	//nolint:gosec // seeded on purpose
	own := rand.New(rand.NewPCG(w.opt.Seed, 0x726570616972))
	if own.IntN(4) != 0 {
		return
	}
	for i := range 1 + own.IntN(2) {
		name := "r" + string(rune('0'+i))
		r := &repairer{broker: &broker{process: process{k: w.kernel, name: name}, w: w, index: -1 - i}}
		r.etcd = &etcdClient{e: w.etcd, p: &r.process, actor: r.broker}
		w.repairers = append(w.repairers, r)
		w.after(w.between(0, 2*time.Second), r.boot)
		w.after(w.between(0, 5*time.Second), r.trouble)
	}
}

func (r *repairer) boot() {
	if r.up {
		return
	}
	w := r.w
	if r.skew = 0; w.chance(6) {
		r.skew = w.between(-10*time.Second, 10*time.Second)
	}
	r.start()
	r.meta = meta.NewOver(r.etcd, r.sched, clusterName, nil)
	r.client = newBookieClient(r.broker)
	r.env.Ledger = ledger.Env{Bookies: r.client, Metadata: r.meta, Config: w.ledgerConfig(), Sched: r.sched}
	w.trace(r.name, subject{}, "up")
	for range 2 + w.rng.IntN(3) {
		r.sched.Go(r.repairs)
	}
	r.sched.Go(r.endIntents)
}

// repairs goes on for ever, until the end.
func (r *repairer) repairs() {
	for {
		pause := r.w.between(10*time.Millisecond, 400*time.Millisecond)
		_ = sched.Sleep(context.Background(), r.sched, calmer(r.w, pause, 20))
		if r.w.ending {
			return
		}
		r.repairSomething()
	}
}

// endIntents ends intents whose time is over, by this process's clock. Whoever holds one may be at work still.
func (r *repairer) endIntents() {
	for {
		_ = sched.Sleep(context.Background(), r.sched, r.w.between(500*time.Millisecond, 4*time.Second))
		for _, id := range slices.Sorted(maps.Keys(r.w.ghost.intents)) {
			ctx, cancel := r.sched.WithTimeout(context.Background(), openPatience)
			l, err := r.meta.GetLedger(ctx, id)
			for _, i := range l.Pending {
				if err == nil && i.Deadline.Before(r.sched.Now()) {
					_, err = r.meta.DropIntent(ctx, id, i.Target, i.Fragment)
					r.w.trace(r.name, ledgerSubject(id), "ends an intent of ledger %d for %s: error %v", id, r.w.names[i.Target], err != nil)
				}
			}
			cancel()
		}
	}
}

// trouble is what befalls a repairer, now and then.
func (r *repairer) trouble() {
	w := r.w
	if w.healed {
		return
	}
	pause := w.between(500*time.Millisecond, 8*time.Second)
	w.after(calmer(w, pause, 5), r.trouble)
	if !r.up {
		return
	}
	span := w.between(20*time.Millisecond, 4*time.Second)
	k := pick(w.kernel, w.bookies)
	switch w.rng.IntN(6) {
	case 0:
		r.die("killed", span)
	case 1:
		r.pause()
		w.unlessHealed(2*span, r.resume)
	case 2:
		r.etcd.cut = true
		w.unlessHealed(span, func() { r.etcd.cut = false })
	case 3:
		w.block(r.name, k.name, span)
	case 4:
		w.block(k.name, r.name, span)
	case 5:
		for _, l := range r.client.opened {
			l.reset(w.net.delay())
		}
	}
}

// die kills the process, and starts it anew after a while.
func (r *repairer) die(why string, span time.Duration) {
	r.crash(why)
	r.w.unlessHealed(span, r.boot)
}

// dieSoon kills the process in the midst of what it does, at times.
func (r *repairer) dieSoon() {
	w := r.w
	if w.healed || !w.chance(50) {
		return
	}
	life := r.life
	w.after(w.between(0, 10*time.Millisecond), func() {
		if r.up && r.life == life {
			r.die("in the midst of a repair", w.between(20*time.Millisecond, 3*time.Second))
		}
	})
}

// healRepairers ends what befalls them.
func (w *world) healRepairers() {
	for _, r := range w.repairers {
		r.etcd.cut = false
		r.resume()
		for _, k := range w.bookies {
			w.net.open(r.name, k.name)
			w.net.open(k.name, r.name)
		}
		if !r.up {
			r.boot()
		}
	}
}

// endRepairs sees all intents end, but those of ledgers that are being deleted, which go with them; and then the repairers.
func (w *world) endRepairs() {
	if len(w.repairers) == 0 || w.failed() {
		return
	}
	w.run(w.now+intentsEndWithin, func() bool { return w.failed() || len(w.ghost.intents) == 0 })
	for _, id := range slices.Sorted(maps.Keys(w.ghost.intents)) {
		w.fail("intents", ledgerSubject(id), "ledger %d has an intent still, %v after the last repair began", id, intentsEndWithin)
	}
	for _, r := range w.repairers {
		r.crash("the end")
	}
}
