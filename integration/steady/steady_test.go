package steady

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What is due is published, by all producers in turn, also what was due while nobody answered; then it counts from when it was due.
func TestPublish(t *testing.T) {
	t.Parallel()
	c := brokertest.Start(t)
	var producers []*client.Producer
	for i := range 3 {
		p, err := c.Client().Producer(t.Context(), fmt.Sprintf("steady-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		producers = append(producers, p)
	}
	cfg := Config{Rate: 900, For: time.Second, Size: 10, Patience: time.Minute}
	c.StopBookie(0)
	back := make(chan time.Time, 1)
	time.AfterFunc(400*time.Millisecond, func() {
		back <- time.Now()
		c.StartBookie(0)
	})
	r, err := Publish(t.Context(), producers, cfg)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now().Add(-r.Took)
	if r.Sent != 900 || r.Failed != 0 || r.Latencies.Count() != 900 || r.Took < time.Second {
		t.Fatalf("%d sent, %d failed (%v), %d acknowledged in %v", r.Sent, r.Failed, r.Example, r.Latencies.Count(), r.Took)
	}
	if away := (<-back).Sub(began); r.Latencies.Worst() < away {
		t.Errorf("worst %v: nothing could be acknowledged for %v after the first was due", r.Latencies.Worst(), away)
	}
	for i := range 3 {
		s, err := c.Client().Subscribe(t.Context(), fmt.Sprintf("steady-%d", i), "s", client.WithStart(client.Earliest()))
		if err != nil {
			t.Fatal(err)
		}
		for range 300 {
			if _, err := s.Receive(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Publish(ended, producers, cfg); err == nil {
		t.Error("no error of a context that has ended")
	}
}
