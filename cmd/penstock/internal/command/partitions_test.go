package command

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/brokertest"
)

// A subscription of a topic with partitions is managed in all of them at once.
func TestSubscriptionsOfPartitionedTopics(t *testing.T) {
	t.Parallel()
	url := "--url=" + brokertest.Start(t).URL()
	mustRun(t, "", "topic", "create", "parts", "--partitions", "3", url)
	for _, p := range []string{"parts-partition-0", "parts-partition-1", "parts-partition-2"} {
		mustRun(t, "", "produce", p, "-m", "x", "-q", url)
	}
	mustRun(t, "", "subscription", "create", "parts-partition-1", "s", "--from", "earliest", url)
	said := func(want string, args ...string) {
		t.Helper()
		if r := run(t, "", append(args, url)...); r.code != exitOK || !strings.Contains(r.err, want) {
			t.Fatalf("penstock %s: exit %d, %q; want %q", strings.Join(args, " "), r.code, r.err, want)
		}
	}
	said("created in 2 of 3 partitions\n", "subscription", "create", "parts", "s", "--from", "earliest")
	if r := run(t, "", "subscription", "create", "parts", "s", url); r.code != exitFailed || !strings.Contains(r.err, "exists already") {
		t.Fatalf("created twice: exit %d, %s", r.code, r.err)
	}
	if got := mustRun(t, "", "subscription", "list", "parts", url); strings.Count(got, "public/default/parts-partition-") != 3 || !strings.HasPrefix(got, "PARTITION ") {
		t.Fatal(got)
	}
	if got := mustRun(t, "", "subscription", "describe", "parts", "s", url); strings.Count(got, "waits for:") != 3 || strings.Count(got, "\n\npartition:") != 2 {
		t.Fatal(got)
	}
	why := mustRun(t, "", "subscription", "why", "parts", "s", url)
	if lines := strings.Split(strings.TrimSpace(why), "\n"); len(lines) != 3 || !strings.HasPrefix(lines[2], "public/default/parts-partition-2: no-consumers: ") {
		t.Fatal(why)
	}
	var doc struct {
		Kind  string
		Items []subscriptionWait
	}
	if err := json.Unmarshal([]byte(mustRun(t, "", "subscription", "why", "parts", "s", "-o", "json", url)), &doc); err != nil ||
		doc.Kind != "PartitionedSubscriptionWait" || len(doc.Items) != 3 || doc.Items[1].Partition != "public/default/parts-partition-1" {
		t.Fatalf("%v, %v", doc, err)
	}
	said("moved in 3 of 3 partitions\n", "subscription", "seek", "parts", "s", "--to", "latest")
	// One partition alone can be named as before.
	mustRun(t, "", "subscription", "delete", "parts-partition-0", "s", "--yes", url)
	said("deleted in 2 of 3 partitions\n", "subscription", "delete", "parts", "s", "--yes")
	for _, verb := range []string{"describe", "why"} {
		if r := run(t, "", "subscription", verb, "parts", "s", url); r.code != exitNotFound {
			t.Fatalf("%s of none: exit %d, %s", verb, r.code, r.err)
		}
	}
	if r := run(t, "", "subscription", "seek", "parts", "s", "--to", "1:1", url); r.code != exitNotFound {
		t.Fatalf("seek of none: exit %d, %s", r.code, r.err)
	}
}
