package command

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// A cluster that keeps its promises passes, under whatever the faults do; nothing is left of it.
func TestVerify(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBrokers(2))
	url := "--url=" + cluster.URL()
	t.Run("runs", func(t *testing.T) {
		for name, args := range map[string][]string{
			"plain":       {"--rate", "0"},
			"partitioned": {"--partitions", "3", "--producers", "3", "--rate", "2000", "--ack", "all"},
			"unguarded":   {"--dedup=false"},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				flag := filepath.Join(t.TempDir(), "struck")
				args := append([]string{"verify", "-o", "json", "--duration", "1s", "--every", "100ms", "--fault", "touch '" + flag + "'", url}, args...)
				r := run(t, "", args...)
				var doc struct {
					Kind  string
					Items []verifyItem
				}
				if err := json.Unmarshal([]byte(r.out), &doc); r.code != exitOK || err != nil || len(doc.Items) != 2 {
					t.Fatalf("exit %d, %v: %s\n%s", r.code, err, r.err, r.out)
				}
				for _, i := range doc.Items {
					if i.Verdict != "ok" || i.Sent == 0 || i.Acknowledged != i.Sent || i.Received != i.Sent || i.Faults == 0 {
						t.Errorf("%+v", i)
					}
				}
				if d := doc.Items[0]; d.LongestStallSeconds == nil || d.SlowestDeliverySeconds == nil {
					t.Errorf("%+v", d)
				}
				if _, err := os.Stat(flag); err != nil {
					t.Errorf("the fault was not run: %v", err)
				}
			})
		}
	})
	if topics := mustRun(t, "", "topic", "list", "-o", "name", url); topics != "" {
		t.Errorf("left behind: %s", topics)
	}
}

// strikeUntilOver does something to the cluster for as long as a verification takes, and returns what came of that.
func strikeUntilOver(t *testing.T, do func(ctx context.Context), args ...string) result {
	t.Helper()
	ctx, over := context.WithCancel(t.Context())
	var striking sync.WaitGroup
	striking.Go(func() {
		for ctx.Err() == nil {
			do(ctx)
		}
	})
	r := run(t, "", append([]string{"verify"}, args...)...)
	over()
	striking.Wait()
	return r
}

// The judge is worth something only if it finds what is wrong: messages that the subscription skipped are lost to it.
func TestVerifyFindsLoss(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k := cluster.Client()
	r := strikeUntilOver(t, func(ctx context.Context) {
		_, _ = k.Admin().SeekSubscription(ctx, &brokerv1.SeekSubscriptionRequest{Topic: "checked", Subscription: verifyAlong, To: client.Latest().Start()})
	}, "checked", "--rate", "5000", "--duration", "2s", "--timeout", "5s", "--url="+cluster.URL())
	if r.code != exitFailed || !strings.Contains(r.err, "not as promised: delivered, ") || !strings.Contains(r.err, "lost: ") {
		t.Fatalf("exit %d: %s\n%s", r.code, r.err, r.out)
	}
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	if len(lines) != 3 || !strings.HasSuffix(lines[1], "wrong") || !strings.HasSuffix(lines[2], "ok") {
		t.Errorf("delivered is wrong, and stored is not:\n%s", r.out)
	}
	if !strings.Contains(r.err, "the topic is kept: checked") {
		t.Errorf("not kept: %s", r.err)
	}
	mustRun(t, "", "topic", "describe", "checked", "--url="+cluster.URL())
}

// So is what nobody sent.
func TestVerifyFindsStrangers(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	k := cluster.Client()
	r := strikeUntilOver(t, func(ctx context.Context) {
		if _, err := k.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: "checked"}); err != nil {
			return // it is to be made by the command
		}
		p, err := k.Producer(ctx, "checked")
		if err != nil {
			return
		}
		_, _ = p.Publish(ctx, &client.Message{Value: []byte("from nowhere")})
		_ = p.Close(ctx)
	}, "checked", "--duration", "2s", "--url="+cluster.URL())
	if r.code != exitFailed || !strings.Contains(r.err, "delivered, phantom: ") || !strings.Contains(r.err, "stored, phantom: ") {
		t.Fatalf("exit %d: %s\n%s", r.code, r.err, r.out)
	}
}

// Where nothing can be verified, that is no pass.
func TestVerifyFails(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	url := "--url=" + cluster.URL()
	mustRun(t, "", "topic", "create", "there", url)
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"nobody there":     {[]string{"--url", "penstock://127.0.0.1:1", "--timeout", "300ms"}, exitUnreachable, "127.0.0.1:1"},
		"topic in use":     {[]string{"there", url}, exitFailed, "exists"},
		"fault that fails": {[]string{"--duration", "300ms", "--every", "50ms", "--fault", "exit 3", url}, exitFailed, `"exit 3": exit status 3`},
		"small messages":   {[]string{"--size", "8", url}, exitUsage, "--size"},
		"no time":          {[]string{"--duration", "0", url}, exitUsage, "--duration"},
		"unknown level":    {[]string{"--ack", "some", url}, exitUsage, "--ack"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if r := run(t, "", append([]string{"verify"}, c.args...)...); r.code != c.code || !strings.Contains(r.err, c.want) {
				t.Errorf("exit %d: %s", r.code, r.err)
			}
		})
	}
}

// A cluster that stops answering leaves nothing verified: what is missing may be there.
func TestVerifyUnfinished(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	var once sync.Once
	k := cluster.Client()
	r := strikeUntilOver(t, func(ctx context.Context) {
		d, err := k.Admin().DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: "checked"})
		if err == nil && d.GetNextOffset() > 50 {
			once.Do(func() { cluster.StopBookie(0) })
		}
	}, "checked", "--duration", "3s", "--timeout", "3s", "--url="+cluster.URL())
	if r.code != exitUnreachable || !strings.Contains(r.out, "unfinished") || !strings.Contains(r.err, "nothing was acknowledged or delivered for 3s") {
		t.Errorf("exit %d: %s\n%s", r.code, r.err, r.out)
	}
	cluster.StartBookie(0)
}
