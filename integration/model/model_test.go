package model

import (
	"flag"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

var only = flag.String("cluster", ".", "a regular expression for the names of the clusters to search")

var full = flag.Bool("full", false, "search every cluster to the end; otherwise the first states of each, in the order of their depth")

// shortSet is how many states of each cluster are visited without -full.
var shortSet = 20_000

// most bounds the memory of a whole search, to about 1 GB.
const most = 14_000_000

// No rule breaks.
func TestModel(t *testing.T) {
	table := []string{"", "| cluster | bookies | E/Qw/Qa | entries | recoveries | states | depth | |", "|---|---|---|---|---|---|---|---|"}
	for _, c := range Configs() {
		if !regexp.MustCompile(*only).MatchString(c.Name) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			c.Limit = shortSet
			if *full {
				c.Limit = most
			}
			r := Explore(&c)
			if r.Violation != nil {
				t.Errorf("after %d states:\n%s", r.States, r.Violation)
			}
			if r.Closed == 0 && !r.Cut {
				t.Error("the ledger is never closed: the cluster can do nothing")
			}
			table = append(table, row(&c, r))
			t.Log(row(&c, r))
		})
	}
	t.Log(strings.Join(table, "\n"))
}

func row(c *Config, r Result) string {
	how := fmt.Sprintf("%.1f s", r.Took.Round(100*time.Millisecond).Seconds())
	if r.Cut {
		how = "cut"
	}
	return fmt.Sprintf("| %s | %d | %d/%d/%d | %d | %d | %d | %d | %s |", c.Name, c.Bookies, c.Ensemble, c.WriteQuorum, c.AckQuorum,
		len(c.Levels), c.Recoveries, r.States, r.Depth, how)
}

// Each rule of the model's own parts is missed when it is left out.
func TestMutations(t *testing.T) {
	for _, c := range Mutations() {
		t.Run(c.Name, func(t *testing.T) {
			r := Explore(&c)
			if r.Violation == nil {
				t.Fatalf("nothing breaks in %d states", r.States)
			}
			if !strings.HasPrefix(r.Violation.Rule, c.Breaks) {
				t.Errorf("another rule breaks than %s", c.Breaks)
			}
			t.Logf("after %d states:\n%s", r.States, r.Violation)
		})
	}
}

// A packed state comes back as it was.
func TestPack(t *testing.T) {
	for _, c := range Configs() {
		w := newWorld(&c)
		x := &expander{world: w}
		v := newSearch(&c)
		v.visit(&w.first, 0)
		for i := 0; i < v.len() && i < 100; i++ {
			s := c.unpack(v.at(i))
			for _, n := range x.expand(&s) {
				v.visit(&n.s, 0)
				p := make([]byte, v.stride)
				c.pack(&n.s, p)
				if got := c.unpack(p); got != n.s {
					t.Fatalf("%s: %+v\ncomes back as %+v", c.Name, n.s, got)
				}
			}
		}
	}
}
