package bookie

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// bookies is what a ledger asks of a client, real or fake.
type bookies interface {
	Add(to entry.StorageUUID, a *bookiewire.Add, done func(error))
	Read(ctx context.Context, to entry.StorageUUID, r bookiewire.Read, done func(bookiewire.ReadReply, error))
	Fence(ctx context.Context, to entry.StorageUUID, r bookiewire.Fence, done func(bookiewire.FenceReply, error))
	WriteLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WriteLAC) error
	WaitLAC(ctx context.Context, to entry.StorageUUID, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error)
}

// outcome is an answer in words: the code, the stored term with Fenced, and what came with OK.
func outcome(err error, with any) string {
	if err != nil {
		x := bookiewire.AsError(err)
		return fmt.Sprintf("%s term %d", x.Code, x.Term)
	}
	return fmt.Sprintf("OK %v", with)
}

// do carries out one random request, the same for the same rng.
func do(ctx context.Context, c bookies, rng *rand.Rand) (request, answer string) {
	l := entry.LedgerID(1 + rng.IntN(9))
	e := entry.EntryID(rng.IntN(6))
	t := entry.Term(1 + rng.IntN(4))
	body := fmt.Sprintf("body %d of %d", e, l)
	done := make(chan string, 1)
	switch op := rng.IntN(11); op {
	case 0, 1, 2:
		a := makeAdd(l, e, body)
		if rng.IntN(10) == 0 {
			a = makeAdd(l, e, "another body")
		}
		if rng.IntN(10) == 0 {
			a.Nonce++
		}
		if rng.IntN(10) == 0 {
			a.Checksum++
		}
		a.LAC = entry.EntryID(rng.IntN(int(e)+1)) - 1
		request = fmt.Sprintf("add %d/%d %s nonce %d lac %d", l, e, a.Body, a.Nonce, a.LAC)
		c.Add(me.Storage, a, func(err error) { done <- outcome(err, "") })
	case 3, 4:
		a := recoveryAdd(l, e, t, body)
		a.LAC = -1
		request = fmt.Sprintf("recovery add %d/%d term %d", l, e, t)
		c.Add(me.Storage, a, func(err error) { done <- outcome(err, "") })
	case 5, 6, 7:
		r := bookiewire.Read{
			Ledger: l, First: e, Stride: uint32(1 + rng.IntN(2)), MaxEntries: uint32(1 + rng.IntN(4)), MaxBytes: uint32(rng.IntN(60)),
		}
		if op == 7 && rng.IntN(3) == 0 {
			r.Recovery, r.Term, r.MaxEntries = true, t, 1
		}
		request = fmt.Sprintf("read %+v", r)
		c.Read(ctx, me.Storage, r, func(reply bookiewire.ReadReply, err error) {
			words := fmt.Sprint("lac ", reply.LAC)
			for _, x := range reply.Entries {
				words += fmt.Sprintf(", %d: %s %08x", x.Entry, x.Body, x.Checksum) //nolint:perfsprint // a test's few words
			}
			done <- outcome(err, words)
		})
	case 8:
		if rng.IntN(3) > 0 {
			t = 1
		}
		request = fmt.Sprintf("fence %d term %d", l, t)
		c.Fence(ctx, me.Storage, bookiewire.Fence{Ledger: l, Term: t}, func(r bookiewire.FenceReply, err error) { done <- outcome(err, r) })
	case 9:
		request = fmt.Sprintf("write lac %d of %d", e, l)
		done <- outcome(c.WriteLAC(ctx, me.Storage, bookiewire.WriteLAC{Ledger: l, Nonce: nonce, LAC: e}), "")
	default:
		request = fmt.Sprintf("wait lac of %d", l)
		r, err := c.WaitLAC(ctx, me.Storage, bookiewire.WaitLAC{Ledger: l, After: e - 1, Timeout: time.Millisecond})
		done <- outcome(err, r)
	}
	return request, <-done
}

// happen makes something happen to a ledger on both bookies that no request does.
func happen(t *testing.T, r *rig, fake *bookieclient.Fake, rng *rand.Rand) (what string) {
	t.Helper()
	l := entry.LedgerID(1 + rng.IntN(9))
	var err error
	switch rng.IntN(3) {
	case 0:
		what = fmt.Sprintf("limbo of %d", l)
		err = r.store.SetLimbo(t.Context(), l)
		fake.SetLimbo(me.Storage, l)
	case 1:
		what = fmt.Sprintf("end of limbo of %d", l)
		err = r.store.ClearLimbo(t.Context(), l)
		fake.ClearLimbo(me.Storage, l)
	default:
		what = fmt.Sprintf("deletion of %d", l)
		r.records.set(meta.Ledger{ID: l, State: meta.LedgerDeleting})
		err = r.store.DeleteLedger(t.Context(), l, r.store.Mark(l))
		fake.Delete(me.Storage, l)
	}
	if err != nil {
		t.Fatal(err)
	}
	return what
}

// The fake that the tests of other packages trust gives the same answers as a real bookie, over a real store and a real
// connection, to any sequence of requests, whatever the disk has to say.
func TestFakeAnswersAsABookieDoes(t *testing.T) {
	t.Parallel()
	// A disk that fills up is noticed within a second, hence the few seeds.
	for state, seeds := range map[ledgerstore.State]uint64{ledgerstore.Writable: 8, ledgerstore.ReadOnly: 2, ledgerstore.Full: 2} {
		t.Run(fmt.Sprint(state), func(t *testing.T) {
			t.Parallel()
			for seed := range seeds {
				compareFake(t, state, seed)
			}
		})
	}
}

func compareFake(t *testing.T, state ledgerstore.State, seed uint64) {
	t.Helper()
	r := newRig(t, ServerConfig{})
	inRecovery := openLedger(2, me.Storage)
	inRecovery.State, inRecovery.Term = meta.LedgerInRecovery, 3
	r.records.set(inRecovery)
	for id := entry.LedgerID(4); id < 10; id++ { // and 3 does not exist
		r.records.set(openLedger(id, me.Storage))
	}
	fake := bookieclient.NewFake([]entry.StorageUUID{me.Storage}, bookieclient.WithAdmission(func(_ entry.StorageUUID, a *bookiewire.Add) error {
		l, err := r.records.GetLedger(t.Context(), a.Ledger)
		if err != nil {
			return err
		}
		if refusal := Admit(l, me.Storage, a); refusal != nil {
			return refusal
		}
		return nil
	}))
	t.Cleanup(fake.Close)
	const steps = 200
	filled := steps + 1 // the step before which the disk fills up
	if state != ledgerstore.Writable {
		filled = int(seed+1) * steps / 8
	}
	seen := make(map[string]int)
	history := ""
	for i := range steps {
		rng := func() *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(i))) }
		if i == filled {
			r.fill(state)
			fake.SetMode(me.Storage, map[ledgerstore.State]bookieclient.Mode{
				ledgerstore.ReadOnly: bookieclient.ModeReadOnly, ledgerstore.Full: bookieclient.ModeFull,
			}[state])
			history += fmt.Sprintf("disk is %v\n", state)
		}
		if i%20 == 19 {
			history += happen(t, r, fake, rng()) + "\n"
		}
		request, genuine := do(t.Context(), r.client, rng())
		_, faked := do(t.Context(), fake, rng())
		history += fmt.Sprintf("%s: %s\n", request, genuine)
		if genuine != faked {
			t.Fatalf("seed %d, step %d: the fake answers %q\n%s", seed, i, faked, history)
		}
		word, _, _ := strings.Cut(genuine, " ")
		seen[word]++
	}
	t.Logf("seed %d: %v", seed, seen)
}

// fill leaves as little of the disk as makes the store's state, and waits for that.
func (r *rig) fill(state ledgerstore.State) {
	r.t.Helper()
	// Full means also that there is no room for a segment: the disk is large enough for that not to matter.
	const total = 100 << 20
	r.fs.SetCapacity(total)
	usage, err := r.fs.Usage("store")
	if err != nil {
		r.t.Fatal(err)
	}
	used := usage.Total - usage.Free
	share := map[ledgerstore.State]float64{ledgerstore.ReadOnly: 0.92, ledgerstore.Full: 0.97}[state]
	r.fs.Occupy(uint64(share*total) - used)
	for r.store.State() != state {
		changed := r.store.StateChanged()
		if r.store.State() == state {
			return
		}
		<-changed
	}
}
