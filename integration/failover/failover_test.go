package failover

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/integration/figures"
)

var (
	kills   = flag.Int("kills", 0, "strikes of each kind; 0 is one of a few kinds")
	results = flag.String("results", "", "file to write the page to")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Whatever dies or stops, no publish fails, and nothing is lost, repeated or reordered. How long the gaps are is told, and fails
// nothing: that depends on the machine.
func TestStrikes(t *testing.T) {
	programs, err := filepath.Abs(programDirectory)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.ArtifactDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	s, err := settle(ctx, programs, dir)
	t.Cleanup(func() {
		if t.Failed() && s.c != nil {
			t.Log(logsOf(s.c.All()))
		}
		s.close()
		if !t.Failed() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	commit, strikes := figures.BuiltFrom(programs), *kills
	var all []*result
	for _, k := range kinds {
		if strikes == 0 && !k.short {
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			r := s.deal(k, max(strikes, 1), t.Logf)
			all = append(all, r)
			if err := r.wrong(); err != nil {
				t.Error(err)
			}
			if *results != "" {
				if err := written(all, strikes, commit).Write(*results); err != nil {
					t.Error(err)
				}
			}
			if len(r.worst.lines) > 0 {
				t.Logf("the worst: %s", explained(&r.worst))
			}
		})
	}
}
