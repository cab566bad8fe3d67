package operation

import (
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// mostOfFree is how much of what is free on the other bookies an operation may take, in percent: what is published
// meanwhile needs room too.
const mostOfFree = 75

// Cluster is what a plan needs to know of the cluster.
type Cluster struct {
	// Bookies are the live ones; those that are marked are draining.
	Bookies []meta.BookieInfo
	// Cookies are all identities, those that are retired too.
	Cookies []meta.Cookie
	// Marked is the mark of the bookie, if it has one.
	Marked *meta.Mark
	// WriteQuorum is the largest that new ledgers are opened with.
	WriteQuorum int
	// Damaged is how many ledgers lack copies now.
	Damaged int
}

// Request says what is asked for.
type Request struct {
	Kind meta.OperationKind
	// Bookie is the identity as its cookie has it.
	Bookie meta.Cookie
	meta.OperationOptions
}

// Check is something that must hold before an operation begins.
type Check struct {
	// Text says what is checked, with the figures; Advice what to do if it does not hold.
	Text, Advice string
	OK           bool
}

// Plan is what an operation would do.
type Plan struct {
	Bookie meta.Cookie
	// Ledgers name the bookie, with so many bytes of copies to make, estimated.
	Ledgers int
	Bytes   int64
	// Targets are the ids of the bookies that may take the copies, Zones the zones they are in; sorted.
	Targets, Zones []string
	Checks         []Check
}

// Refused returns the checks that do not hold.
func (p Plan) Refused() []Check {
	return slices.DeleteFunc(slices.Clone(p.Checks), func(c Check) bool { return c.OK })
}

// MakePlan returns what the operation would do with the ledgers that name the bookie. It is pure.
func MakePlan(r Request, c Cluster, ledgers []meta.Ledger) Plan {
	u := r.Bookie.UUID
	p := Plan{Bookie: r.Bookie, Ledgers: len(ledgers)}
	need := c.WriteQuorum // hosts
	zones := 0
	alone := 0 // ledgers without another copy
	for _, l := range ledgers {
		p.Bytes += BytesOn(l, u)
		need, zones = max(need, l.Ensemble), max(zones, l.MinZones)
		if l.WriteQuorum == 1 {
			alone++
		}
	}
	var free uint64
	hosts := map[string]bool{}
	alive := false
	live := map[entry.StorageUUID]bool{}
	for _, k := range c.Bookies {
		live[k.UUID] = true
		if k.UUID == u {
			alive = true
			continue
		}
		if k.Draining || k.State != meta.BookieWritable {
			continue
		}
		p.Targets = append(p.Targets, k.ID)
		free += k.FreeBytes
		host := k.Host
		if host == "" {
			host = "bookie " + k.ID
		}
		hosts[host] = true
		if k.Zone != "" && !slices.Contains(p.Zones, k.Zone) {
			p.Zones = append(p.Zones, k.Zone)
		}
	}
	slices.Sort(p.Targets)
	slices.Sort(p.Zones)
	var down []string
	for _, k := range c.Cookies {
		if !k.Retired && k.UUID != u && !live[k.UUID] {
			down = append(down, k.ID)
		}
	}
	p.checkBookie(r, c.Marked, alive, alone)
	p.check(need <= len(hosts), fmt.Sprintf("copies on %s ≤ %d left that can take them", count(need, "host", "hosts"), len(hosts)),
		"add bookies on other hosts first")
	zonesOK := zones <= 1 || zones <= len(p.Zones)
	text := fmt.Sprintf("zones ≥ %d per ledger, with %d left", max(zones, 1), len(p.Zones))
	if !zonesOK && r.RelaxZones {
		text, zonesOK = text+": relaxed", true
	}
	p.check(zonesOK, text, "add a bookie in another zone, or give --relax-zone")
	room := uint64(p.Bytes) <= free/100*mostOfFree
	p.check(room, fmt.Sprintf("disks: %s to copy ≤ %d %% of the %s free on the others", bytesText(p.Bytes), mostOfFree, bytesText(int64(free))),
		"add bookies, or delete what is not needed")
	p.check(len(down) == 0, "all other bookies are up"+list(down, ": down are "), "start them, or if one is dead for good: penstock bookie recover")
	if r.Kind == meta.OperationDecommission { // with a dead bookie there are some
		p.check(c.Damaged == 0, fmt.Sprintf("under-replicated now: %d", c.Damaged), "wait for their repair: penstock ledger list --under-replicated")
	}
	return p
}

// checkBookie checks that the operation is the one for the bookie.
func (p *Plan) checkBookie(r Request, marked *meta.Mark, alive bool, alone int) {
	free, text := true, "no other operation empties it"
	if marked != nil && marked.Empties() {
		free, text = false, text+": "+marked.Operation+" does"
	}
	p.check(free, text, "watch that: penstock op watch")
	if r.Kind == meta.OperationRecover {
		p.check(!alive, "bookie "+r.Bookie.ID+" is down", "it lives, and need not be given up: penstock bookie decommission "+r.Bookie.ID)
		p.check(alone == 0, fmt.Sprintf("ledgers without a copy elsewhere: %d", alone), "bring the disk back, or delete their topics: what they have is only there")
		return
	}
	p.check(alive, "bookie "+r.Bookie.ID+" is up", "start it, or if its disk is dead for good: penstock bookie recover "+r.Bookie.ID)
}

func (p *Plan) check(ok bool, text, advice string) {
	if ok {
		advice = ""
	}
	p.Checks = append(p.Checks, Check{Text: text, Advice: advice, OK: ok})
}

func list(all []string, before string) string {
	if len(all) == 0 {
		return ""
	}
	return before + strings.Join(all, ", ")
}

func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// bytesText formats bytes with a binary unit and three digits.
func bytesText(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, exponent := float64(n)/unit, 0
	for value >= unit && exponent < 4 {
		value /= unit
		exponent++
	}
	return fmt.Sprintf("%.3g %ciB", value, "KMGTP"[exponent])
}
