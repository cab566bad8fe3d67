package sim

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/ledger"
)

// A failure says all that is needed to look into it, and of the story what touches its subject alone.
func TestFailureSaysWhatIsNeeded(t *testing.T) {
	t.Parallel()
	w := newWorld(Options{Seed: 77, Faulty: 3 * time.Minute, Faults: []Fault{Wipe}, Record: true})
	defer func() {
		for _, b := range w.brokers {
			b.kill()
		}
		for _, b := range w.bookies {
			b.kill()
		}
	}()
	w.trace("b1", entrySubject(5, 2), "append %d as 5:2 at %s", 9, ledger.AckAll)
	w.trace("b1", entrySubject(5, 3), "append of another entry")
	w.trace("b1", ledgerSubject(6), "another ledger")
	w.trace("sim", subject{}, "healed")
	w.fail("I1", entrySubject(5, 2), "append %d is lost", 9)
	w.fail("I2", subject{}, "a later failure")
	got := w.failure.Error()
	for _, part := range []string{
		"invariant I1 is violated: append 9 is lost\n", "seed 77, commit " + Commit, "3m0s of faults [wipe], one request to etcd in ",
		w.shape(), "-run 'Seed/77$' -minutes 3\n", " b1   append 9 as 5:2 at all\n", " sim  healed\n",
	} {
		if !strings.Contains(got, part) {
			t.Errorf("%q is not in\n%s", part, got)
		}
	}
	for _, part := range []string{"another", "later"} {
		if strings.Contains(got, part) {
			t.Errorf("%q is in\n%s", part, got)
		}
	}
}
