package integration

import (
	"testing"
	"time"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// A bookie of the open ledger is stopped for longer than it takes to be suspected, and goes on: publishing does not wait
// for it, and what it had not answered by then is in order.
func TestStoppedBookie(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{})
	run := w.load(nil)
	w.more(run, 1000)
	_, all := w.openLedger()
	watch := run.Watch()
	w.strike(run, all[0].Pause)
	w.more(run, 6000)
	w.Logf("publish gap while a bookie is stopped: %v", watch.Stop())
	w.check(all[0].Resume())
	w.more(run, 1000)
	w.strike(run, w.owner().Kill) // the next owner asks it, too
	w.more(run, 500)
	w.unharmed(run)
	w.finish(run)
}

// etcd's leader is stopped, which breaks no connection to it, and goes on: changes of metadata find the next leader.
func TestStoppedEtcdLeader(t *testing.T) {
	t.Parallel()
	w := settle(t, process.Config{Etcds: 3})
	run := w.load(nil)
	w.more(run, 1000)
	leader := w.etcdLeader()
	watch := run.Watch()
	w.strike(run, leader.Pause)
	began := time.Now()
	_, err := w.client.Admin().CreateTopic(w.ctx, &brokerv1.CreateTopicRequest{Topic: "created-without-the-old-leader"})
	w.check(err)
	w.Logf("a topic is created %v after etcd's leader was stopped", time.Since(began))
	owner := w.owner()
	w.check(owner.Kill())
	w.more(run, 3000) // a roll among them
	w.Logf("publish gap while etcd's leader is stopped, and the owner is killed: %v", watch.Stop())
	w.check(leader.Resume())
	w.check(owner.Start(w.ctx))
	w.more(run, 500)
	w.unharmed(run)
	w.finish(run)
}

// A broker that is told to stop ends within a few seconds although nothing that it needs for doing so in good order is there:
// neither etcd nor a bookie, with batches on their way. Its --shutdown-timeout is not what ends it.
func TestStopWithNothingLeft(t *testing.T) {
	t.Parallel()
	for name, still := range map[string]func(p *process.Process) error{
		"gone": (*process.Process).Kill, "stopped": (*process.Process).Pause,
	} {
		t.Run(name, func(t *testing.T) {
			w := settle(t, process.Config{BrokerArgs: []string{"--shutdown-timeout", "10m"}})
			run := w.load(nil)
			w.more(run, 1000)
			owner := w.owner()
			for _, p := range append(w.c.Etcds, w.c.Bookies...) {
				w.check(still(p))
			}
			w.until("batches wait", func() bool {
				sent, acked, _ := run.Counts()
				return sent > acked+100
			})
			began := time.Now()
			w.check(owner.Terminate(w.ctx)) // which kills it, and fails, if w.ctx ends first
			w.Logf("it ended after %v", time.Since(began))
		})
	}
}
