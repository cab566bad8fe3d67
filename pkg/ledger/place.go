package ledger

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/quorum"
)

// PlaceRequest asks for the slots of an ensemble.
type PlaceRequest struct {
	Replication meta.Replication
	// Candidates are the bookies to choose from. Those that are not writable, or draining, are passed over.
	Candidates []Candidate
	// Full admits those that are not writable, too: behind the others.
	Full bool
	// Exclude names identities that must not be chosen.
	Exclude []entry.StorageUUID
	// Keep, when not nil, has a slot per slot of the ensemble: one with a UUID stays as it is, one without is
	// filled. The host of one that stays is taken: the one that Candidates name, or, for a bookie
	// whose registration lapsed, and which still has its copies, the one that the slot names.
	Keep []meta.Slot
	// Rand decides among equals, weighted by free space; nil takes the most space first. The same requests with
	// the same state of Rand get the same answer, whatever the order of Candidates.
	Rand *rand.Rand
}

// PlacementError says what is missing to place an ensemble.
type PlacementError struct {
	// Slots is how many slots were to be filled, Hosts how many hosts had a usable bookie for them. With Hosts < Slots it
	// is hosts that are missing, else zones.
	Slots, Hosts int
	// MinZones and Zones are the zones asked for per write set, and the known zones among all bookies involved.
	MinZones, Zones int
	// Unusable counts bookies passed over: read-only, draining or excluded.
	Unusable int
}

// Error says what there is, and what to add.
func (e *PlacementError) Error() string {
	var passed string
	if e.Unusable > 0 {
		passed = fmt.Sprintf(" (%s read-only, draining or suspect)", count(e.Unusable, "bookie is", "bookies are"))
	}
	if e.Hosts < e.Slots {
		return fmt.Sprintf("place ensemble: %s needed, and %s a usable one%s: add bookies on %s",
			count(e.Slots, "bookie on a host of its own is", "bookies on distinct hosts are"), count(e.Hosts, "host has", "hosts have"),
			passed, count(e.Slots-e.Hosts, "more host", "more hosts"))
	}
	return fmt.Sprintf("place ensemble: every entry needs copies in %d zones, and the usable bookies in %s cannot be arranged so%s: add bookies in other zones",
		e.MinZones, count(e.Zones, "zone", "zones"), passed)
}

func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

const (
	// placeSteps bounds the search for an arrangement: beyond it there may be one, but not among the likely ones.
	placeSteps = 20_000
	// spreadSteps bounds the search for a better one, once there is one. With ensembles of up to five bookies it finds the best.
	spreadSteps = 2000
)

// Place chooses the bookies of an ensemble: never two on one host, spread over zones as far as there are zones
// (within each write set first, then over the ensemble), at least MinZones known zones in every write set, and among
// equals in proportion to free space. It is pure. The error is a *[PlacementError].
//
// It is a depth-first search over the open slots in order, the best candidate first, of those that are alike only that one;
// with zones to spare the first descent succeeds. Choosing slot by slot without going back was rejected: with three zones, E=4 and
// Qw=2 it can paint itself into a corner although an arrangement exists.
func Place(req PlaceRequest) ([]meta.Slot, error) {
	r := req.Replication
	cfg := quorum.Config{Ensemble: r.Ensemble, WriteQuorum: r.WriteQuorum, AckQuorum: r.AckQuorum, MinZones: r.MinZones}
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("place ensemble: %w", err)
	}
	if req.Keep != nil && len(req.Keep) != r.Ensemble {
		return nil, fmt.Errorf("place ensemble: %d slots to keep for an ensemble of %d", len(req.Keep), r.Ensemble)
	}
	p := newPlacer(req)
	p.search(0)
	if p.found == nil {
		return nil, p.failure()
	}
	return p.found, nil
}

type placer struct {
	req   PlaceRequest
	slots []meta.Slot
	hosts map[host]bool // taken
	pool  []Candidate   // usable, best first among equals
	used  []bool        // per pool index
	alike []int         // per pool index, the number of its class: bookies that one can take for one another
	zones map[string]uint64
	steps int
	limit int // of steps
	fail  PlacementError

	found []meta.Slot // the best arrangement so far, and how it is spread
	best  spread
}

// spread is how well an arrangement is spread: the known zones of the write set with the fewest, of all of them together, and of
// the ensemble.
type spread struct{ least, sum, all int }

func (s spread) better(o spread) bool {
	switch {
	case s.least != o.least:
		return s.least > o.least
	case s.sum != o.sum:
		return s.sum > o.sum
	}
	return s.all > o.all
}

func newPlacer(req PlaceRequest) *placer {
	p := &placer{req: req, slots: make([]meta.Slot, req.Replication.Ensemble), hosts: map[host]bool{}}
	copy(p.slots, req.Keep)
	kept := map[entry.StorageUUID]host{} // the zero host is unknown
	zones := map[string]bool{}
	for _, s := range p.slots {
		if s.UUID.IsZero() {
			p.fail.Slots++
			continue
		}
		kept[s.UUID] = host{hash: s.Host}
		if s.Zone != "" {
			zones[s.Zone] = true
		}
	}
	free := map[host]bool{}
	for _, c := range req.Candidates {
		_, stays := kept[c.UUID]
		switch {
		case stays && c.Absent: // its slot knows its host
		case stays:
			kept[c.UUID] = hostOf(c) // disks move
		case c.UUID.IsZero():
		case !c.Writable && !req.Full || c.Draining || slices.Contains(req.Exclude, c.UUID):
			p.fail.Unusable++
		default:
			p.pool = append(p.pool, c)
		}
	}
	for _, h := range kept {
		p.hosts[h] = true
	}
	p.pool = slices.DeleteFunc(p.pool, func(c Candidate) bool { return p.hosts[hostOf(c)] })
	for _, c := range p.pool {
		free[hostOf(c)] = true
		if c.Zone != "" {
			zones[c.Zone] = true
		}
	}
	p.fail.Hosts, p.fail.Zones, p.fail.MinZones = len(free), len(zones), req.Replication.MinZones
	p.sortPool()
	p.used = make([]bool, len(p.pool))
	p.limit = placeSteps
	p.zones = map[string]uint64{"": 0}
	for _, z := range slices.Sorted(maps.Keys(zones)) {
		p.zones[z] = 1 << min(len(p.zones)-1, 63)
	}
	p.classify()
	return p
}

// classify finds out which bookies are alike: those of a zone, but not one on a host that has bookies in another zone, too.
func (p *placer) classify() {
	type class struct {
		zone string
		of   host
	}
	zoneOf, torn := map[host]string{}, map[host]bool{}
	for _, c := range p.pool {
		h := hostOf(c)
		if z, ok := zoneOf[h]; ok && z != c.Zone {
			torn[h] = true
		}
		zoneOf[h] = c.Zone
	}
	classes := map[class]int{}
	p.alike = make([]int, len(p.pool))
	for at, c := range p.pool {
		k := class{zone: c.Zone}
		if h := hostOf(c); torn[h] {
			k.of = h
		}
		if _, ok := classes[k]; !ok {
			classes[k] = len(classes)
		}
		p.alike[at] = classes[k]
	}
}

// host is a failure domain: by the hash of its label, or, of a bookie without one, by the bookie.
type host struct {
	hash uint32
	of   entry.StorageUUID
}

func hostOf(c Candidate) host {
	if c.Host == "" {
		return host{of: c.UUID}
	}
	return host{hash: meta.HostHash(c.Host)}
}

// sortPool puts the candidates in a random order weighted by free space: each draws an exponential of rate
// FreeBytes, the earliest comes first. Those that are not writable come last.
func (p *placer) sortPool() {
	slices.SortFunc(p.pool, func(a, b Candidate) int { return bytes.Compare(a.UUID[:], b.UUID[:]) })
	key := make(map[entry.StorageUUID]float64, len(p.pool))
	for _, c := range p.pool {
		k := 1 / (float64(c.FreeBytes) + 1)
		if p.req.Rand != nil {
			k *= -math.Log(1 - p.req.Rand.Float64())
		}
		key[c.UUID] = k
	}
	slices.SortStableFunc(p.pool, func(a, b Candidate) int {
		switch {
		case a.Writable != b.Writable:
			if a.Writable {
				return -1
			}
			return 1
		case key[a.UUID] < key[b.UUID]:
			return -1
		case key[a.UUID] > key[b.UUID]:
			return 1
		}
		return 0
	})
}

// search tries the arrangements of the slots from i on and keeps the best; true ends it. It leaves the slots as they were.
func (p *placer) search(i int) bool {
	for i < len(p.slots) && !p.slots[i].UUID.IsZero() {
		i++
	}
	reach := p.reach()
	if p.found != nil && !reach.better(p.best) {
		return false
	}
	if i == len(p.slots) {
		if !p.zonesHold() {
			return false
		}
		if p.found == nil {
			p.limit = min(p.limit, p.steps+spreadSteps)
		}
		p.found, p.best = slices.Clone(p.slots), reach
		return reach == p.ideal()
	}
	tried := map[int]bool{}
	for _, at := range p.order(i) {
		c := p.pool[at]
		if p.used[at] || p.hosts[hostOf(c)] || tried[p.alike[at]] {
			continue
		}
		if p.steps++; p.steps > p.limit {
			return true
		}
		tried[p.alike[at]] = true
		p.used[at], p.hosts[hostOf(c)] = true, true
		p.slots[i] = meta.Slot{UUID: c.UUID, Zone: c.Zone, Host: meta.HostHash(c.Host)}
		over := p.search(i + 1)
		p.used[at], p.hosts[hostOf(c)] = false, false
		p.slots[i] = meta.Slot{}
		if over {
			return true
		}
	}
	return false
}

// ideal is the spread that nothing can surpass.
func (p *placer) ideal() spread {
	r, zones := p.req.Replication, len(p.zones)-1
	least := min(zones, r.WriteQuorum)
	if r.WriteQuorum == 1 {
		least = 0
	}
	return spread{least, least * r.Ensemble, min(zones, r.Ensemble)}
}

// reach is the spread of the slots as they are, had each open one a zone that is new to all that it counts for. With single copies there is
// nothing to be spread within a write set.
func (p *placer) reach() spread {
	r, ideal := p.req.Replication, p.ideal()
	known := func(first, n int) int {
		open, seen := 0, uint64(0)
		for k := range n {
			s := &p.slots[(first+k)%len(p.slots)]
			if s.UUID.IsZero() {
				open++
			}
			seen |= p.zones[s.Zone]
		}
		return bits.OnesCount64(seen) + open
	}
	s := spread{least: ideal.least, all: min(ideal.all, known(0, r.Ensemble))}
	if r.WriteQuorum == 1 {
		return s
	}
	for start := range p.slots {
		n := min(ideal.least, known(start, r.WriteQuorum))
		s.least = min(s.least, n)
		s.sum += n
	}
	return s
}

// order returns the pool's indexes in the order to try for slot i: a zone that is rare in the write sets around the
// slot first, then one that is rare in the ensemble; a known zone before an unknown one.
func (p *placer) order(i int) []int {
	r := p.req.Replication
	near, all := map[string]int{}, map[string]int{}
	for j, s := range p.slots {
		if s.UUID.IsZero() {
			continue
		}
		d := (j - i + r.Ensemble) % r.Ensemble
		if d = min(d, r.Ensemble-d); d < r.WriteQuorum {
			near[s.Zone]++
		}
		all[s.Zone]++
	}
	order := make([]int, len(p.pool))
	for at := range order {
		order[at] = at
	}
	slices.SortStableFunc(order, func(a, b int) int {
		za, zb := p.pool[a].Zone, p.pool[b].Zone
		if (za == "") != (zb == "") && len(all) > 0 {
			if za == "" {
				return 1
			}
			return -1
		}
		if d := near[za] - near[zb]; d != 0 {
			return d
		}
		return all[za] - all[zb]
	})
	return order
}

// zonesHold reports whether every write set of the filled ensemble spans MinZones known zones.
func (p *placer) zonesHold() bool {
	r := p.req.Replication
	if r.MinZones <= 1 {
		return true
	}
	for start := range p.slots {
		seen := map[string]bool{}
		for k := range r.WriteQuorum {
			if z := p.slots[(start+k)%r.Ensemble].Zone; z != "" {
				seen[z] = true
			}
		}
		if len(seen) < r.MinZones {
			return false
		}
	}
	return true
}

func (p *placer) failure() error {
	e := p.fail
	return &e
}
