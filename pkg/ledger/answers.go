package ledger

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// answers keeps, of each bookie, how the last request that failed did so: an attempt that too few bookies answered is
// given up with what each of them said, which nothing else remembers. Callbacks of any goroutine note; it is safe for
// concurrent use.
type answers struct {
	sched   sched.Scheduler
	mu      *sync.Mutex
	last    map[entry.StorageUUID]string
	waiting map[entry.StorageUUID]int // requests without an answer
	asked   int                       // their sum
	none    chan struct{}             // closed when that falls to 0, if somebody waits for it
}

func newAnswers(s sched.Scheduler) answers {
	return answers{sched: s, mu: new(sync.Mutex), last: map[entry.StorageUUID]string{}, waiting: map[entry.StorageUUID]int{}}
}

// ask counts a request that is about to be sent.
func (a *answers) ask(u entry.StorageUUID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting[u]++
	a.asked++
}

// note takes the answer to a request.
func (a *answers) note(u entry.StorageUUID, op string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting[u]--
	a.asked--
	if a.asked == 0 && a.none != nil {
		close(a.none)
		a.none = nil
	}
	if err != nil {
		a.last[u] = fmt.Sprintf("%s: %v", op, err)
	}
}

// explainPatience is how long explain waits for those whose requests have just been given up, to say how far they came.
const explainPatience = 50 * time.Millisecond

// explain adds to err what the bookies in slots said.
func (a *answers) explain(err error, slots []meta.Slot) error {
	a.mu.Lock()
	late := map[entry.StorageUUID]bool{}
	for u, n := range a.waiting {
		late[u] = n > 0
	}
	if a.asked > 0 {
		none := make(chan struct{})
		a.none = none
		a.mu.Unlock()
		passed, stop := sched.After(a.sched, explainPatience)
		_, _ = a.sched.Wait(context.Background(), sched.Channels{none, passed}) // never canceled
		stop()
		a.mu.Lock()
	}
	defer a.mu.Unlock()
	var said []string
	for _, s := range slots {
		last, failed := a.last[s.UUID]
		switch {
		case failed:
		case late[s.UUID]:
			last = "no answer in time"
		default:
			last = "answered"
		}
		said = append(said, fmt.Sprintf("%s: %s", s.UUID, last))
	}
	return fmt.Errorf("%w: %s", err, strings.Join(said, "; "))
}
