package broker

import (
	"container/list"
	"sync"
	"time"
)

// Topics that are opened at once. A takeover leaves thousands to be opened. Opened all at once, each step of one waits for the
// same step of all others, and the first is served when the last is. Two processors and an etcd on one disk are busy with
// fewer than these; across a network an opening mostly waits, some 20 ms, so that these make 1,500 a second.
const maxOpenings = 32

// openingHold is how long an opening counts: one that waits for bookies which do not answer keeps nobody else from being opened.
const openingHold = 100 * time.Millisecond

// openings lets topics be opened in order: those first that a producer waits for, whose messages pile up, then those that consumers
// and others ask for; each in order of arrival.
type openings struct {
	mu        sync.Mutex
	underWay  int
	producing list.List // of *opening, that wait
	others    list.List
}

// opening is one topic's.
type opening struct {
	// turn is closed when it may begin.
	turn  chan struct{}
	queue *list.List    // nil once it does not wait any more
	place *list.Element // in queue
	ended bool
}

// ask queues an opening. It must be ended.
func (o *openings) ask(producing bool) *opening {
	x := &opening{turn: make(chan struct{})}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.put(x, producing)
	o.next()
	return x
}

func (o *openings) put(x *opening, producing bool) {
	x.queue = &o.others
	if producing {
		x.queue = &o.producing
	}
	x.place = x.queue.PushBack(x)
}

// hasten says that a producer waits for it, too.
func (o *openings) hasten(x *opening) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if x.queue == &o.others {
		o.others.Remove(x.place)
		o.put(x, true)
	}
}

// end lets the next one begin, if this one had, and is waited for no more. Further calls do nothing.
func (o *openings) end(x *opening) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if x.ended {
		return
	}
	x.ended = true
	if x.queue != nil {
		x.queue.Remove(x.place)
		x.queue = nil
		return
	}
	o.underWay--
	o.next()
}

// next has those begin whose turn it is. The lock is held.
func (o *openings) next() {
	for o.underWay < maxOpenings {
		queue := &o.producing
		if queue.Len() == 0 {
			queue = &o.others
		}
		front := queue.Front()
		if front == nil {
			return
		}
		x, _ := queue.Remove(front).(*opening)
		x.queue = nil
		o.underWay++
		close(x.turn)
	}
}
