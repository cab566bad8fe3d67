package sim

import (
	"bytes"
	"context"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// tailReadLedger asks one bookie of the last fragment for its LAC, and reads a few entries up to it.
func (b *broker) tailReadLedger(t *task, l meta.Ledger) {
	w := b.w
	if l.State == meta.LedgerDeleting {
		return
	}
	f := l.Fragments[len(l.Fragments)-1]
	lac := entry.NoEntry
	if l.State == meta.LedgerClosed {
		lac = l.Last
	} else {
		to := pick(w.kernel, f.Slots).UUID
		after := entry.NoEntry
		if g := w.ghost.ledgers[l.ID]; g != nil && w.chance(2) {
			after = g.served
		}
		t.await(func(wake func()) {
			b.request(to, &request{
				limit: 4 * time.Second,
				serve: func(k *bookieProcess, answer func(func())) {
					k.waitLAC(bookiewire.WaitLAC{Ledger: l.ID, After: after, Timeout: time.Second}, func(got entry.EntryID) {
						answer(func() {
							lac = got
							b.after(0, wake)
						})
					})
				},
				fail: func(*bookiewire.Error) { b.after(0, wake) },
			})
		})
	}
	for e := lac; e >= 0 && e > lac-3; e-- {
		body, err := b.readEntry(t, l, e)
		if err != nil {
			continue
		}
		w.served++
		if !bytes.Equal(body, w.ghost.bodies[entryKey{l.ID, e}]) {
			w.fail("I5", entrySubject(l.ID, e), "a reader gets other bytes for %d:%d", l.ID, e)
		}
		w.ghost.serve(l.ID, e, b.name+"'s reader")
	}
}

// has reports whether the disk has an entry with that body.
func (b *bookieProcess) has(l entry.LedgerID, e entry.EntryID, body []byte) bool {
	if b.store == nil {
		return false
	}
	got, err := b.store.Read(context.Background(), bookiewire.Read{Ledger: l, First: e, Stride: 1, MaxEntries: 1, MaxBytes: 1})
	return err == nil && bytes.Equal(got.Entries[0].Body, body)
}
