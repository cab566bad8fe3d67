package integration

import (
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// What each level promises. Without an answer from any bookie, `none` alone is acknowledged. When a bookie is killed, and
// then the owner, `one` loses nothing by that; `all` is not acknowledged with two bookies of three left, neither by the
// owner nor by the next one, which finds messages on two disks that their producer sends again; `none` may lose what it
// acknowledged. Nothing else is wrong with any of them.
func TestAckLevelsUnderKills(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	runs := make(map[string]*workload.Run)
	for name, level := range map[string]client.AckLevel{"none": client.AckNone, "one": client.AckOne, "all": client.AckAll} {
		runs[name] = w.load(func(c *workload.Config) {
			c.Topic, c.Rate = name, 300
			c.ProducerOptions = []client.ProducerOption{client.WithAckLevel(level)}
		})
	}
	none, one, all := runs["none"], runs["one"], runs["all"]
	for _, run := range runs {
		w.more(run, 300)
	}
	for _, p := range w.c.Bookies {
		w.check(p.Pause())
	}
	w.more(none, 200)
	w.stalls(one, 500*time.Millisecond)
	for _, p := range w.c.Bookies {
		w.check(p.Resume())
	}
	w.more(one, 300)
	w.more(all, 300)
	w.strike(all, w.c.Bookies[0].Kill)
	w.more(none, 300)
	w.more(one, 300)
	w.stalls(all, time.Second)
	_, before, _ := all.Counts()
	owners := map[*process.Process]bool{w.ownerOf("one"): true, w.ownerOf("all"): true}
	for owner := range owners {
		w.strike(one, owner.Kill)
		w.ownerOf("one")
		w.ownerOf("all")
		w.check(owner.Start(w.ctx))
	}
	w.more(one, 300)
	w.throughout(time.Second, "nothing is acknowledged at all without the third disk", func() bool {
		_, now, _ := all.Counts()
		return now == before
	})
	w.check(w.c.Bookies[0].Start(w.ctx))
	for _, run := range runs {
		w.more(run, 300)
	}
	w.finish(one)
	if report := w.end(all); report.UnknownStored == 0 {
		t.Error("no message was on two disks when the owner died, so the next owner had nothing to be asked about")
	}
	none.StopProducing()
	report, err := none.Wait(w.ctx)
	w.check(err)
	for _, v := range report.Violations {
		if v.Kind != workload.Lost && v.Kind != workload.Misplaced {
			t.Errorf("none: %v", v)
		}
	}
	w.Logf("none: %v", report)
}
