package ownership

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Pinger converses with a peer until ctx ends: it pings it every PingEvery as long as there is a stream, calls pong for
// each answer, and refused after each stream that broke, or could not be had, if nobody listens at the peer's address
// then. Neither call blocks.
type Pinger func(ctx context.Context, peer meta.BrokerInfo, pong func(draining bool), refused func(why error))

// PeerListener learns what pings tell of a peer, again and again as long as it is so: it may hear of a peer's suspicion
// before it hears of the peer. A [Runner] is one.
type PeerListener interface {
	PeerSuspected(peer meta.BrokerInfo, refused bool)
	PeerTrusted(peer meta.BrokerInfo)
	PeerDraining(peer meta.BrokerInfo)
}

// Peers keeps one ping stream to each live broker, from the moment that its registration is seen. A broker that refuses
// connections is suspect at once, whether there was a stream or not, and one that is silent after silenceLimit, unless all
// others are silent as well.
type Peers struct {
	Self     string
	View     BrokersView
	Listener PeerListener
	Pinger   Pinger
	Sched    sched.Scheduler // nil: the real one
	Log      *slog.Logger
}

// BrokersView is what a watch cache tells of brokers.
type BrokersView interface {
	Brokers() []meta.BrokerInfo
	Changed(k meta.Kind) <-chan struct{}
}

// Run pings whoever is registered until ctx ends.
func (p *Peers) Run(ctx context.Context) {
	s := sched.OrReal(p.Sched)
	running := sched.NewGroup(s)
	pings := map[string]*peer{} // by broker id
	h := &hearing{at: map[string]time.Time{}}
	for {
		changed := p.View.Changed(meta.KindBrokers)
		live := map[string]bool{}
		for _, b := range p.View.Brokers() {
			if b.ID == p.Self {
				continue
			}
			live[b.ID] = true
			old, known := pings[b.ID]
			if known && b.Peer == old.info.Peer && b.Started.Equal(old.info.Started) {
				continue
			}
			if known {
				old.cancel()
			}
			ctx, cancel := context.WithCancel(ctx)
			one := &peer{info: b, cancel: cancel, told: make(chan struct{}, 1)}
			pings[b.ID] = one
			h.meet(b.ID, s.Now())
			running.Go(func() { p.watch(ctx, s, one, h) })
			running.Go(func() { p.Pinger(ctx, b, one.pong, one.refuse) })
		}
		for id, old := range pings {
			if !live[id] {
				old.cancel()
				delete(pings, id)
				h.forget(id)
			}
		}
		if _, err := s.Wait(ctx, sched.Channels{changed}); err != nil {
			running.Wait()
			return
		}
	}
}

// peer is one that is pinged.
type peer struct {
	info   meta.BrokerInfo
	cancel context.CancelFunc
	told   chan struct{} // a token: there is news

	mu   sync.Mutex
	news peerNews
}

// peerNews is what a conversation has told and the watch has not taken yet: what came last counts.
type peerNews struct {
	answered, draining bool
	refused            error
}

func (o *peer) pong(draining bool) {
	o.tell(func(n *peerNews) { n.answered, n.draining, n.refused = true, n.draining || draining, nil })
}

func (o *peer) refuse(why error) {
	o.tell(func(n *peerNews) { n.answered, n.refused = false, why })
}

func (o *peer) tell(what func(*peerNews)) {
	o.mu.Lock()
	what(&o.news)
	o.mu.Unlock()
	select {
	case o.told <- struct{}{}:
	default:
	}
}

func (o *peer) take() peerNews {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := o.news
	o.news = peerNews{}
	return n
}

// watch judges one peer until ctx ends. It never waits for the peer: whoever does that, the pinger, tells what comes.
func (p *Peers) watch(ctx context.Context, s sched.Scheduler, one *peer, h *hearing) {
	start, b := s.Now(), one.info
	var pulse pulse
	tick, stop := sched.After(s, PingEvery)
	for {
		i, err := s.Wait(ctx, sched.Channels{one.told, tick})
		if err != nil {
			stop()
			return
		}
		news := one.take()
		if news.answered || news.refused != nil {
			h.heard(b.ID, s.Now())
		}
		if news.refused != nil {
			if pulse.refused() {
				p.Log.Warn("peer is suspect", "peer", b.ID, "why", "it refuses connections", "error", news.refused)
			}
			p.Listener.PeerSuspected(b, true)
		}
		if news.answered && pulse.heard(s.Now().Sub(start)) {
			p.Log.Info("peer answers", "peer", b.ID)
			p.Listener.PeerTrusted(b)
		}
		if news.draining {
			p.Listener.PeerDraining(b)
		}
		if i == 0 {
			continue
		}
		tick, stop = sched.After(s, PingEvery)
		if pulse.look(s.Now().Sub(start), h.deaf(s.Now())) {
			p.Log.Warn("peer is suspect", "peer", b.ID, "why", "pings are not answered")
		}
		if pulse.suspect {
			p.Listener.PeerSuspected(b, false)
		}
	}
}
