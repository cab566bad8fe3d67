package brokertest_test

import (
	"bytes"
	"log/slog"
	"sync"
	"testing"

	"github.com/penstock-mq/penstock/pkg/brokertest"
	"github.com/penstock-mq/penstock/pkg/client"
)

// logged is a log that is written by many.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// lines returns what was logged, by line, and forgets it.
func (l *logged) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lines []string
	for line := range bytes.Lines(l.text.Bytes()) {
		lines = append(lines, string(line))
	}
	l.text.Reset()
	return lines
}

// Nothing is logged for a message, a delivery or an acknowledgement, at any level: only what changes the state of something is.
func TestLogsDoNotGrowWithMessages(t *testing.T) {
	t.Parallel()
	log := &logged{}
	cluster := brokertest.Start(t, brokertest.WithBookies(3), brokertest.WithLog(log, slog.LevelDebug))
	k := cluster.Client()
	p, err := k.Producer(t.Context(), "busy", client.WithoutBatching())
	check(t, err)
	s, err := k.Subscribe(t.Context(), "busy", "s", client.WithStart(client.Earliest()))
	check(t, err)
	pass := func(n int) {
		receipts := make([]*client.Receipt, n)
		for i := range receipts {
			receipts[i] = p.PublishAsync(t.Context(), &client.Message{Value: []byte("x")})
		}
		for _, r := range receipts {
			_, err := r.Wait(t.Context())
			check(t, err)
		}
		for range n {
			d, err := s.Receive(t.Context())
			check(t, err)
			check(t, d.Ack(t.Context()))
		}
	}
	pass(10)
	if len(log.lines()) == 0 {
		t.Fatal("a cluster starts, and nothing is logged")
	}
	const messages = 2000
	pass(messages)
	if lines := log.lines(); len(lines) > messages/100 {
		t.Errorf("%d lines were logged for %d messages, such as: %q", len(lines), messages, lines[:5])
	}
}
