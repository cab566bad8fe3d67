package ledger_test

import (
	"testing"
	"testing/synctest"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

func TestAppendCloseRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, r := range [][3]int{{1, 1, 1}, {3, 3, 2}, {4, 2, 2}, {5, 3, 2}} {
			w := newWorld(t, 5)
			l := w.open(1, r[0], r[1], r[2])
			wr := w.writer(l)
			w.mustWrite(wr, 100)
			equal(t, entry.EntryID(99), wr.Confirmed())
			closed, err := wr.CloseWith(w.ctx(), w.meta.close3(l))
			noError(t, err)
			equal(t, meta.LedgerClosed, closed.State)
			equal(t, entry.EntryID(99), closed.Last)
			equal(t, wr.Length(), closed.Length)
			equal(t, 100, w.readAll(closed))
			wr.Shutdown()
			equal(t, closed.Length, w.released.Load())
		}
	})
}

func TestRecoverAfterCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4)
		l := w.open(1, 3, 3, 2)
		wr := w.writer(l)
		w.mustWrite(wr, 50)
		closed, stats := w.recover(1)
		equal(t, entry.EntryID(49), closed.Last)
		equal(t, true, stats.EntriesRead <= 50)
		equal(t, 50, w.readAll(closed))
		c := appendAll(wr, 1, ledger.AckQuorum)[0]
		equal(t, "unknown", w.await(c).outcome())
		<-wr.Broken()
		errorIs(t, wr.Err(), ledger.ErrFenced)
	})
}
