package chain_test

import (
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// hasty runs at once what is to be done within a second, and notes after how long it was to be. Its dice show 0.
type hasty struct {
	sched.Scheduler
	mu     sync.Mutex
	pauses []time.Duration
}

func (h *hasty) Uint64() uint64 { return 0 }

func (h *hasty) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	h.mu.Lock()
	h.pauses = append(h.pauses, d)
	h.mu.Unlock()
	if d < time.Second {
		d = 0
	}
	return h.Scheduler.AfterFunc(d, f)
}

// paused reports whether there were all of those pauses, in that order.
func (h *hasty) paused(want ...time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range h.pauses {
		if len(want) > 0 && d == want[0] {
			want = want[1:]
		}
	}
	return len(want) == 0
}

// Every bookie knows the ids of new ledgers, and has other entries under them: no ledger takes what is appended. The third
// is opened after a pause, and each later one after twice that.
func TestRollsToLedgersThatTakeNothingPause(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 4)
	for _, b := range bookieclient.FakeUUIDs(4) {
		f.Fake.Fail(b, bookieclient.OpAdd, bookiewire.BadRequest, -1)
	}
	h := &hasty{Scheduler: sched.Real}
	env := f.Env()
	env.Sched, env.Ledger.Sched = h, sched.Real
	c, err := chain.Open(t.Context(), env, f.Takeover(), logID, chain.Config{Describe: describe})
	check(t, err)
	defer c.Shutdown()
	c.Append(chain.Append{Body: body(1, 1), Span: 1, Level: ledger.AckQuorum})
	const ms = time.Millisecond
	eventually(t, "pauses that double", func() bool { return h.paused(25*ms, 50*ms, 100*ms) })
}
