package broker

import (
	"testing"
	"time"
)

func TestSilenceMakesAPeerSuspectAndAnAnswerClearsIt(t *testing.T) {
	t.Parallel()
	var p pulse
	now := time.Duration(0)
	for now < silenceLimit {
		now += pingEvery
		if v := p.look(now); v != unchanged && now <= silenceLimit {
			t.Fatalf("verdict %d after %v of silence", v, now)
		}
	}
	now += pingEvery
	if v := p.look(now); v != suspected {
		t.Fatalf("verdict %d after %v of silence, want suspected", v, now)
	}
	if v := p.look(now + pingEvery); v != unchanged {
		t.Fatalf("suspected twice: %d", v)
	}
	if v := p.heard(now + 2*pingEvery); v != trusted {
		t.Fatalf("verdict %d after an answer, want trusted", v)
	}
}

func TestARefusedConnectionIsEnough(t *testing.T) {
	t.Parallel()
	var p pulse
	if v := p.refused(); v != suspected {
		t.Fatalf("verdict %d, want suspected", v)
	}
}

// A broker that was stopped itself must not suspect every peer the moment it goes on.
func TestOwnStandstillProvesNothing(t *testing.T) {
	t.Parallel()
	var p pulse
	p.look(pingEvery)
	if v := p.look(time.Minute); v != unchanged {
		t.Fatalf("verdict %d right after standing still", v)
	}
	now := time.Minute
	for range 10 {
		now += pingEvery
		if v := p.look(now); v == suspected {
			if silent := now - time.Minute; silent < silenceLimit-pingEvery {
				t.Fatalf("suspected %v after going on", silent)
			}
			return
		}
	}
	t.Fatal("never suspected although the peer stays silent")
}
