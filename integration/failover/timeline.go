package failover

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// mark is something that happened, as it was seen by this program or told by a log.
type mark struct {
	at   time.Time
	who  string
	what string
}

// maxMarks bounds what is kept of one strike.
const maxMarks = 4096

// timeline collects what happens during a strike. Its methods are safe for concurrent use.
type timeline struct {
	mu    sync.Mutex
	marks []mark
	logs  map[*process.Process]int64 // how far each was read
}

// begin forgets what was, and where the logs end now.
func (l *timeline) begin(all []*process.Process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.marks, l.logs = nil, make(map[*process.Process]int64)
	for _, p := range all {
		if info, err := os.Stat(p.Log); err == nil {
			l.logs[p] = info.Size()
		}
	}
}

func (l *timeline) note(at time.Time, who, what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.marks) < maxMarks {
		l.marks = append(l.marks, mark{at, who, what})
	}
}

// end returns everything since begin, in order, with what the processes have logged.
func (l *timeline) end() []mark {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := slices.Clone(l.marks)
	for p, from := range l.logs {
		f, err := os.Open(p.Log)
		if err != nil {
			continue
		}
		if _, err := f.Seek(from, io.SeekStart); err == nil {
			out = append(out, logged(p.Name, f)...)
		}
		_ = f.Close()
	}
	slices.SortStableFunc(out, func(a, b mark) int { return a.at.Compare(b.at) })
	return out
}

// logged reads lines of slog's text form; others, such as etcd's, are left out.
func logged(who string, r io.Reader) (found []mark) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() && len(found) < maxMarks {
		when, rest, _ := strings.Cut(lines.Text(), " ")
		text, ok := strings.CutPrefix(when, "time=")
		at, err := time.Parse(time.RFC3339, text)
		if !ok || err != nil {
			continue
		}
		_, what, _ := strings.Cut(rest, " ") // without the level
		found = append(found, mark{at, who, what})
	}
	return found
}

// follow notes etcd's changes as they arrive, until ctx ends. It goes on through elections, from where it was.
func (l *timeline) follow(ctx context.Context, k *clientv3.Client, prefix string) {
	for ctx.Err() == nil {
		for r := range k.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix()) {
			now := time.Now()
			for _, e := range r.Events {
				key := strings.TrimPrefix(string(e.Kv.Key), prefix)
				l.note(now, "etcd", changed(key, e.Kv.Value, e.Type == clientv3.EventTypeDelete))
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(pollInterval):
		}
	}
}

// changed says in words what was written to a key.
func changed(key string, value []byte, deleted bool) string {
	if deleted {
		return key + " is deleted"
	}
	kind, rest, _ := strings.Cut(strings.TrimPrefix(key, "view/"), "/")
	switch kind {
	case "owners":
		var o metav1.Owner
		if proto.Unmarshal(value, &o) == nil {
			return fmt.Sprintf("owner of bundle %s is %s, epoch %d", rest, o.GetBroker(), o.GetEpoch())
		}
	case "ledgers":
		var g metav1.Ledger
		if proto.Unmarshal(value, &g) == nil {
			of := g.GetOther()
			if g.GetData() != nil {
				of = "the topic"
			}
			state := strings.ToLower(strings.TrimPrefix(g.GetState().String(), "LEDGER_STATE_"))
			return fmt.Sprintf("ledger %s of %s is %s, term %d, %d fragments", rest, of, strings.TrimSuffix(state, "_unspecified"), g.GetTerm(), len(g.GetFragments()))
		}
	}
	return key + " is written"
}

// clientLog notes what the SDK logs.
func (l *timeline) clientLog() *slog.Logger {
	return slog.New(slog.NewTextHandler(lineWriter(func(line []byte) {
		for _, m := range logged("client", bytes.NewReader(line)) {
			l.note(m.at, m.who, m.what)
		}
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// lineWriter takes lines, as slog's handlers write them: whole.
type lineWriter func(line []byte)

// Write takes one.
func (w lineWriter) Write(line []byte) (int, error) {
	w(line)
	return len(line), nil
}

// step is a part of a strike, by the mark that ends it: one whose text has all of signs.
type step struct {
	name  string
	signs []string
}

// part is how long a step took.
type part struct {
	name string
	took time.Duration
}

// parts cuts the time from the strike to the end of the gap into steps: each lasts until the first mark after the step before
// that has its signs. A step without a mark before the end has no part of its own; its time belongs to the next one, the last to
// rest.
func parts(steps []step, rest string, marks []mark, struck, end time.Time) (found []part) {
	at := struck
next:
	for _, s := range steps {
		for _, m := range marks {
			// Logs are rounded down to a millisecond.
			if m.at.Before(at.Add(-time.Millisecond)) || m.at.After(end) || !hasAll(m.what, s.signs) {
				continue
			}
			until := at
			if m.at.After(at) {
				until = m.at
			}
			found = append(found, part{s.name, until.Sub(at)})
			at = until
			continue next
		}
	}
	return append(found, part{rest, end.Sub(at)})
}

func hasAll(text string, signs []string) bool {
	for _, s := range signs {
		if !strings.Contains(text, s) {
			return false
		}
	}
	return true
}

// tell writes marks between two moments as lines, the time from the strike on first; at most so many.
func tell(marks []mark, struck, from, until time.Time, most int) (lines []string) {
	for _, m := range marks {
		if m.at.Before(from) || m.at.After(until) {
			continue
		}
		if len(lines) == most {
			return append(lines, "…")
		}
		what := m.what
		if len(what) > 200 {
			what = what[:200] + "…"
		}
		lines = append(lines, fmt.Sprintf("%+8.1f ms  %-9s %s", float64(m.at.Sub(struck))/float64(time.Millisecond), m.who, what))
	}
	return lines
}
