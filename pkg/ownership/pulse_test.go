package ownership

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/meta"
)

func TestSilenceMakesAPeerSuspectAndAnAnswerClearsIt(t *testing.T) {
	t.Parallel()
	var p pulse
	now := time.Duration(0)
	for now < silenceLimit {
		now += PingEvery
		if p.look(now, false) && now <= silenceLimit {
			t.Fatalf("suspect after %v of silence", now)
		}
	}
	now += PingEvery
	if !p.look(now, false) || !p.suspect {
		t.Fatalf("not suspect after %v of silence", now)
	}
	if p.look(now+PingEvery, false) {
		t.Fatal("suspected twice")
	}
	if !p.heard(now+2*PingEvery) || p.suspect {
		t.Fatal("still suspect after an answer")
	}
	if p.heard(now + 3*PingEvery) {
		t.Fatal("the second answer is news")
	}
}

func TestARefusedConnectionIsEnough(t *testing.T) {
	t.Parallel()
	var p pulse
	if !p.refused() || !p.suspect {
		t.Fatal("not suspect")
	}
}

// A broker that was stopped itself must not suspect every peer the moment it goes on.
func TestOwnStandstillProvesNothing(t *testing.T) {
	t.Parallel()
	var p pulse
	p.look(PingEvery, false)
	if p.look(time.Minute, false) {
		t.Fatal("suspect right after standing still")
	}
	now := time.Minute
	for range 10 {
		now += PingEvery
		if p.look(now, false) {
			if silent := now - time.Minute; silent < silenceLimit-PingEvery {
				t.Fatalf("suspected %v after going on", silent)
			}
			return
		}
	}
	t.Fatal("never suspected although the peer stays silent")
}

// fewPeers is a view of brokers that does not change, and a listener that knows whom it was told to suspect.
type fewPeers struct {
	ids []string

	mu       sync.Mutex
	suspects map[string]bool
}

func (f *fewPeers) Brokers() (all []meta.BrokerInfo) {
	for _, id := range f.ids {
		all = append(all, meta.BrokerInfo{ID: id, Peer: id})
	}
	return all
}

func (f *fewPeers) Changed(meta.Kind) <-chan struct{}       { return nil }
func (f *fewPeers) PeerSuspected(b meta.BrokerInfo, _ bool) { f.say(b, true) }
func (f *fewPeers) PeerTrusted(b meta.BrokerInfo)           { f.say(b, false) }
func (f *fewPeers) PeerDraining(meta.BrokerInfo)            {}

func (f *fewPeers) say(b meta.BrokerInfo, suspect bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.suspects[b.ID] = suspect
}

func (f *fewPeers) suspect(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.suspects[id]
}

// Whoever hears none of several peers suspects none of them: it may be the one that is cut off. With one peer that cannot
// be told; with several, one that is heard is enough, or one whose host says that nobody listens.
func TestABrokerThatHearsNobodySuspectsNobody(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ids               []string
		mute, gone, wants []string
	}{
		"cut off":            {ids: []string{"a", "b"}, mute: []string{"a", "b"}},
		"one of two":         {ids: []string{"a", "b"}, mute: []string{"b"}, wants: []string{"b"}},
		"the only one":       {ids: []string{"a"}, mute: []string{"a"}, wants: []string{"a"}},
		"one is gone":        {ids: []string{"a", "b"}, mute: []string{"b"}, gone: []string{"a"}, wants: []string{"a", "b"}},
		"two of three":       {ids: []string{"a", "b", "c"}, mute: []string{"a", "b"}, wants: []string{"a", "b"}},
		"cut off from three": {ids: []string{"a", "b", "c"}, mute: []string{"a", "b", "c"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := &fewPeers{ids: append([]string{"self"}, c.ids...), suspects: make(map[string]bool)}
				var struck atomic.Bool
				is := func(list []string, id string) bool {
					for _, x := range list {
						if x == id {
							return true
						}
					}
					return false
				}
				p := &Peers{Self: "self", View: f, Listener: f, Log: slog.New(slog.DiscardHandler), Pinger: func(ctx context.Context, peer meta.BrokerInfo, pong func(bool), refused func(error)) {
					for ctx.Err() == nil {
						switch {
						case struck.Load() && is(c.gone, peer.ID):
							refused(errors.New("connection refused"))
						case !struck.Load() || !is(c.mute, peer.ID):
							pong(false)
						}
						select {
						case <-ctx.Done():
						case <-time.After(PingEvery):
						}
					}
				}}
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { p.Run(ctx) })
				time.Sleep(5 * time.Second)
				struck.Store(true)
				time.Sleep(time.Second)
				for _, id := range c.ids {
					if got := f.suspect(id); got != is(c.wants, id) {
						t.Errorf("%s is suspect after a second: %v", id, got)
					}
				}
				time.Sleep(time.Minute)
				for _, id := range c.ids {
					if got := f.suspect(id); got != is(c.wants, id) {
						t.Errorf("%s is suspect: %v", id, got)
					}
				}
				struck.Store(false)
				time.Sleep(time.Second)
				for _, id := range c.ids {
					if f.suspect(id) {
						t.Errorf("%s is suspect although it answers", id)
					}
				}
				cancel()
				running.Wait()
			})
		})
	}
}
