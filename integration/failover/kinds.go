package failover

import (
	"context"
	"errors"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// kind is one way to strike.
type kind struct {
	name, what string
	// short ones are struck once with every other test.
	short bool
	// choose picks the process; nil for none.
	choose func(*site) (*process.Process, error)
	// stops stops it and lets it go on afterwards; otherwise it is killed and started again.
	stops bool
	// until waits, once messages flow again, for what the cluster does about the process before that comes back.
	until func(*site, *process.Process) error
	// renewed starts the process anew afterwards, so that the next strike meets one that was not struck before.
	renewed bool
	// takesOver tells that another broker has to serve the topic, so that the gap is cut into the steps of that.
	takesOver bool
	// target is the row of the targets, in words, and met whether it is.
	target string
	met    func(r *result, undisturbed *result) bool
}

const (
	medianOwner = 50 * time.Millisecond
	worstOwner  = 150 * time.Millisecond
	worstStop   = 500 * time.Millisecond
	worstStill  = time.Second
)

// kinds are all of them. The first is what the others are compared with.
var kinds = []kind{
	{
		name: "nothing", what: "nothing, for as long", until: pause,
		target: "no failed publish", met: safe,
	},
	{
		name: "kill-owner", what: "kill -9 of the owner", short: true, choose: (*site).owner, takesOver: true,
		target: "12: median ≤ 50 ms, worst ≤ 150 ms",
		met: func(r, _ *result) bool {
			return safe(r, nil) && r.publish.Median() <= medianOwner && r.publish.Worst() <= worstOwner
		},
	},
	{
		name: "kill-bookie", what: "kill -9 of a bookie", choose: (*site).bookie, until: replaced,
		target: "13: no failed publish, worst ≤ 3 × p99 of publishing",
		met:    func(r, undisturbed *result) bool { return safe(r, nil) && r.publish.Worst() <= 3*undisturbed.latency99 },
	},
	{
		name: "kill-etcd-leader", what: "kill -9 of etcd's leader", choose: (*site).etcdLeader, until: elected,
		target: "no failed publish", met: safe,
	},
	{
		name: "stop-bookie", what: "STOP of a bookie, then CONT", choose: (*site).bookie, stops: true, until: replaced,
		target: "13: no failed publish, worst ≤ 0.5 s",
		met:    func(r, _ *result) bool { return safe(r, nil) && r.publish.Worst() <= worstStop },
	},
	{
		name: "stop-owner", what: "STOP of the owner, then CONT", short: true, choose: (*site).owner, stops: true, until: succeeded, renewed: true,
		takesOver: true,
		target:    "13: no failed publish, worst ≤ 1 s",
		met:       func(r, _ *result) bool { return safe(r, nil) && r.publish.Worst() <= worstStill },
	},
}

// safe tells whether nothing went wrong: that is demanded of every kind, on any machine.
func safe(r, _ *result) bool { return r.wrong() == nil }

// takeover is what has to happen before a topic is served by another broker than victim; afterwards its client has to be
// answered.
func takeover(victim, bundle string) []step {
	return []step{
		{"detection", []string{"peer is suspect", "peer=" + victim}},
		{"takeover", []string{"owner of bundle " + bundle + " is"}},
		{"lookup and opening", []string{"of the topic is in_recovery"}},
		{"recovery", []string{"of the topic is open"}},
	}
}

const afterTakeover = "answer to the client"

// undisturbed is how long nothing is done.
const undisturbed = 2 * time.Second

func pause(s *site, _ *process.Process) error { return s.hold(undisturbed) }

// replaced waits until the topic is written to other bookies.
func replaced(s *site, p *process.Process) error {
	return s.until("another bookie has taken the place of "+p.Name, func(ctx context.Context) (bool, error) {
		now, err := s.ensemble(ctx)
		for _, b := range now {
			if b == p {
				return false, err
			}
		}
		return len(now) > 0, err
	})
}

// elected waits until etcd has another leader.
func elected(s *site, _ *process.Process) error {
	_, err := s.c.EtcdLeader(s.ctx)
	return err
}

// succeeded waits until another broker serves the topic.
func succeeded(s *site, p *process.Process) error {
	now, err := s.owner()
	if err == nil && now == p {
		err = errors.New("messages flow, and a broker that is stopped serves their topic")
	}
	return err
}
