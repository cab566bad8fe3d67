package command

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/repair"
)

// The census names what cannot be repaired, and why: here there is nobody to copy to.
func TestListUnderReplicated(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithBrokerConfig(broker.Config{RollBytes: 1 << 10, Repair: repair.Config{
		Delay: -1, ScanEvery: 50 * time.Millisecond, PollEvery: 50 * time.Millisecond, RetryMost: 100 * time.Millisecond,
	}}))
	url := "--url=" + cluster.URL()
	for range 3 { // the first ledgers are full, and closed
		mustRun(t, "", "produce", "orders", "-q", "--count", "1", "--size", "2000", url)
	}
	deadline := time.Now().Add(2 * time.Minute)
	for { // copies that were late when a ledger was closed are made, or have come
		out := mustRun(t, "", "ledger", "list", "--under-replicated", "-o", "name", url)
		if out == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a sound cluster lists %q", out)
		}
	}
	cluster.StopBookie(1)
	var list struct {
		Items []underReplicated `json:"items"`
	}
	d := underReplicated{}
	for d.ID == 0 {
		out := mustRun(t, "", "ledger", "list", "--under-replicated", "--on", "bookie-1", "-o", "json", url)
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			t.Fatal(err)
		}
		for _, l := range list.Items {
			if l.State == "STUCK" {
				d = l
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("nothing is stuck: %s", out)
		}
	}
	if d.Owner == "" || len(d.Causes) == 0 || d.Causes[0] != "lost" || len(d.Bookies) != 1 || d.Bookies[0] != "bookie-1" || !strings.Contains(d.Reason, "bookie-1") {
		t.Errorf("got %+v", d)
	}
	if out := mustRun(t, "", "ledger", "list", "--under-replicated", url); !strings.Contains(out, "STUCK") || !strings.Contains(out, "REASON") {
		t.Errorf("the table is\n%s", out)
	}
}
