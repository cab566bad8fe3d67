package broker

import (
	"strings"
	"testing"
)

// turns returns which of the openings have begun, by name.
func turns(all map[string]*opening, names ...string) string {
	var begun []string
	for _, n := range names {
		select {
		case <-all[n].turn:
			begun = append(begun, n)
		default:
		}
	}
	return strings.Join(begun, " ")
}

// A bounded number of topics are opened at once; then those that producers wait for, in order, then the others in order.
func TestOpeningsInOrder(t *testing.T) {
	t.Parallel()
	var o openings
	first := make([]*opening, maxOpenings)
	for i := range first {
		first[i] = o.ask(i%2 == 0)
		select {
		case <-first[i].turn:
		default:
			t.Fatalf("opening %d of %d at once does not begin", i+1, maxOpenings)
		}
	}
	all := map[string]*opening{"a": o.ask(false), "B": o.ask(true), "c": o.ask(false), "D": o.ask(true), "e": o.ask(false)}
	names := []string{"a", "B", "c", "D", "e"}
	o.hasten(all["c"]) // becomes the last that a producer waits for
	o.hasten(all["D"]) // was asked for by one
	for i, want := range []string{"", "B", "B D", "B c D", "a B c D", "a B c D e"} {
		if got := turns(all, names...); got != want {
			t.Fatalf("after %d ends %q have begun, want %q", i, got, want)
		}
		o.end(first[i])
		o.end(first[i]) // does nothing
	}
	if o.underWay != maxOpenings-1 {
		t.Errorf("%d are under way", o.underWay)
	}
}

// One that is given up while it waits leaves its place to the next, and takes no turn.
func TestOpeningsGivenUp(t *testing.T) {
	t.Parallel()
	var o openings
	begun := make([]*opening, maxOpenings)
	for i := range begun {
		begun[i] = o.ask(true)
	}
	all := map[string]*opening{"a": o.ask(true), "b": o.ask(true)}
	o.end(all["a"])
	o.hasten(all["a"])
	o.end(begun[0])
	if got := turns(all, "a", "b"); got != "b" {
		t.Errorf("%q have begun, want b", got)
	}
	for _, x := range append(begun[1:], all["b"]) {
		o.end(x)
	}
	if o.underWay != 0 || o.producing.Len()+o.others.Len() != 0 {
		t.Errorf("%d under way, %d and %d wait", o.underWay, o.producing.Len(), o.others.Len())
	}
}
