package sim

import (
	"context"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/sched"
)

// stream is a watch: responses arrive in order. When its connection breaks it goes on, as etcd's client does it, from
// what had arrived; it ends by etcd's word alone.
type stream struct {
	c       *etcdClient
	life    int // of the process
	prefix  string
	next    int64         // the first revision that etcd has not sent
	arrived int64         // the first one that has not arrived
	last    time.Duration // when what was sent last arrives
	conn    int           // counts connections
	broken  bool
	over    bool // nobody listens any more
	inbox   []clientv3.WatchResponse
	ended   error
	news    chan struct{}
}

// watch is a meta.Watch.
func (c *etcdClient) watch(ctx context.Context, prefix string, from int64, f func(clientv3.WatchResponse)) error {
	s := &stream{c: c, life: c.p.life, prefix: prefix, next: from, arrived: from, news: make(chan struct{}, 1)}
	defer func() { s.over = true }()
	if err := c.call(ctx, func() {}, func() error {
		if !s.over {
			c.e.streams = append(c.e.streams, s)
			s.pump()
		}
		return nil
	}); err != nil {
		return err
	}
	for s.ended == nil || len(s.inbox) > 0 {
		if len(s.inbox) == 0 {
			if _, err := c.p.sched.Wait(ctx, sched.Channels{s.news}); err != nil {
				return err //nolint:wrapcheck // as a context says it
			}
			continue
		}
		r := s.inbox[0]
		s.inbox = s.inbox[1:]
		f(r)
	}
	return s.ended
}

// pump sends what has changed to whoever watches.
func (e *etcd) pump() {
	e.streams = slices.DeleteFunc(e.streams, func(s *stream) bool { return s.over || s.life != s.c.p.life })
	for _, s := range e.streams {
		s.pump()
	}
}

func (s *stream) pump() {
	e := s.c.e
	if e.away || s.broken {
		return
	}
	events, err := e.model.Since(s.next)
	if err != nil {
		s.end(rpctypes.ErrCompacted)
		return
	}
	s.next = max(s.next, e.model.Revision()+1)
	var r clientv3.WatchResponse
	r.Header = &pb.ResponseHeader{Revision: e.model.Revision()}
	for i, ev := range events {
		if strings.HasPrefix(string(ev.KV.Key), s.prefix) {
			kind := mvccpb.PUT
			if ev.Delete {
				kind = mvccpb.DELETE
			}
			r.Events = append(r.Events, &clientv3.Event{Type: kind, Kv: ev.KV})
		}
		last := i == len(events)-1
		// A revision is not split; several may come together.
		if len(r.Events) > 0 && (last || events[i+1].KV.ModRevision != ev.KV.ModRevision && !e.chance(3)) {
			s.send(r, nil)
			r.Events = nil
		}
	}
}

// end ends the watch, once what was sent before has arrived.
func (s *stream) end(err error) {
	if !s.broken {
		s.send(clientv3.WatchResponse{}, err)
	}
}

func (s *stream) send(r clientv3.WatchResponse, ended error) {
	e, p, conn := s.c.e, s.c.p, s.conn
	s.last = max(s.last, e.now+e.delay())
	e.at(s.last, func() {
		if conn != s.conn {
			return
		}
		if s.c.cut {
			s.breaks()
			return
		}
		p.deliver(s.life, func() {
			if conn != s.conn || s.ended != nil {
				return
			}
			if s.ended = ended; ended == nil {
				s.inbox = append(s.inbox, r)
				if n := len(r.Events); n > 0 {
					s.arrived = r.Events[n-1].Kv.ModRevision + 1
				}
			}
			select {
			case s.news <- struct{}{}:
			default:
			}
		})
	})
}

// breaks loses what is on its way. The client connects again in a while.
func (s *stream) breaks() {
	s.conn++
	s.broken = true
	s.again()
}

func (s *stream) again() {
	e := s.c.e
	e.after(e.between(10*time.Millisecond, 3*time.Second), func() {
		switch {
		case s.over || s.ended != nil || s.life != s.c.p.life:
		case s.c.cut || s.c.p.paused || e.away:
			s.again()
		default:
			s.broken, s.next = false, s.arrived
			s.pump()
		}
	})
}
