package ownership

import (
	"testing"
	"time"
)

func TestSilenceMakesAPeerSuspectAndAnAnswerClearsIt(t *testing.T) {
	t.Parallel()
	var p pulse
	now := time.Duration(0)
	for now < silenceLimit {
		now += PingEvery
		if p.look(now) && now <= silenceLimit {
			t.Fatalf("suspect after %v of silence", now)
		}
	}
	now += PingEvery
	if !p.look(now) || !p.suspect {
		t.Fatalf("not suspect after %v of silence", now)
	}
	if p.look(now + PingEvery) {
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
	p.look(PingEvery)
	if p.look(time.Minute) {
		t.Fatal("suspect right after standing still")
	}
	now := time.Minute
	for range 10 {
		now += PingEvery
		if p.look(now) {
			if silent := now - time.Minute; silent < silenceLimit-PingEvery {
				t.Fatalf("suspected %v after going on", silent)
			}
			return
		}
	}
	t.Fatal("never suspected although the peer stays silent")
}
