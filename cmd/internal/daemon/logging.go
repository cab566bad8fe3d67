package daemon

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Each message may be logged so often at once, and then so often a second. What goes wrong a thousand times a second is told by ten
// lines as well as by all, and with all of them the disk of the log is the next thing that goes wrong.
const (
	lineBurst = 50
	lineRate  = 5.0
	// maxMessages bounds what is remembered. Messages are constants of the source, of which there are fewer.
	maxMessages = 1000
)

// Logs counts what a logger writes and leaves out. It is a collector of metrics.
type Logs struct {
	lines      *prometheus.CounterVec
	suppressed prometheus.Counter
	now        func() time.Time

	mu       sync.Mutex
	messages map[lineKey]*lineBucket
}

// lineKey tells repetitions: the same message at the same level, of whatever it speaks.
type lineKey struct {
	level   slog.Level
	message string
}

// lineBucket has room for lines of one key, and counts those that had none since the last one that had.
type lineBucket struct {
	room    float64
	at      time.Time
	leftOut int
}

// NewLogger returns a logger that writes text, or JSON if format is "json", from level on. Lines of one message that come faster than
// anybody reads them are left out, and counted: in the metrics, and by the next one that is written, as suppressed.
func NewLogger(w io.Writer, level slog.Level, format string) (*slog.Logger, *Logs) {
	return newLogger(w, level, format, time.Now)
}

func newLogger(w io.Writer, level slog.Level, format string, now func() time.Time) (*slog.Logger, *Logs) {
	l := &Logs{
		lines: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "penstock_log_lines_total", Help: "Lines logged, those left out included.",
		}, []string{"level"}),
		suppressed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "penstock_log_suppressed_lines_total", Help: "Lines left out because the same was logged again and again.",
		}),
		now: now, messages: map[lineKey]*lineBucket{},
	}
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		l.lines.WithLabelValues(level.String())
	}
	options := &slog.HandlerOptions{Level: level}
	var handler slog.Handler = slog.NewTextHandler(w, options)
	if format == "json" {
		handler = slog.NewJSONHandler(w, options)
	}
	return slog.New(&limitHandler{Handler: handler, logs: l}), l
}

// Describe implements prometheus.Collector.
func (l *Logs) Describe(ch chan<- *prometheus.Desc) {
	l.lines.Describe(ch)
	l.suppressed.Describe(ch)
}

// Collect implements prometheus.Collector.
func (l *Logs) Collect(ch chan<- prometheus.Metric) {
	l.lines.Collect(ch)
	l.suppressed.Collect(ch)
}

// admit counts a line. It reports whether there is room for it, and how many like it were left out before.
func (l *Logs) admit(level slog.Level, message string) (room bool, leftOut int) {
	l.lines.WithLabelValues(level.String()).Inc()
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	key := lineKey{level, message}
	b := l.messages[key]
	if b == nil {
		if len(l.messages) >= maxMessages {
			clear(l.messages)
		}
		b = &lineBucket{room: lineBurst, at: now}
		l.messages[key] = b
	}
	b.room = min(lineBurst, b.room+max(0, now.Sub(b.at).Seconds())*lineRate)
	b.at = now
	if b.room < 1 {
		b.leftOut++
		l.suppressed.Inc()
		return false, 0
	}
	b.room--
	leftOut, b.leftOut = b.leftOut, 0
	return true, leftOut
}

// limitHandler leaves out lines of which there are too many.
type limitHandler struct {
	slog.Handler
	logs *Logs
}

// Handle implements slog.Handler.
func (h *limitHandler) Handle(ctx context.Context, r slog.Record) error {
	room, leftOut := h.logs.admit(r.Level, r.Message)
	if !room {
		return nil
	}
	if leftOut > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("suppressed", leftOut))
	}
	return h.Handler.Handle(ctx, r) //nolint:wrapcheck // slog's own
}

// WithAttrs implements slog.Handler.
func (h *limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limitHandler{Handler: h.Handler.WithAttrs(attrs), logs: h.logs}
}

// WithGroup implements slog.Handler.
func (h *limitHandler) WithGroup(name string) slog.Handler {
	return &limitHandler{Handler: h.Handler.WithGroup(name), logs: h.logs}
}
