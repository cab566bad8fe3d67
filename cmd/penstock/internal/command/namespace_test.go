package command

import (
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/brokertest"
)

// Copies that no bookie is there for are refused, rather than waited for by every producer.
func TestQuorumsThatCannotBeMet(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t, brokertest.WithBookies(3)).URL() // three bookies in no zone
	refused := func(want string, args ...string) {
		t.Helper()
		r := run(t, "", append(args, url)...)
		if r.code != exitRefused || !strings.Contains(r.err, want) || !strings.Contains(r.err, "--force") || strings.Count(r.err, "\n") != 1 {
			t.Errorf("penstock %s: exit %d, %q; want %q", strings.Join(args, " "), r.code, r.err, want)
		}
	}
	refused("ensemble 9, write quorum 3, ack quorum 2 and min zones 0 cannot be met now: place ensemble: 9 bookies on distinct hosts are needed, and 3 hosts have a usable one",
		"namespace", "create", "public/nine", "--ensemble", "9", "--write-quorum", "3", "--ack-quorum", "2")
	if got := mustRun(t, "", "namespace", "list", "-o", "name", url); strings.Contains(got, "nine") {
		t.Fatalf("created all the same: %s", got)
	}
	mustRun(t, "", "namespace", "create", "public/three", "--ensemble", "3", "--write-quorum", "3", "--ack-quorum", "2", url)
	refused("copies in 2 zones", "namespace", "update", "public/three", "--min-zones", "2")
	refused("9 bookies", "namespace", "update", "public/three", "--ensemble", "9")
	mustRun(t, "", "namespace", "update", "public/three", "--ensemble", "9", "--force", url)
	// What is asked for already is no change: other policies can be set.
	mustRun(t, "", "namespace", "update", "public/three", "--message-ttl", "1h", url)
	mustRun(t, "", "namespace", "create", "public/nine", "--ensemble", "9", "--write-quorum", "3", "--ack-quorum", "2", "--force", url)
}
