//go:build linux

package faults

import (
	"time"

	"github.com/penstock-mq/penstock/integration/hosts"
	"github.com/penstock-mq/penstock/integration/relay"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Faults of the network.

// How long a line is cut; an owner that is mute for longer than the goal, so that it has to be replaced.
const (
	cutFor  = 5 * time.Second
	muteFor = 17 * time.Second
)

func onNetwork(s *site, cfg *process.Config) {
	s.network = hosts.New(s.TB)
	cfg.Place = s.network.Place
}

// cut swallows what goes from one process to others, for a while; to "" is this program, the client.
func (s *site) cut(d time.Duration, lines ...[2]string) error {
	for _, l := range lines {
		s.network.Cut(l[0], l[1])
	}
	err := s.hold(d)
	for _, l := range lines {
		s.network.Heal(l[0], l[1])
	}
	return err
}

func (s *site) ownerAndBookie() (owner, bookie string, err error) {
	p, err := s.owner()
	if err != nil {
		return "", "", err
	}
	b, err := s.victim()
	if err != nil {
		return "", "", err
	}
	return p.Name, b.Name, nil
}

func cutOwnerFromBookie(s *site) error {
	owner, bookie, err := s.ownerAndBookie()
	if err != nil {
		return err
	}
	return s.cut(cutFor, [2]string{owner, bookie}, [2]string{bookie, owner})
}

// muteBookie lets the owner's requests through, and not the answers.
func muteBookie(s *site) error {
	owner, bookie, err := s.ownerAndBookie()
	if err != nil {
		return err
	}
	return s.cut(cutFor, [2]string{bookie, owner})
}

// deafBookie lets the bookie speak, and hear nothing of the owner.
func deafBookie(s *site) error {
	owner, bookie, err := s.ownerAndBookie()
	if err != nil {
		return err
	}
	return s.cut(cutFor, [2]string{owner, bookie})
}

// muteOwner has nobody but etcd hear the owner.
func muteOwner(s *site) error {
	owner, err := s.owner()
	if err != nil {
		return err
	}
	lines := [][2]string{{owner.Name, ""}}
	for _, p := range append(s.c.Brokers, s.c.Bookies...) {
		if p != owner {
			lines = append(lines, [2]string{owner.Name, p.Name})
		}
	}
	if err := s.cut(muteFor, lines...); err != nil {
		return err
	}
	// TCP sends again what got lost only after pauses that have grown meanwhile; until then that broker is not one which can
	// take over from another, and the next fault would be a second one.
	return s.hold(muteFor)
}

func cutOwnerFromEtcd(s *site) error {
	owner, err := s.owner()
	if err != nil {
		return err
	}
	var lines [][2]string
	for _, p := range s.c.Etcds {
		lines = append(lines, [2]string{owner.Name, p.Name}, [2]string{p.Name, owner.Name})
	}
	return s.cut(leaseTTL+4*time.Second, lines...)
}

// onWires puts brokers and bookies on wires that this program carries.
func onWires(s *site, cfg *process.Config) {
	s.network = hosts.New(s.TB)
	s.wires = make(map[string]*hosts.Wire)
	cfg.Place = func(name string) (string, []string) {
		if s.wires[name] == nil && !isEtcd(name) {
			s.wires[name] = s.network.Wire(name, s.rng.Uint64())
		}
		return s.network.Place(name)
	}
}

func isEtcd(name string) bool { return len(name) > 4 && name[:4] == "etcd" }

// trouble has all wires, or the owner's and one bookie's, be in trouble for a while.
func trouble(t hosts.Trouble, all bool, d time.Duration) func(*site) error {
	return func(s *site) error {
		owner, bookie, err := s.ownerAndBookie()
		if err != nil {
			return err
		}
		for name, w := range s.wires {
			if all || name == owner || name == bookie {
				w.Set(t)
			}
		}
		err = s.hold(d)
		for _, w := range s.wires {
			w.Set(hosts.Trouble{})
		}
		return err
	}
}

// behindLines has each bookie reach etcd through a line of its own.
func behindLines(s *site, cfg *process.Config) {
	s.lines = make(map[string]*relay.Relay)
	cfg.Etcd = func(name string, endpoints []string) []string {
		if len(name) < 6 || name[:6] != "bookie" {
			return nil
		}
		s.lines[name] = relay.New(s.TB, endpoints[0])
		return []string{s.lines[name].Addr()}
	}
	cfg.BookieArgs = append(cfg.BookieArgs, "--gc-interval", "200ms")
}

// breakListings cuts the bookies' lines to etcd over and over, in the midst of whatever they ask.
func breakListings(s *site) error {
	for range 40 {
		for _, l := range s.lines {
			if s.rng.IntN(2) == 0 {
				l.Cut()
			}
		}
		if err := s.hold(time.Duration(10+s.rng.IntN(60)) * time.Millisecond); err != nil {
			return err
		}
		for _, l := range s.lines {
			l.Heal()
		}
		if err := s.hold(time.Duration(20+s.rng.IntN(150)) * time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
