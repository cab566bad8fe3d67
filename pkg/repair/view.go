package repair

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Bookie is what is known of one storage identity.
type Bookie struct {
	ID string
	// Live: it is registered.
	Live bool
	// Lost: its copies do not count any more. It may be registered again all the same.
	Lost bool
	// Emptying: its copies count, and are to be made elsewhere now.
	Emptying bool
	// RelaxZones: for that, a ledger's minimum of zones need not be kept. Rate is how many bytes a second may be copied for it by this
	// worker; 0: no bound.
	RelaxZones bool
	Rate       int64
	// Candidate is for placement, of a live one.
	Candidate ledger.Candidate
}

// View is the cluster as far as repair is concerned. An identity that is not in it is lost.
type View struct {
	Now     time.Time
	Bookies map[entry.StorageUUID]Bookie
}

func (v View) lost(u entry.StorageUUID) bool {
	b, known := v.Bookies[u]
	return !known || b.Lost
}

// name is what people call a bookie.
func (v View) name(u entry.StorageUUID) string {
	if b := v.Bookies[u]; b.ID != "" {
		return "bookie " + b.ID
	}
	return "storage " + u.String()
}

// leaves reports whether the copies of u are to be made elsewhere.
func (v View) leaves(u entry.StorageUUID) bool { return v.lost(u) || v.Bookies[u].Emptying }

// candidates are the live bookies that may get copies. The others are named as draining, so that what is missing is told rightly.
func (v View) candidates() []ledger.Candidate {
	var all []ledger.Candidate
	for _, b := range v.Bookies {
		if b.Live && !b.Lost {
			all = append(all, b.Candidate)
		}
	}
	return all
}

// host stands for where a slot's bookie is: where it is now, or was when it was placed. 0 is unknown.
func (v View) host(s meta.Slot) uint32 {
	if b := v.Bookies[s.UUID]; b.Live {
		return meta.HostHash(b.Candidate.Host)
	}
	return s.Host
}

// Topology is what is known of bookies, brokers and operations, a little late. *meta.Cache is one.
type Topology interface {
	Bookies() []meta.BookieInfo
	Brokers() []meta.BrokerInfo
	Marks() []meta.Mark
	Operations() []meta.Operation
}

// NewView puts together what is known: the identities that the cluster has, those that are absent and since when, and the topology.
// workers is among how many the rates of operations are divided.
func NewView(now time.Time, cookies []meta.Cookie, absent []meta.AbsentBookie, t Topology, workers int) View {
	v := View{Now: now, Bookies: map[entry.StorageUUID]Bookie{}}
	for _, c := range cookies {
		if !c.Retired {
			v.Bookies[c.UUID] = Bookie{ID: c.ID}
		}
	}
	for _, a := range absent {
		if b, ok := v.Bookies[a.UUID]; ok && !now.Before(a.Lost) {
			b.Lost = true
			v.Bookies[a.UUID] = b
		}
	}
	for _, k := range t.Bookies() {
		v.Bookies[k.UUID] = Bookie{
			ID: k.ID, Live: true,
			Candidate: ledger.Candidate{
				UUID: k.UUID, Host: k.Host, Zone: k.Zone, FreeBytes: k.FreeBytes,
				Writable: k.State == meta.BookieWritable, Draining: k.Draining, Full: k.State == meta.BookieFull,
			},
		}
	}
	operations := map[string]meta.Operation{}
	for _, o := range t.Operations() {
		operations[o.ID] = o
	}
	for _, m := range t.Marks() {
		b, ok := v.Bookies[m.UUID]
		if !ok {
			continue
		}
		b.Candidate.Draining = true
		b.Lost = b.Lost || m.Kind == meta.MarkDead
		if o, ok := operations[m.Operation]; ok {
			b.Emptying = m.Empties() && o.MayCopy()
			b.RelaxZones = o.RelaxZones
			if o.Rate > 0 {
				b.Rate = max(o.Rate/int64(max(workers, 1)), 1)
			}
		}
		v.Bookies[m.UUID] = b
	}
	return v
}

// Stretch is a fragment with its place in its ledger.
type Stretch struct {
	meta.Fragment
	// Last is its last entry, First-1 if it has none. It counts only if the fragment is settled.
	Last entry.EntryID
	// Settled: no writer and no recovery writes to it any more.
	Settled bool
}

// Stretches returns a ledger's fragments.
func Stretches(l meta.Ledger) []Stretch {
	all := make([]Stretch, len(l.Fragments))
	for i, f := range l.Fragments {
		all[i] = Stretch{Fragment: f, Last: l.Last, Settled: i < len(l.Fragments)-1 || l.State == meta.LedgerClosed}
		if i < len(l.Fragments)-1 {
			all[i].Last = l.Fragments[i+1].First - 1
			if l.State == meta.LedgerClosed {
				all[i].Last = min(all[i].Last, l.Last)
			}
		}
		all[i].Last = max(all[i].Last, f.First-1)
	}
	return all
}

func (s Stretch) entries() uint64 { return uint64(s.Last - s.First + 1) }

// slotOf returns the slot of a bookie, or -1.
func (s Stretch) slotOf(u entry.StorageUUID) int {
	for i, slot := range s.Slots {
		if slot.UUID == u {
			return i
		}
	}
	return -1
}

// has reports whether a slot is in the write set of an entry.
func has(r meta.Replication, slot int, e entry.EntryID) bool {
	return (slot-int(e%entry.EntryID(r.Ensemble))+r.Ensemble)%r.Ensemble < r.WriteQuorum
}
