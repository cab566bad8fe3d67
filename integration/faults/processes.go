//go:build linux

package faults

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Faults of processes: killed, stopped, restarted.

func killOwner(s *site) error {
	p, err := s.owner()
	if err != nil {
		return err
	}
	if err := p.Kill(); err != nil {
		return err
	}
	if err := s.hold(3 * time.Second); err != nil {
		return err
	}
	return s.startAll(p)
}

func killBrokers(s *site) error {
	if err := killAll(s.c.Brokers); err != nil {
		return err
	}
	if err := s.hold(time.Second); err != nil {
		return err
	}
	return s.startAll(s.c.Brokers...)
}

// killBookies kills so many bookies of the ensemble that is written to, all at once.
func killBookies(n int) func(*site) error {
	return func(s *site) error {
		all, err := s.ensemble()
		if err != nil {
			return err
		}
		if n > len(all) {
			all = s.c.Bookies
		} else {
			all = all[:n]
		}
		if err := killAll(all); err != nil {
			return err
		}
		if err := s.hold(3 * time.Second); err != nil {
			return err
		}
		return s.startAll(all...)
	}
}

func killEverything(s *site) error {
	if err := killAll(s.c.All()); err != nil {
		return err
	}
	return s.startAll(s.c.All()...)
}

// stop stops a process in its tracks for a while.
func (s *site) stop(p *process.Process, d time.Duration) error {
	if err := p.Pause(); err != nil {
		return err
	}
	if err := s.hold(d); err != nil {
		return err
	}
	return p.Resume()
}

func stopOwner(s *site) error {
	p, err := s.owner()
	if err != nil {
		return err
	}
	return s.stop(p, leaseTTL+1500*time.Millisecond)
}

func stopBookie(s *site) error {
	p, err := s.victim()
	if err != nil {
		return err
	}
	longest := min(60*time.Second, max(6*time.Second, s.long/3))
	return s.stop(p, 5*time.Second+time.Duration(s.rng.Int64N(int64(longest-5*time.Second))))
}

// withLongLeases has brokers outlive an election of etcd's, as they do by default: elsewhere leases are short, so that
// owners that are gone are replaced soon.
func withLongLeases(_ *site, cfg *process.Config) {
	cfg.BrokerArgs = append(cfg.BrokerArgs, "--lease-ttl", "5s")
}

func killEtcdLeader(s *site) error {
	p, err := s.c.EtcdLeader(s.ctx)
	if err != nil {
		return err
	}
	if err := p.Kill(); err != nil {
		return err
	}
	if err := s.hold(3 * time.Second); err != nil {
		return err
	}
	return s.startAll(p)
}

func stopEtcdLeader(s *site) error {
	p, err := s.c.EtcdLeader(s.ctx)
	if err != nil {
		return err
	}
	return s.stop(p, 5*time.Second)
}

// loseEtcd takes two etcds of three away.
func loseEtcd(s *site) error {
	two := slices.Clone(s.c.Etcds)
	s.rng.Shuffle(len(two), func(i, j int) { two[i], two[j] = two[j], two[i] })
	two = two[:2]
	open := s.loads[0] // its ledger is open, and rolls only when it can
	stalled := open.watch()
	if err := killAll(two); err != nil {
		return err
	}
	if err := s.hold(8 * time.Second); err != nil {
		return err
	}
	gap := stalled()
	s.measure("an open ledger's longest stall without etcd", gap, 2*time.Second)
	return s.startAll(two...)
}

// restart restarts one process after the other in good order, as an upgrade does.
func restart(s *site) error {
	for _, p := range slices.Concat(s.c.Bookies, s.c.Brokers) {
		ctx, cancel := context.WithTimeout(s.ctx, patience)
		err := p.Terminate(ctx)
		cancel()
		if err != nil {
			return err
		}
		if code := p.ExitCode(); code != 0 {
			return fmt.Errorf("%s, told to stop, exits with %d", p.Name, code)
		}
		if err := s.startAll(p); err != nil {
			return err
		}
		if err := s.hold(500 * time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// swarm has some processes struck at once, each in its own way.
func swarm(s *site) error {
	owner, err := s.owner()
	if err != nil {
		return err
	}
	bookies, err := s.ensemble()
	if err != nil {
		return err
	}
	leader, err := s.c.EtcdLeader(s.ctx)
	if err != nil {
		return err
	}
	struck := []*process.Process{owner, bookies[0], bookies[1], leader}
	s.rng.Shuffle(len(struck), func(i, j int) { struck[i], struck[j] = struck[j], struck[i] })
	struck = struck[:3]
	var killed []*process.Process
	for _, p := range struck {
		if s.rng.IntN(2) == 0 {
			if err := p.Pause(); err != nil {
				return err
			}
			continue
		}
		if err := p.Kill(); err != nil {
			return err
		}
		killed = append(killed, p)
	}
	if err := s.hold(2*time.Second + time.Duration(s.rng.Int64N(int64(4*time.Second)))); err != nil {
		return err
	}
	for _, p := range struck {
		if !slices.Contains(killed, p) {
			if err := p.Resume(); err != nil {
				return err
			}
		}
	}
	return s.startAll(killed...)
}
