package bookieclient

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// bookies is what pkg/ledger asks of a client.
type bookies interface {
	Add(to entry.StorageUUID, a *bookiewire.Add, done func(error))
	Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error))
	Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error))
	WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error
	WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error)
}

var (
	_ bookies = (*Fake)(nil)
	_ bookies = (*FakeClient)(nil)
)

const ledger entry.LedgerID = 7

func makeAdd(e entry.EntryID, body string) *bookiewire.Add {
	return &bookiewire.Add{
		Ledger: ledger, Entry: e, Nonce: 42, LAC: e - 1,
		Checksum: entry.Checksum(ledger, e, []byte(body)), Body: []byte(body),
	}
}

func recoveryAdd(e entry.EntryID, t entry.Term, body string) *bookiewire.Add {
	a := makeAdd(e, body)
	a.Term, a.Recovery = t, true
	return a
}

// code is the class of an answer.
func code(err error) bookiewire.Code {
	if err == nil {
		return bookiewire.OK
	}
	var e *bookiewire.Error
	if !errors.As(err, &e) {
		panic(fmt.Sprintf("not a *bookiewire.Error: %v", err))
	}
	return e.Code
}

// script drives a manual fake: every answer is written down as "name:code".
type script struct {
	*Fake
	t       *testing.T
	answers []string
}

func newScript(t *testing.T, n int, options ...FakeOption) *script {
	t.Helper()
	s := &script{Fake: NewFake(FakeUUIDs(n), append(options, Manual())...), t: t}
	t.Cleanup(s.Close)
	return s
}

func (s *script) run() {
	for s.Step() {
	}
}

func (s *script) note(name string, err error) {
	s.answers = append(s.answers, name+":"+code(err).String())
}

func (s *script) add(name string, to int, a *bookiewire.Add) {
	s.Add(FakeUUID(to), a, func(err error) { s.note(name, err) })
}

func (s *script) fence(name string, to int, t entry.Term) {
	s.Fence(s.t.Context(), FakeUUID(to), bookiewire.Fence{Ledger: ledger, Term: t}, func(r bookiewire.FenceReply, err error) {
		s.note(fmt.Sprintf("%s(lac=%d)", name, r.LAC), err)
	})
}

func (s *script) read(name string, to int, r bookiewire.Read) {
	r.Ledger = ledger
	s.Read(s.t.Context(), FakeUUID(to), r, func(reply bookiewire.ReadReply, err error) {
		words := []string{name}
		for _, e := range reply.Entries {
			words = append(words, fmt.Sprintf("%d=%s", e.Entry, e.Body))
		}
		s.note(strings.Join(words, " "), err)
	})
}

// expect compares the answers since the last call.
func (s *script) expect(want ...string) {
	s.t.Helper()
	s.run()
	if fmt.Sprint(s.answers) != fmt.Sprint(want) {
		s.t.Fatalf("answers\n got %q\nwant %q", s.answers, want)
	}
	s.answers = nil
}

func TestFakeStoresAndReads(t *testing.T) {
	t.Parallel()
	s := newScript(t, 2)
	s.add("a0", 0, makeAdd(0, "x"))
	if len(s.answers) != 0 {
		t.Fatal("done was called inline")
	}
	s.add("a1", 0, makeAdd(1, "y"))
	s.add("a3", 0, makeAdd(3, "z"))
	s.expect("a0:OK", "a1:OK", "a3:OK")
	s.read("r", 0, bookiewire.Read{First: 0, Stride: 1, MaxEntries: 10, MaxBytes: 100})
	s.read("hole", 0, bookiewire.Read{First: 2, Stride: 1, MaxEntries: 1, MaxBytes: 100})
	s.read("stride", 0, bookiewire.Read{First: 1, Stride: 2, MaxEntries: 2, MaxBytes: 100})
	s.read("bytes", 0, bookiewire.Read{First: 0, Stride: 1, MaxEntries: 2, MaxBytes: 1})
	s.read("other", 1, bookiewire.Read{First: 0, Stride: 1, MaxEntries: 1})
	s.read("nobody", 9, bookiewire.Read{First: 0, Stride: 1, MaxEntries: 1})
	s.expect("nobody:Disconnected", "r 0=x 1=y:OK", "hole:NoEntry", "stride 1=y 3=z:OK", "bytes 0=x:OK", "other:NoLedger")

	s.add("same", 0, makeAdd(0, "x"))
	s.add("different", 0, makeAdd(0, "w"))
	bad := makeAdd(4, "q")
	bad.Checksum++
	s.add("damaged", 0, bad)
	s.expect("same:OK", "different:BadRequest", "damaged:BadChecksum")
	if got := string(s.Body(FakeUUID(0), ledger, 0)); got != "x" {
		t.Fatalf("first copy was replaced by %q", got)
	}
}

func TestFakeFenceRefusesOlderTerms(t *testing.T) {
	t.Parallel()
	s := newScript(t, 1)
	s.add("a0", 0, makeAdd(0, "x"))
	s.fence("f2", 0, 2)
	s.add("zombie", 0, makeAdd(1, "y"))
	s.add("old recovery", 0, recoveryAdd(1, 1, "y"))
	s.fence("f1", 0, 1)
	s.read("r1", 0, bookiewire.Read{First: 0, MaxEntries: 1, Recovery: true, Term: 1})
	s.add("recovery", 0, recoveryAdd(1, 2, "y"))
	s.fence("again", 0, 2)
	s.expect("a0:OK", "f2(lac=-1):OK", "zombie:Fenced", "old recovery:Fenced", "f1(lac=0):Fenced",
		"r1:Fenced", "recovery:OK", "again(lac=0):OK")
	s.add("raises", 0, recoveryAdd(2, 3, "z"))
	s.add("passed", 0, recoveryAdd(3, 2, "z"))
	s.expect("raises:OK", "passed:Fenced")
}

// A negative answer to a recovery read is given only after the fence is durable (B2).
func TestFakeB2NegativeReadFencesDurably(t *testing.T) {
	t.Parallel()
	s := newScript(t, 1)
	b := FakeUUID(0)
	s.HoldSync(b)
	s.read("r", 0, bookiewire.Read{First: 0, MaxEntries: 1, Recovery: true, Term: 1})
	s.expect()
	s.Crash(b)
	s.Restart(b)
	s.expect("r:Disconnected")
	s.Sync(b)
	s.read("r", 0, bookiewire.Read{First: 0, MaxEntries: 1, Recovery: true, Term: 1})
	s.expect("r:NoEntry")
	s.Crash(b)
	s.Restart(b)
	s.add("zombie", 0, makeAdd(0, "x"))
	s.expect("zombie:Fenced")
}

// A fence answers only when the adds taken in before it are durable, and a crash loses both together.
func TestFakeFenceDrainsAdmittedAdds(t *testing.T) {
	t.Parallel()
	s := newScript(t, 1)
	b := FakeUUID(0)
	s.add("a0", 0, makeAdd(0, "x"))
	s.expect("a0:OK")
	s.HoldSync(b)
	s.add("a1", 0, makeAdd(1, "y"))
	s.fence("f", 0, 1)
	s.add("late", 0, makeAdd(2, "z"))
	s.expect("late:Fenced")
	s.Sync(b)
	s.expect("a1:OK", "f(lac=0):OK")
	s.HoldSync(b)
	s.add("a2", 0, recoveryAdd(2, 1, "z"))
	s.expect()
	s.Crash(b)
	s.expect("a2:Disconnected")
	s.Restart(b)
	if got := s.Entries(b, ledger); len(got) != 2 {
		t.Fatalf("entries after the crash: %v", got)
	}
	if s.Term(b, ledger) != 1 {
		t.Fatal("term lost in the crash")
	}
}

// An admission that a fence or a deletion overtook is void, although the ledger is still unknown (B32).
func TestFakeB32AdmissionIsVoidAfterFenceAndDelete(t *testing.T) {
	t.Parallel()
	s := newScript(t, 1)
	b := FakeUUID(0)
	release := s.Hold(AtAdmission, OpAdd)
	s.add("overtaken", 0, makeAdd(0, "x"))
	s.fence("f", 0, 1)
	s.expect("f(lac=-1):OK")
	s.Delete(b, ledger)
	release()
	s.expect("overtaken:NotAdmitted")
}

func TestFakeAsksAdmissionOncePerUnknownLedger(t *testing.T) {
	t.Parallel()
	asked := 0
	s := newScript(t, 1, WithAdmission(func(_ entry.StorageUUID, a *bookiewire.Add) error {
		asked++
		if a.Nonce != 42 {
			return errors.New("other nonce")
		}
		return nil
	}))
	wrong := makeAdd(0, "x")
	wrong.Nonce = 1
	s.add("wrong", 0, wrong)
	s.add("a0", 0, makeAdd(0, "x"))
	s.add("a1", 0, makeAdd(1, "x"))
	s.expect("wrong:NotAdmitted", "a0:OK", "a1:OK")
	if asked != 2 {
		t.Fatalf("asked %d times", asked)
	}
}

func TestFakeScriptsAnswersAndOrder(t *testing.T) {
	t.Parallel()
	s := newScript(t, 2)
	release := s.Hold(AtReply, OpAdd, FakeUUID(0))
	s.add("a0", 0, makeAdd(0, "x"))
	s.add("a1", 0, makeAdd(1, "y"))
	s.add("b0", 1, makeAdd(0, "x"))
	s.expect("b0:OK")
	held := s.Held()
	held[1].Release()
	s.expect("a1:OK")
	held[0].Fail(bookiewire.Disconnected)
	held[0].Release()
	s.expect("a0:Disconnected")
	if got := s.Entries(FakeUUID(0), ledger); len(got) != 2 {
		t.Fatalf("a lost reply undid the add: %v", got)
	}
	release()
	remove := s.Fail(FakeUUID(0), OpAdd, bookiewire.Overloaded, 1)
	s.add("a2", 0, makeAdd(2, "x"))
	s.add("a2", 0, makeAdd(2, "x"))
	s.expect("a2:Overloaded", "a2:OK")
	remove()
	s.Rule(func(c Call) Fate {
		if c.From == "zombie" {
			return Lose
		}
		return Deliver
	})
	s.From("zombie").Add(FakeUUID(0), makeAdd(3, "x"), func(err error) { s.note("zombie", err) })
	s.add("owner", 0, makeAdd(3, "x"))
	s.expect("zombie:Disconnected", "owner:OK")
}

func TestFakeModesLimboCorruption(t *testing.T) {
	t.Parallel()
	s := newScript(t, 1)
	b := FakeUUID(0)
	s.add("a0", 0, makeAdd(0, "x"))
	s.run()
	s.SetMode(b, ModeReadOnly)
	s.add("known", 0, makeAdd(1, "x"))
	fresh := makeAdd(0, "x")
	fresh.Ledger, fresh.Checksum = 8, entry.Checksum(8, 0, []byte("x"))
	s.add("new", 0, fresh)
	s.expect("a0:OK", "known:OK", "new:ReadOnly")
	s.SetMode(b, ModeFull)
	s.add("full", 0, makeAdd(2, "x"))
	s.add("recovery", 0, recoveryAdd(2, 1, "x"))
	s.expect("full:ReadOnly", "recovery:OK")
	s.Corrupt(b, ledger, 0)
	s.SetLimbo(b, ledger)
	s.read("corrupt", 0, bookiewire.Read{First: 0, MaxEntries: 1})
	s.read("limbo", 0, bookiewire.Read{First: 9, MaxEntries: 1})
	s.expect("corrupt:Unknown", "limbo:Unknown")
	s.Wipe(b)
	s.read("wiped", 0, bookiewire.Read{First: 0, MaxEntries: 1})
	s.expect("wiped:NoLedger")
}

func TestFakeLAC(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeUUIDs(1))
		defer f.Close()
		b := FakeUUID(0)
		done := make(chan error, 1)
		f.Add(b, makeAdd(0, "x"), func(err error) { done <- err })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		r, err := f.WaitLAC(t.Context(), b, bookiewire.WaitLAC{Ledger: ledger, After: entry.NoEntry, Timeout: time.Second})
		if err != nil || r.LAC != entry.NoEntry || time.Since(start) != time.Second {
			t.Fatalf("timeout: %v %v after %v", r, err, time.Since(start))
		}
		got := make(chan entry.EntryID, 1)
		go func() {
			r, err := f.WaitLAC(t.Context(), b, bookiewire.WaitLAC{Ledger: ledger, After: entry.NoEntry, Timeout: time.Hour})
			if err != nil {
				t.Error(err)
			}
			got <- r.LAC
		}()
		synctest.Wait()
		if err := f.WriteLAC(t.Context(), b, bookiewire.WriteLAC{Ledger: ledger, Nonce: 1, LAC: 0}); code(err) != bookiewire.NotAdmitted {
			t.Fatal(err)
		}
		if err := f.WriteLAC(t.Context(), b, bookiewire.WriteLAC{Ledger: ledger, Nonce: 42, LAC: 0}); err != nil {
			t.Fatal(err)
		}
		if lac := <-got; lac != 0 {
			t.Fatalf("woken with %d", lac)
		}
	})
}

func TestFakeAnswersEverythingOnCloseAndCancel(t *testing.T) {
	t.Parallel()
	f := NewFake(FakeUUIDs(1))
	f.Rule(func(Call) Fate { return Hold })
	ctx, cancel := context.WithCancel(t.Context())
	answers := make(chan error, 3)
	f.Read(ctx, FakeUUID(0), bookiewire.Read{Ledger: ledger}, func(_ bookiewire.ReadReply, err error) { answers <- err })
	if _, err := f.AwaitHeld(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-answers; code(err) != bookiewire.Disconnected {
		t.Fatal(err)
	}
	f.Add(FakeUUID(0), makeAdd(0, "x"), func(err error) { answers <- err })
	if _, err := f.AwaitHeld(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	f.Close()
	f.Add(FakeUUID(0), makeAdd(0, "x"), func(err error) { answers <- err })
	for range 2 {
		if err := <-answers; code(err) != bookiewire.Disconnected {
			t.Fatal(err)
		}
	}
}
