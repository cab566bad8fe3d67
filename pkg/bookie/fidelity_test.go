package bookie

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
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
	l := entry.LedgerID(1 + rng.IntN(3))
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

// The fake that the tests of other packages trust gives the same answers as a real bookie, over a real store and a real
// connection, to any sequence of requests.
func TestFakeAnswersAsABookieDoes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(12) {
		r := newRig(t, ServerConfig{})
		inRecovery := openLedger(2, me.Storage)
		inRecovery.State, inRecovery.Term = meta.LedgerInRecovery, 3
		r.records.set(inRecovery)
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
		history := ""
		for i := range 150 {
			request, genuine := do(t.Context(), r.client, rand.New(rand.NewPCG(seed, uint64(i))))
			_, faked := do(t.Context(), fake, rand.New(rand.NewPCG(seed, uint64(i))))
			history += fmt.Sprintf("%s: %s\n", request, genuine)
			if genuine != faked {
				t.Fatalf("seed %d, step %d: the fake answers %q\n%s", seed, i, faked, history)
			}
		}
	}
}
