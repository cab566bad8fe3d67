package integration

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// kill -9 of the owner: the other broker takes over, and back again after the first has come back.
func TestKillOwner(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	run := w.load(nil)
	w.more(run, 1000)
	for range 2 {
		owner := w.owner()
		watch := run.Watch()
		w.strike(run, owner.Kill)
		w.more(run, 1000)
		w.Logf("publish gap after kill -9 of the owner: %v", watch.Stop())
		if w.owner() == owner {
			t.Fatal("a dead broker owns the topic")
		}
		w.check(owner.Start(w.ctx))
	}
	w.finish(run)
}

// kill -9 of one bookie of the open ledger, with a spare and without.
func TestKillOneBookie(t *testing.T) {
	t.Parallel()
	for name, bookies := range map[string]int{"spare": 4, "no spare": 3} {
		t.Run(name, func(t *testing.T) {
			w := settle(t, process.Config{Bookies: bookies})
			run := w.load(nil)
			w.more(run, 1000)
			_, victims := w.openLedger()
			watch := run.Watch()
			w.strike(run, victims[0].Kill)
			w.more(run, 500)
			w.Logf("publish gap after kill -9 of a bookie: %v", watch.Stop())
			if bookies > 3 {
				w.until("another bookie has taken its place", func() bool {
					_, now := w.openLedger()
					return !slices.Contains(now, victims[0])
				})
			}
			w.more(run, 2000) // a roll
			w.check(victims[0].Start(w.ctx))
			w.more(run, 500)
			w.finish(run)
		})
	}
}

// kill -9 of two bookies of three: nothing is acknowledged, producers wait within their contexts and get typed errors
// that may be retried, and everything goes on when one is back.
func TestKillTwoBookies(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	patient := w.load(nil)
	hasty := w.load(func(c *workload.Config) { c.Topic, c.Timeout, c.Rate = "hasty", time.Second, 200 })
	w.more(patient, 500)
	w.more(hasty, 100)
	w.strike(patient, w.c.Bookies[0].Kill)
	w.check(w.c.Bookies[1].Kill())
	w.until("a message fails", func() bool { return len(hasty.Failures()) > 0 })
	w.stalls(patient, 1500*time.Millisecond)
	w.stalls(hasty, 1500*time.Millisecond)
	for _, err := range hasty.Failures() {
		var e *client.Error
		if !errors.As(err, &e) || !e.Retryable {
			t.Errorf("not a typed error that may be retried: %v", err)
		}
	}
	w.fewLedgers()
	w.check(w.c.Bookies[0].Start(w.ctx))
	w.more(patient, 1000)
	w.more(hasty, 100)
	w.check(w.c.Bookies[1].Start(w.ctx))
	w.finish(patient)
	w.end(hasty)
}

// Every process is killed at once and started again.
func TestRestartEverything(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	run := w.load(nil)
	for range 2 {
		w.more(run, 1000)
		w.strike(run, w.killAll)
		w.check(w.c.StartAll(w.ctx))
	}
	w.more(run, 500)
	w.finish(run)
}

// killAll kills every process at once: none sees another die first.
func (w *town) killAll() error {
	all := w.c.All()
	killed := make(chan error, len(all))
	for _, p := range all {
		go func() { killed <- p.Kill() }()
	}
	var err error
	for range all {
		err = errors.Join(err, <-killed)
	}
	return err
}

// Every process is told to stop, all at once, and started again.
func TestStopEverything(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{BrokerArgs: []string{"--shutdown-timeout", "3s"}}) // they cannot hand over: nobody is left
	run := w.load(nil)
	w.more(run, 1000)
	all := w.c.All()
	stopped := make(chan error, len(all))
	for _, p := range all {
		go func() { stopped <- p.Terminate(w.ctx) }()
	}
	for range all {
		w.check(<-stopped)
	}
	w.check(w.c.StartAll(w.ctx))
	w.more(run, 500)
	w.finish(run)
}

// A bookie whose disk was wiped refuses to start under its old name, and says what to do.
func TestWipedBookie(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := settle(t, process.Config{BookieDir: func(i int) string {
		if i == 2 {
			return dir
		}
		return ""
	}})
	run := w.load(nil)
	w.more(run, 1000)
	wiped := w.c.Bookies[2]
	w.check(wiped.Kill())
	w.check(os.RemoveAll(dir))
	w.check(wiped.Launch())
	select {
	case <-wiped.Exited():
	case <-w.ctx.Done():
		t.Fatal("it runs")
	}
	if text := wiped.LogTail(); wiped.ExitCode() != 5 || !strings.Contains(text, "--bookie-id") {
		t.Fatalf("exit code %d: %s", wiped.ExitCode(), text)
	}
	w.more(run, 1000)
	w.finish(run)
}

// The demo shows what it promises, and leaves nothing running; neither does one that dies in the middle.
func TestDemo(t *testing.T) {
	t.Parallel()
	w := prepare(t, process.Config{})
	mark := t.TempDir()
	demo := func(args ...string) *process.Process {
		p, err := w.c.Add("penstock", "demo", append([]string{"demo"}, args...), "TMPDIR="+mark)
		w.check(err)
		w.check(p.Launch())
		return p
	}
	p := demo("--messages", "8000", "--rate", "2000")
	select {
	case <-p.Exited():
	case <-w.ctx.Done():
		t.Fatal("it does not end")
	}
	if p.ExitCode() != 0 || !strings.Contains(p.LogTail(), "every message that was sent is stored once") {
		t.Fatalf("exit code %d: %s", p.ExitCode(), p.LogTail())
	}
	if left := running(t, mark); len(left) > 0 {
		t.Fatalf("left running: %v", left)
	}
	w.check(p.Launch())
	w.until("it has begun", func() bool { return strings.Count(p.LogTail(), "ready. A producer") == 2 })
	w.check(p.Kill())
	w.until("nothing runs", func() bool { return len(running(t, mark)) == 0 })
}

// running lists the processes whose command line names a directory.
func running(t *testing.T, dir string) (found []string) {
	t.Helper()
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && strings.Contains(string(line), dir) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// kill -9 of etcd's leader: publishing does not notice, and changes of metadata go on with the next leader.
func TestKillEtcdLeader(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{Etcds: 3})
	run := w.load(nil)
	w.more(run, 1000)
	leader := w.etcdLeader()
	watch := run.Watch()
	w.strike(run, leader.Kill)
	_, err := w.client.Admin().CreateTopic(w.ctx, &brokerv1.CreateTopicRequest{Topic: "created-without-the-old-leader"})
	w.check(err)
	w.more(run, 2500) // a roll among them
	w.Logf("publish gap after kill -9 of etcd's leader: %v", watch.Stop())
	w.check(leader.Start(w.ctx))
	w.strike(run, w.owner().Kill) // takeover works with the new leader
	w.more(run, 500)
	w.finish(run)
}
