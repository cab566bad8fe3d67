package command

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// What top shows of a cluster that is busy here, broken there.
func TestTopFrame(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 5, 4, 12, 30, 15, 0, time.UTC)
	now := activity{
		Brokers: []brokerActivity{
			{
				ID: "broker-0", Started: at.Add(-26 * time.Hour), trafficRates: trafficRates{1200, 1.2e6, 2400.4, 2.4e6}, Bundles: 9, Unowned: 2, Topics: 31,
				Producers: 12, Consumers: 24, Backlog: 140, PublishBytes: 64 << 20, PublishLimitBytes: 256 << 20,
			},
			{ID: "broker-1", Started: at, Error: "ask 10.0.0.2:7650: connection refused"},
		},
		Bookies: []bookieActivity{
			{ID: "bookie-0", State: "WRITABLE", Zone: "a", FreeBytes: 30 << 30, TotalBytes: 100 << 30},
			{ID: "bookie-1", State: "OFFLINE"},
		},
		Topics: []topicActivity{
			{Topic: "public/default/orders", Broker: "broker-0", trafficRates: trafficRates{1199.5, 1.2e6, 2400, 2.4e6}, StoredBytes: 5 << 30, Producers: 11, Consumers: 24},
			{Topic: "public/default/audit", Broker: "broker-0", trafficRates: trafficRates{0.5, 512, 0, 0}, StoredBytes: 1 << 20, Producers: 1},
		},
		Subscriptions: []subscriptionActivity{
			{Topic: "public/default/audit", Subscription: "archive", LagSeconds: 3725, Backlog: 140, BacklogBytes: 1 << 20, WaitingReason: "no-consumers"},
			{Topic: "public/default/orders", Subscription: "kitchen", Consumers: 24, Unacked: 9, WaitingReason: "none"},
		},
	}
	var out bytes.Buffer
	if err := printFrame(&out, now, at, "no answer"); err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/top.txt"
	if *rewrite {
		if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("the frame is\n%s\nwant\n%s", out.String(), want)
	}
}

// A frame never is larger than the terminal, and leaves nothing of the one before.
func TestTopFitsTheTerminal(t *testing.T) {
	t.Parallel()
	got := fitFrame("one line that is long\ntwo\nthree\nfour\n", 8, 3)
	want := "\x1b[Hone line\x1b[K\r\ntwo\x1b[K\r\nthree\x1b[K\x1b[J"
	if got != want {
		t.Errorf("the frame is %q, want %q", got, want)
	}
}

// top tells of every broker, whichever is asked, and of who is behind.
func TestTop(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t, brokertest.WithBrokers(2), brokertest.WithBrokerConfig(broker.Config{LookEvery: 20 * time.Millisecond}))
	k := cluster.Client()
	const topics = 8 // so that each broker serves some
	for i := range topics {
		topic := fmt.Sprintf("topic-%d", i)
		s, err := k.Subscribe(t.Context(), topic, "late", client.WithStart(client.Earliest()))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		p, err := k.Producer(t.Context(), topic)
		if err != nil {
			t.Fatal(err)
		}
		for range i + 1 {
			if _, err := p.Publish(t.Context(), &client.Message{Value: make([]byte, 100)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, url := range cluster.BrokerURLs() {
		var got struct {
			Kind string
			Item activity
		}
		enough := func() bool {
			text := mustRun(t, "", "top", "--once", "-o", "json", "--url", url)
			if err := json.Unmarshal([]byte(text), &got); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			backlog := uint64(0)
			for _, b := range got.Item.Brokers {
				backlog += b.Backlog
			}
			return backlog == topics*(topics+1)/2
		}
		for end := time.Now().Add(2 * time.Minute); !enough(); {
			if time.Now().After(end) {
				t.Fatalf("the brokers do not have the backlog of all topics after two minutes: %+v", got.Item)
			}
		}
		now := got.Item
		if got.Kind != "Activity" || len(now.Brokers) != 2 || now.Brokers[0].Error != "" || now.Brokers[1].Error != "" {
			t.Errorf("kind %s, brokers %+v", got.Kind, now.Brokers)
		}
		if now.Brokers[0].Topics == 0 || now.Brokers[1].Topics == 0 {
			t.Errorf("one of two brokers has no topics: %+v", now.Brokers)
		}
		if len(now.Bookies) != 1 || now.Bookies[0].State != "WRITABLE" {
			t.Errorf("bookies %+v", now.Bookies)
		}
		if len(now.Subscriptions) != topics {
			t.Fatalf("%d subscriptions, want %d: %+v", len(now.Subscriptions), topics, now.Subscriptions)
		}
		for i := 1; i < topics; i++ {
			if now.Subscriptions[i].LagSeconds > now.Subscriptions[i-1].LagSeconds {
				t.Errorf("subscriptions are not ordered by their lag: %+v", now.Subscriptions)
			}
		}
	}
	if text := mustRun(t, "", "top", "--once", "-n", "3", "--url", cluster.URL()); strings.Count(text, "late") != 3 {
		t.Errorf("three subscriptions were asked for: %s", text)
	}
	for _, args := range [][]string{{"-n", "0"}, {"--every", "1ms"}, {"-o", "xml"}} {
		if r := run(t, "", append([]string{"top", "--url", cluster.URL()}, args...)...); r.code != exitUsage {
			t.Errorf("top %v: exit %d, want %d", args, r.code, exitUsage)
		}
	}
}

// frames ends the context once top has shown a few.
type frames struct {
	shown int
	stop  context.CancelFunc
}

func (f *frames) Write(p []byte) (int, error) {
	if f.shown += strings.Count(string(p), "SUBSCRIPTION"); f.shown >= 3 {
		f.stop()
	}
	return len(p), nil
}

// Without a terminal, top shows one frame after the other until it is stopped, which is no failure.
func TestTopGoesOn(t *testing.T) {
	t.Parallel()
	cluster := brokertest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out := &frames{stop: cancel}
	var errOut bytes.Buffer
	if code := Main(ctx, "test", []string{"top", "--every", "100ms", "--url", cluster.URL()}, strings.NewReader(""), out, &errOut); code != exitOK || out.shown < 3 {
		t.Errorf("exit %d after %d frames: %s", code, out.shown, errOut.String())
	}
}
