package ledger_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// bookies reads "host:zone host:zone!" …; "!" is read-only.
func bookies(spec string) []ledger.Candidate {
	ids := bookieclient.FakeUUIDs(40)
	var list []ledger.Candidate
	for i, s := range strings.Fields(spec) {
		ro := strings.HasSuffix(s, "!")
		host, zone, _ := strings.Cut(strings.TrimSuffix(s, "!"), ":")
		list = append(list, ledger.Candidate{UUID: ids[i], Host: host, Zone: zone, FreeBytes: 1 << 30, Writable: !ro})
	}
	return list
}

func replication(e, qw, qa, zones int) meta.Replication {
	return meta.Replication{Ensemble: e, WriteQuorum: qw, AckQuorum: qa, MinZones: zones}
}

// Full bookies stand in where they are admitted, for as many as are missing.
func TestPlaceOnFullBookies(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		all := bookies("h1:! h2: h3:! h4:")
		slots, err := ledger.Place(ledger.PlaceRequest{
			Replication: replication(3, 3, 2, 0), Candidates: all, Full: true, Rand: rand.New(rand.NewPCG(seed, 0)),
		})
		if err != nil {
			t.Fatal(err)
		}
		full := 0
		for _, s := range slots {
			if s.UUID == all[0].UUID || s.UUID == all[2].UUID {
				full++
			}
		}
		if full != 1 {
			t.Fatalf("%d full bookies are chosen beside two others, want 1", full)
		}
	}
}

func TestPlace(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, bookies string
		r             meta.Replication
		want          string // the error, or ""
	}{
		{"one bookie", "h1:", replication(1, 1, 1, 0), ""},
		{"three hosts", "h1: h2: h3:", replication(3, 3, 2, 0), ""},
		{"two bookies on one host", "h1: h1: h2:", replication(3, 3, 2, 0), "3 bookies on distinct hosts are needed, and 2 hosts have a usable one: add bookies on 1 more host"},
		{"read-only", "h1: h2: h3:!", replication(3, 3, 2, 0), "2 hosts have a usable one (1 bookie is read-only, draining or suspect): add bookies on 1 more host"},
		{"one of three", "h1:", replication(3, 3, 2, 0), "3 bookies on distinct hosts are needed, and 1 host has a usable one: add bookies on 2 more hosts"},
		{"none", "", replication(1, 1, 1, 0), "1 bookie on a host of its own is needed, and 0 hosts have a usable one: add bookies on 1 more host"},
		{"three zones", "h1:a h2:a h3:a h4:b h5:c", replication(3, 3, 2, 0), ""},
		{"two zones asked for", "h1:a h2:a h3:a h4:b", replication(3, 3, 2, 2), ""},
		{"one zone only", "h1:a h2:a h3:a", replication(3, 3, 2, 2), "every entry needs copies in 2 zones"},
		{"unknown zones count as none", "h1:a h2: h3:", replication(3, 3, 2, 2), "every entry needs copies in 2 zones"},
		{"striped over two zones", "h1:a h2:a h3:b h4:b", replication(4, 2, 2, 2), ""},
		{"striped, the zones are lopsided", "h1:a h2:a h3:a h4:b", replication(4, 2, 2, 2), "every entry needs copies in 2 zones"},
	} {
		for seed := range uint64(20) {
			slots, err := ledger.Place(ledger.PlaceRequest{
				Replication: c.r, Candidates: bookies(c.bookies), Rand: rand.New(rand.NewPCG(seed, 0)),
			})
			if c.want != "" {
				var pe *ledger.PlacementError
				if !errors.As(err, &pe) || !strings.Contains(err.Error(), c.want) {
					t.Fatalf("%s: error %v, want %q", c.name, err, c.want)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			checkPlacement(t, c.name, c.r, bookies(c.bookies), slots)
		}
	}
}

func checkPlacement(t *testing.T, name string, r meta.Replication, list []ledger.Candidate, slots []meta.Slot) {
	t.Helper()
	hosts, all := map[string]bool{}, map[string]bool{}
	for _, c := range list {
		all[c.Zone] = true
	}
	for _, s := range slots {
		i := slices.IndexFunc(list, func(c ledger.Candidate) bool { return c.UUID == s.UUID })
		if i < 0 || hosts[list[i].Host] || list[i].Zone != s.Zone || !list[i].Writable {
			t.Fatalf("%s: slot %v is not a usable bookie on a host of its own", name, s)
		}
		hosts[list[i].Host] = true
	}
	for start := range slots {
		zones := map[string]bool{}
		for k := range r.WriteQuorum {
			if z := slots[(start+k)%len(slots)].Zone; z != "" {
				zones[z] = true
			}
		}
		if len(zones) < r.MinZones {
			t.Fatalf("%s: the write set from slot %d spans %d zones", name, start, len(zones))
		}
		if r.Ensemble == r.WriteQuorum && len(zones) < min(len(all), r.WriteQuorum) && !all[""] {
			t.Fatalf("%s: %d zones used of %d", name, len(zones), len(all))
		}
	}
}

func TestPlaceIsDeterministicAndKeeps(t *testing.T) {
	t.Parallel()
	list := bookies("h1:a h2:a h3:b h4:b h5:c h6:c")
	place := func(list []ledger.Candidate, keep []meta.Slot, exclude ...entry.StorageUUID) []meta.Slot {
		slots, err := ledger.Place(ledger.PlaceRequest{
			Replication: replication(3, 3, 2, 2), Candidates: list, Keep: keep, Exclude: exclude, Rand: rand.New(rand.NewPCG(7, 7)),
		})
		noError(t, err)
		return slots
	}
	first := place(list, nil)
	reversed := slices.Clone(list)
	slices.Reverse(reversed)
	equal(t, fmt.Sprint(first), fmt.Sprint(place(reversed, nil)))
	keep := slices.Clone(first)
	keep[1] = meta.Slot{}
	second := place(list, keep, first[1].UUID)
	equal(t, first[0], second[0])
	equal(t, first[2], second[2])
	equal(t, true, first[1].UUID != second[1].UUID)
}

// Bookies with more space get more: with ten times the space, clearly more often.
func TestPlaceWeighsFreeSpace(t *testing.T) {
	t.Parallel()
	list := bookies("h1: h2: h3: h4:")
	list[0].FreeBytes *= 10
	count := map[entry.StorageUUID]int{}
	for seed := range uint64(2000) {
		slots, err := ledger.Place(ledger.PlaceRequest{
			Replication: replication(1, 1, 1, 0), Candidates: list, Rand: rand.New(rand.NewPCG(seed, 3)),
		})
		noError(t, err)
		count[slots[0].UUID]++
	}
	if n := count[list[0].UUID]; n < 1300 || n > 1750 { // 10/13 of 2000 are 1538
		t.Errorf("the roomy bookie was chosen %d times of 2000", n)
	}
	for _, c := range list[1:] {
		if n := count[c.UUID]; n < 80 {
			t.Errorf("another bookie was chosen %d times of 2000", n)
		}
	}
}

// A bookie whose registration lapsed may well be there with its copies: its host stays taken.
func TestPlaceKnowsTheHostOfALapsedRegistration(t *testing.T) {
	t.Parallel()
	all := bookies("h1: h2: h3: h1: h4:")
	place := func(keep []meta.Slot, list ...ledger.Candidate) ([]meta.Slot, error) {
		return ledger.Place(ledger.PlaceRequest{Replication: replication(3, 3, 2, 0), Candidates: list, Keep: keep})
	}
	slots, err := place(nil, all[:3]...)
	noError(t, err)
	at := slices.IndexFunc(slots, func(s meta.Slot) bool { return s.UUID == all[0].UUID })
	open := (at + 1) % 3
	slots[open] = meta.Slot{}
	if got, err := place(slots, all[3]); err == nil {
		t.Errorf("two copies on one host: %v", got)
	}
	got, err := place(slots, all[3], all[4])
	noError(t, err)
	equal(t, all[4].UUID, got[open].UUID)
	// What is registered now is newer than the record: the disk moved.
	moved := all[0]
	moved.Host = "h9"
	got, err = place(slots, moved, all[3])
	noError(t, err)
	equal(t, all[3].UUID, got[open].UUID)
	// One that is listed although it is not registered says nothing of its host.
	absent := ledger.Candidate{UUID: all[0].UUID, Draining: true, Absent: true}
	if got, err := place(slots, absent, all[3]); err == nil {
		t.Errorf("two copies on one host: %v", got)
	}
	// Older records name no host: the registration alone does.
	slots[at].Host = 0
	if got, err := place(slots, all[0], all[3]); err == nil {
		t.Errorf("two copies on one host: %v", got)
	}
	got, err = place(slots, all[3])
	noError(t, err)
	equal(t, all[3].UUID, got[open].UUID)
}
