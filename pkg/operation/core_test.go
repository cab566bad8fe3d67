package operation_test

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/operation"
)

// story steps one core through time, as a runner that writes what it is told to.
type story struct {
	t    *testing.T
	core operation.Core
	op   meta.Operation
	now  time.Time
	up   bool
	p99  time.Duration
}

func begin(t *testing.T, kind meta.OperationKind) *story {
	t.Helper()
	return &story{t: t, now: noon, up: true, op: meta.Operation{
		ID: "op-7", Kind: kind, Bookie: "k1", UUID: storage(1), Ledgers: 3, Bytes: 300, LedgersLeft: 3, BytesLeft: 300, Created: noon, Updated: noon,
	}}
}

func (s *story) step(after time.Duration, left ...operation.Left) operation.Decision {
	s.t.Helper()
	s.now = s.now.Add(after)
	d := s.core.Step(s.op, operation.Survey{Now: s.now, Left: left, Up: s.up, P99: s.p99, Runner: "b1"})
	if d.Write && d.Finish {
		s.t.Fatal("it is to be written and to be finished")
	}
	if d.Write {
		s.op = d.Op
	}
	return d
}

func settled(id entry.LedgerID) operation.Left { return operation.Left{Ledger: id, Bytes: 100} }

func open(id entry.LedgerID) operation.Left {
	return operation.Left{Ledger: id, Open: true, Owner: "public/default/orders"}
}

// From the mark to the proof: what is open first, then what is settled, then nothing.
func TestAnOperationRuns(t *testing.T) {
	t.Parallel()
	s := begin(t, meta.OperationDecommission)
	d := s.step(0, settled(1), settled(2), open(3))
	if !d.Write || s.op.State != meta.OperationDraining || s.op.OpenLeft != 1 || s.op.BytesLeft != 200 || s.op.Runner != "b1" {
		t.Fatalf("first look: %+v", d)
	}
	if d = s.step(time.Second, settled(1), settled(2), open(3)); d.Write {
		t.Fatalf("nothing changed, and it is written: %+v", d)
	}
	if d = s.step(time.Second, settled(1), settled(2)); !d.Write || s.op.State != meta.OperationCopying {
		t.Fatalf("nothing is open: %+v", d)
	}
	if d = s.step(8*time.Second, settled(1)); !d.Write || s.op.LedgersLeft != 1 || s.op.Speed != 10 {
		t.Fatalf("one is copied, 100 bytes in 10 s: %+v", d)
	}
	if d = s.step(9*time.Second, settled(1)); d.Write {
		t.Fatalf("written again: %+v", d)
	}
	if d = s.step(time.Second, settled(1)); !d.Write {
		t.Fatalf("whoever watches thinks that nobody runs it: %+v", d)
	}
	s.op.Paused = true
	if d = s.step(time.Second); d.Finish || d.Op.State != meta.OperationProving {
		t.Fatalf("it finishes while it is paused: %+v", d)
	}
	s.op.Paused = false
	d = s.step(time.Second)
	if !d.Finish || !d.Op.Ended.Equal(s.now) || d.Op.LedgersLeft != 0 || d.Op.BytesLeft != 0 {
		t.Fatalf("nothing is left: %+v", d)
	}
	// Something is placed there after all.
	if d = s.step(time.Second, open(9)); d.Finish || d.Op.State != meta.OperationDraining {
		t.Fatalf("a ledger came: %+v", d)
	}
	s.op.State = meta.OperationCancelled
	if d = s.step(time.Second); d.Finish || d.Write {
		t.Fatalf("it is over: %+v", d)
	}
}

// A ledger that stays open is named after a while.
func TestLedgersThatStayOpen(t *testing.T) {
	t.Parallel()
	s := begin(t, meta.OperationDecommission)
	s.step(0, open(3), settled(4))
	if s.step(29*time.Second, open(3), settled(4)); s.op.Blocked != 0 {
		t.Errorf("blocked at once: %+v", s.op.Blocks)
	}
	s.step(time.Second, open(3), settled(4))
	if s.op.Blocked != 1 || s.op.Blocks[0].Ledger != 3 || s.op.Blocks[0].Owner != "public/default/orders" || !strings.Contains(s.op.Blocks[0].Reason, "add a bookie") {
		t.Errorf("blocked: %+v", s.op.Blocks)
	}
	if s.step(time.Second, settled(4)); s.op.Blocked != 0 || len(s.op.Blocks) != 0 {
		t.Errorf("blocked after it was closed: %+v", s.op.Blocks)
	}
}

// What repair says of a ledger is said of the operation, of so many at most.
func TestReasonsArePassedOn(t *testing.T) {
	t.Parallel()
	s := begin(t, meta.OperationDecommission)
	var left []operation.Left
	for id := range entry.LedgerID(30) {
		l := settled(id + 1)
		l.Stuck = "no bookie in zone c"
		left = append(left, l)
	}
	s.step(0, left...)
	if s.op.Blocked != 30 || len(s.op.Blocks) != meta.MaxOperationBlocks || s.op.Blocks[0].Reason != "no bookie in zone c" {
		t.Errorf("%d blocked, %d named: %+v", s.op.Blocked, len(s.op.Blocks), s.op.Blocks[0])
	}
}

// A dead disk confirms no deletion: whoever empties it does. One that is merely down must come back.
func TestDeletionsOnADeadDisk(t *testing.T) {
	t.Parallel()
	gone := operation.Left{Ledger: 5, Deleting: true}
	s := begin(t, meta.OperationRecover)
	s.up = false
	if d := s.step(0, gone); len(d.Confirm) != 1 || d.Confirm[0] != 5 || d.Op.Blocked != 0 {
		t.Errorf("recover: %+v", d)
	}
	s = begin(t, meta.OperationDecommission)
	if d := s.step(0, gone); len(d.Confirm) != 0 || d.Op.Blocked != 0 {
		t.Errorf("decommission: %+v", d)
	}
	s.up = false
	if d := s.step(0, gone); len(d.Confirm) != 0 || d.Op.Blocked != 1 || !strings.Contains(d.Op.Blocks[0].Reason, "start it") {
		t.Errorf("decommission of one that is down: %+v", d)
	}
}

// Copying waits while publishing is slow.
func TestHeld(t *testing.T) {
	t.Parallel()
	s := begin(t, meta.OperationDecommission)
	s.op.PauseAboveP99 = 50 * time.Millisecond
	for _, c := range []struct {
		p99  time.Duration
		held bool
	}{{0, false}, {50 * time.Millisecond, false}, {51 * time.Millisecond, true}, {80 * time.Millisecond, true}, {20 * time.Millisecond, false}} {
		s.p99 = c.p99
		s.step(100*time.Millisecond, settled(1))
		if s.op.MayCopy() == c.held {
			t.Errorf("at a p99 of %v it may copy: %v (%q)", c.p99, s.op.MayCopy(), s.op.Held)
		}
	}
}
