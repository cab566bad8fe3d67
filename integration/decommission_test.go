package integration

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

var decommissions = flag.Int("decommissions", 1, "how often a bookie is decommissioned under faults, each time in a cluster of its own")

// five is a town of five bookies and two brokers, with small ledgers and bookies that give space back soon.
func five(t *testing.T, etcds int) *town {
	t.Helper()
	return settle(t, process.Config{
		Etcds: etcds, Bookies: 5,
		BookieArgs: []string{"--segment-mib", "4", "--gc-interval", "1s", "--gc-grace", "1s"},
		BrokerArgs: []string{"--lease-ttl", "2s"},
	})
}

// penstock is a command of the tool that the test may kill.
func (w *town) penstock(args ...string) *exec.Cmd {
	w.Helper()
	return exec.CommandContext(w.ctx, filepath.Join(programs(w.T), "penstock"), append(args, "--url", w.c.URL())...)
}

// tool runs a command of the tool, and returns what it printed and its exit code.
func (w *town) tool(args ...string) (out string, code int) {
	w.Helper()
	cmd := w.penstock(args...)
	var data, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &data, &said
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		w.Fatal(err)
	}
	if code = cmd.ProcessState.ExitCode(); code != 0 {
		w.Logf("penstock %s: exit %d: %s", strings.Join(args, " "), code, said.String())
	}
	return data.String(), code
}

// admin asks until the cluster answers: brokers and etcd die under it.
func ask[T any](w *town, f func(brokerv1.AdminClient) (T, error)) (answer T) {
	w.Helper()
	w.until("the cluster answers", func() bool {
		var err error
		answer, err = f(w.client.Admin())
		return err == nil
	})
	return answer
}

func (w *town) operation(id string) *brokerv1.Operation {
	w.Helper()
	return ask(w, func(c brokerv1.AdminClient) (*brokerv1.GetOperationResponse, error) {
		return c.GetOperation(w.ctx, &brokerv1.GetOperationRequest{Id: id})
	}).GetOperation()
}

// closedLedgers are the topic's, by id, with their sizes.
func (w *town) closedLedgers() map[uint64]*brokerv1.Ledger {
	w.Helper()
	all := ask(w, func(c brokerv1.AdminClient) (*brokerv1.ListLedgersResponse, error) {
		return c.ListLedgers(w.ctx, &brokerv1.ListLedgersRequest{Topic: topic})
	})
	out := map[uint64]*brokerv1.Ledger{}
	for _, l := range all.GetLedgers() {
		if l.GetState() == "CLOSED" {
			out[l.GetId()] = l
		}
	}
	return out
}

// fewestCopies reads every copy of ledgers, and returns how many good ones the entry has that has the fewest.
func (w *town) fewestCopies(ledgers map[uint64]*brokerv1.Ledger) (fewest uint32) {
	w.Helper()
	fewest = 1 << 30
	request := &brokerv1.VerifyLedgersRequest{}
	for id := range ledgers {
		request.Ledgers = append(request.Ledgers, id)
	}
	slices.Sort(request.Ledgers)
	stream, err := w.client.Admin().VerifyLedgers(w.ctx, request)
	w.check(err)
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fewest
		}
		w.check(err)
		if r.GetFewest() < fewest {
			fewest = r.GetFewest()
		}
		if before := ledgers[r.GetLedger()]; r.GetEntries() != uint64(before.GetLastEntry()+1) {
			w.Errorf("ledger %d has %d entries, and had %d", r.GetLedger(), r.GetEntries(), before.GetLastEntry()+1)
		}
		for _, p := range r.GetProblems()[:min(len(r.GetProblems()), 3)] {
			w.Logf("ledger %d: %v", r.GetLedger(), p)
		}
	}
}

// onDisk is what a bookie's segments take of its disk, those aside that wait to be used again.
func (w *town) onDisk(p *process.Process, dirs []string) (n int64) {
	w.Helper()
	err := filepath.WalkDir(dirs[slices.Index(w.c.Bookies, p)], func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".seg") || strings.HasPrefix(d.Name(), "spare-") {
			return nil //nolint:nilerr // it was deleted meanwhile
		}
		if info, err := os.Stat(path); err == nil {
			if s, ok := info.Sys().(*syscall.Stat_t); ok {
				n += s.Blocks * 512
			}
		}
		return nil
	})
	w.check(err)
	return n
}

// busiest is the bookie with the most ledgers.
func (w *town) busiest() *process.Process {
	w.Helper()
	all := ask(w, func(c brokerv1.AdminClient) (*brokerv1.ListBookiesResponse, error) {
		return c.ListBookies(w.ctx, &brokerv1.ListBookiesRequest{})
	}).GetBookies()
	most := slices.MaxFunc(all, func(a, b *brokerv1.BookieInfo) int { return int(a.GetLedgers()) - int(b.GetLedgers()) })
	return w.c.Bookie(most.GetId())
}

// gone checks that nothing is left of a bookie that was emptied, and that the ledgers are what they were, with copies elsewhere.
func (w *town) gone(victim *process.Process, before map[uint64]*brokerv1.Ledger) {
	w.Helper()
	all := ask(w, func(c brokerv1.AdminClient) (*brokerv1.ListBookiesResponse, error) {
		return c.ListBookies(w.ctx, &brokerv1.ListBookiesRequest{})
	}).GetBookies()
	i := slices.IndexFunc(all, func(b *brokerv1.BookieInfo) bool { return b.GetState() == "RETIRED" })
	if i < 0 || all[i].GetId() != victim.Name || all[i].GetLedgers() != 0 || all[i].GetMark() != "" {
		w.Errorf("bookies after the decommission of %s: %v", victim.Name, all)
	}
	now := w.closedLedgers()
	for id, l := range before {
		if n := now[id]; n == nil || n.GetBytes() != l.GetBytes() || n.GetLastEntry() != l.GetLastEntry() {
			w.Errorf("ledger %d was %v, and is %v", id, l, n)
		}
	}
	for id, l := range now {
		for _, f := range l.GetFragments() {
			for _, s := range f.GetSlots() {
				if i >= 0 && s.GetStorageUuid() == all[i].GetStorageUuid() {
					w.Errorf("ledger %d names it", id)
				}
			}
		}
	}
}

// start begins a decommission with the tool, which does not follow it.
func (w *town) start(victim *process.Process, flags ...string) (id string) {
	w.Helper()
	out, code := w.tool(append([]string{"bookie", "decommission", victim.Name, "--detach", "-o", "json"}, flags...)...)
	var doc struct{ Item struct{ ID string } }
	if err := json.Unmarshal([]byte(out), &doc); err != nil || code != 0 || doc.Item.ID == "" {
		w.Fatalf("decommission %s: exit %d, %v: %s", victim.Name, code, err, out)
	}
	return doc.Item.ID
}

// A bookie of five is emptied while messages are published: no entry ever has fewer copies than before, nothing is lost, what
// it had is elsewhere, and its disk is to be had again, with its id.
func TestDecommission(t *testing.T) {
	t.Parallel()
	dirs := make([]string, 5)
	for i := range dirs {
		dirs[i] = t.TempDir()
	}
	w := prepare(t, process.Config{
		Bookies: 5, BookieDir: func(i int) string { return dirs[i] },
		BookieArgs: []string{"--segment-mib", "4", "--gc-interval", "1s", "--gc-grace", "1s"},
	})
	w.check(w.c.StartAll(w.ctx))
	w.connect()
	run := w.load(func(c *workload.Config) { c.Size, c.Rate = 8<<10, 500 })
	w.until("there are ten ledgers", func() bool { return len(w.closedLedgers()) >= 10 })
	victim := w.busiest()
	before := w.closedLedgers()
	w.until("all copies are there", func() bool { return w.fewestCopies(before) == 3 })

	if out, code := w.tool("bookie", "decommission", victim.Name, "--dry-run"); code != 7 || !strings.HasPrefix(out, "PLAN ") || strings.Contains(out, "NOT SO") {
		t.Fatalf("plan: exit %d: %s", code, out)
	}
	peak := w.onDisk(victim, dirs)
	id := w.start(victim, "--rate", "4MiB")
	if _, code := w.tool("bookie", "decommission", victim.Name, "--detach"); code != 5 {
		t.Errorf("a second operation on one bookie: exit %d", code)
	}
	looks := 0
	for {
		if n := w.fewestCopies(before); n < 3 {
			t.Errorf("an entry has %d copies", n)
		}
		looks++
		op := w.operation(id)
		if op.GetEnded() != nil {
			if op.GetState() != "DONE" {
				t.Fatalf("operation %v", op)
			}
			break
		}
	}
	t.Logf("copies were counted %d times meanwhile; %d ledgers, %d bytes on disk at first", looks, len(before), peak)
	if _, code := w.tool("op", "watch", id); code != 0 {
		t.Errorf("watching it when it is done: exit %d", code)
	}
	w.gone(victim, before)
	w.finish(run)

	// Its disk may be wiped, and its id is free for another: the space is there again.
	_ = victim.Terminate(w.ctx) // it may have ended by itself: it is retired
	w.check(os.RemoveAll(dirs[slices.Index(w.c.Bookies, victim)]))
	w.check(victim.Start(w.ctx))
	if now := w.onDisk(victim, dirs); now >= peak {
		t.Errorf("an empty disk has %d bytes of segments, and had %d", now, peak)
	}
	if _, code := w.tool("bookie", "describe", victim.Name); code != 0 {
		t.Errorf("describe the new bookie: exit %d", code)
	}
}

// The same, with everything killed half-way at random: the tool that follows it, the broker that runs it, the bookie itself, the
// leader of etcd, and then another bookie for good.
func TestDecommissionUnderFaults(t *testing.T) {
	t.Parallel()
	for range *decommissions {
		decommissionUnderFaults(t)
	}
}

func decommissionUnderFaults(t *testing.T) {
	t.Helper()
	w := five(t, 3)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	run := w.load(func(c *workload.Config) { c.Size, c.Rate = 8<<10, 200 })
	w.until("there are six ledgers", func() bool { return len(w.closedLedgers()) >= 6 })
	victim := w.busiest()
	before := w.closedLedgers()
	w.until("all copies are there", func() bool { return w.fewestCopies(before) == 3 })
	id := w.start(victim, "--rate", "1MiB")
	follower := w.penstock("op", "watch", id)
	w.check(follower.Start())
	w.until("somebody runs it", func() bool { return w.operation(id).GetRunner() != "" })

	faults := []func(){
		func() { // the tool
			w.check(follower.Process.Kill())
			_ = follower.Wait()
		},
		func() { // the broker that runs it
			name := w.operation(id).GetRunner()
			i := slices.IndexFunc(w.c.Brokers, func(p *process.Process) bool { return p.Name == name })
			if i < 0 {
				t.Fatalf("broker %q runs it", name)
			}
			w.check(w.c.Brokers[i].Kill())
			w.check(w.c.Brokers[i].Start(w.ctx))
		},
		func() { // the bookie
			if w.operation(id).GetEnded() == nil {
				w.check(victim.Kill())
				if err := victim.Start(w.ctx); err != nil && w.operation(id).GetEnded() == nil {
					t.Fatal(err)
				}
			}
		},
		func() { // etcd's leader
			leader, err := w.c.EtcdLeader(w.ctx)
			w.check(err)
			w.check(leader.Kill())
			w.check(leader.Start(w.ctx))
		},
	}
	rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for _, fault := range faults {
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond) // half-way is anywhere
		fault()
		w.more(run, 20)
	}
	others := slices.DeleteFunc(slices.Clone(w.c.Bookies), func(p *process.Process) bool { return p == victim })
	second := others[rng.IntN(len(others))]
	w.check(second.Kill())
	w.until("it is done", func() bool { return w.operation(id).GetEnded() != nil })
	if op := w.operation(id); op.GetState() != "DONE" {
		t.Fatalf("operation %v", op)
	}
	w.check(second.Start(w.ctx))
	w.gone(victim, before)
	w.until("all copies are there again", func() bool { return w.fewestCopies(before) == 3 })
	w.finish(run)
}
