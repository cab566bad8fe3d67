package broker

import (
	"testing"
	"time"
)

// A topic that is lost as often as it is opened is opened ever more seldom; one that was served for a while, at once.
func TestATopicThatIsLostAgainAndAgainIsOpenedEverMoreSeldom(t *testing.T) {
	t.Parallel()
	u := &bundle{setbacks: map[string]setback{}}
	now := time.Unix(1000, 0)
	lose := func(served, want time.Duration) {
		t.Helper()
		u.noteSetback("orders", now, now.Add(served))
		now = now.Add(served)
		if got := u.setbacks["orders"].pause(); got != want {
			t.Errorf("opened again after %v, want %v", got, want)
		}
	}
	for _, ms := range []time.Duration{0, 50, 100, 200, 400, 800, 1600, 3200, 5000, 5000} {
		lose(time.Second, ms*time.Millisecond)
	}
	lose(settledAfter, 0)
	lose(time.Second, 50*time.Millisecond)
	now = now.Add(time.Hour)
	u.noteSetback("invoices", now, now)
	if len(u.setbacks) != 1 {
		t.Errorf("%d topics are remembered, want 1", len(u.setbacks))
	}
}
