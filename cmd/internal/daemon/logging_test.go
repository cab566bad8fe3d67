package daemon

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestRepeatedLinesAreLeftOutAndCounted(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	var out bytes.Buffer
	log, logs := newLogger(&out, slog.LevelInfo, "json", func() time.Time { return now })
	const times = 1000
	for i := range times {
		log.With("bookie", "bookie-1").Warn("it goes wrong", "n", i)
	}
	log.Info("something else")
	log.Debug("not at this level")
	if n := strings.Count(out.String(), "it goes wrong"); n != lineBurst {
		t.Fatalf("the same was logged %d times at once, want %d", n, lineBurst)
	}
	if !strings.Contains(out.String(), "something else") {
		t.Fatal("a line of another message was left out")
	}
	if n := testutil.ToFloat64(logs.suppressed); n != times-lineBurst {
		t.Errorf("%v lines are counted as left out, want %d", n, times-lineBurst)
	}
	if n := testutil.ToFloat64(logs.lines.WithLabelValues("WARN")); n != times {
		t.Errorf("%v warnings are counted, want %d", n, times)
	}
	if n := testutil.ToFloat64(logs.lines.WithLabelValues("DEBUG")); n != 0 {
		t.Errorf("%v lines are counted that nobody asked for", n)
	}
	out.Reset()
	now = now.Add(time.Second)
	for range times {
		log.Warn("it goes wrong")
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != lineRate {
		t.Fatalf("%d lines a second later, want %v", len(lines), lineRate)
	}
	var first struct{ Suppressed int }
	if err := json.Unmarshal([]byte(lines[0]), &first); err != nil {
		t.Fatal(err)
	}
	if first.Suppressed != times-lineBurst {
		t.Errorf("the next line says that %d were left out, want %d: %s", first.Suppressed, times-lineBurst, lines[0])
	}
	if strings.Contains(lines[1], "suppressed") {
		t.Errorf("it is said twice: %s", lines[1])
	}
}

func TestMessagesThatAreRememberedAreBounded(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log, logs := NewLogger(&out, slog.LevelInfo, "text")
	for i := range 3 * maxMessages {
		log.Info(strings.Repeat("x", i%50) + time.Duration(i).String())
	}
	if n := len(logs.messages); n > maxMessages {
		t.Errorf("%d messages are remembered, want at most %d", n, maxMessages)
	}
}
