package integration

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/integration/audit"
	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/workload"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// segments are a bookie's segment files with something in them, in the order of the log. Of a bookie that was killed the
// last one has no footer.
func (w *town) segments(dir string) []string {
	w.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "ledgers", "*.seg"))
	w.check(err)
	return slices.DeleteFunc(all, func(path string) bool {
		return strings.HasPrefix(filepath.Base(path), "spare-") || len(w.written(path)) < 16<<10
	})
}

// written is a file up to its last byte that is not zero.
func (w *town) written(path string) []byte {
	w.Helper()
	data, err := os.ReadFile(path)
	w.check(err)
	end := len(data)
	for end > 0 && data[end-1] == 0 {
		end--
	}
	return data[:end]
}

// damage is done to what is written in a file, a third of the way.
func (w *town) damage(path, how string) {
	w.Helper()
	data := w.written(path)
	at, n := len(data)/3, 8<<10
	switch how {
	case "flip":
		data[at] ^= 0x10
		n = 1
	case "zero":
		clear(data[at : at+n])
	case "cut short":
		w.check(os.Truncate(path, int64(at)))
		return
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	w.check(err)
	_, err = f.WriteAt(data[at:at+n], int64(at))
	w.check(err)
	w.check(f.Close())
}

type holding struct {
	ledger entry.LedgerID
	entry  entry.EntryID
}

// holds asks a bookie for all that it may have. Whatever it returns must be whole; of what it had before, it must not
// say that there is none.
func (w *town) holds(p *process.Process, before map[holding]uint32) (now map[holding]uint32, unknown int) {
	w.Helper()
	store, done, err := audit.Metadata(w.c)
	w.check(err)
	defer done()
	cluster, err := store.GetCluster(w.ctx)
	w.check(err)
	cookies, err := store.ListCookies(w.ctx)
	w.check(err)
	var storage entry.StorageUUID
	for _, c := range cookies {
		if w.c.Bookie(c.ID) == p {
			storage = c.UUID
		}
	}
	bookies := bookieclient.New(bookieclient.Config{Cluster: cluster.UUID}, func(u entry.StorageUUID) (string, bool) {
		return p.Addr, u == storage
	}, slog.New(slog.DiscardHandler), nil)
	defer bookies.Close()
	ledgers, err := store.ListLedgers(w.ctx, 0, 10_000)
	w.check(err)
	now = make(map[holding]uint32)
	for _, l := range ledgers {
		last := entry.NoEntry
		for h := range before {
			if h.ledger == l.ID {
				last = max(last, h.entry)
			}
		}
		for e, misses := entry.EntryID(0), 0; e <= last || misses < 100; {
			reply, err := w.readFrom(bookies, storage, l.ID, e)
			if err != nil {
				h := holding{l.ID, e}
				if sum, had := before[h]; had && bookiewire.AsError(err).Code.Negative() {
					w.Errorf("%s had entry %d:%d, checksum %x, and denies it: %v", p.Name, h.ledger, h.entry, sum, err)
				} else if had {
					unknown++
				}
				misses++
				e++
				continue
			}
			for _, x := range reply.Entries {
				h := holding{l.ID, x.Entry}
				sum := entry.Checksum(l.ID, x.Entry, x.Body)
				if had, ok := before[h]; sum != x.Checksum || ok && had != sum {
					w.Errorf("%s returns entry %d:%d with other bytes", p.Name, h.ledger, h.entry)
				}
				now[h] = sum
				e, misses = x.Entry+1, 0
			}
		}
	}
	return now, unknown
}

func (w *town) readFrom(bookies *bookieclient.Client, from entry.StorageUUID, l entry.LedgerID, first entry.EntryID) (reply bookiewire.ReadReply, err error) {
	answered := make(chan struct{})
	bookies.Read(w.ctx, from, bookiewire.Read{Ledger: l, First: first, Stride: 1, MaxEntries: 1000, MaxBytes: 1 << 20}, func(r bookiewire.ReadReply, e error) {
		reply, err = r, e
		close(answered)
	})
	<-answered
	return reply, err
}

// One disk of three is damaged, again and again: bits flip, blocks are zeroed, files are cut short, in sealed segments and in the one
// that was being written. Its bookie never returns wrong bytes, and never denies what it had; readers get everything
// from the others; publishing goes on with it.
func TestDamagedDisk(t *testing.T) {
	t.Parallel()
	dirs := []string{t.TempDir(), t.TempDir(), t.TempDir()}
	w := settle(t, process.Config{
		Brokers: 1, BookieDir: func(i int) string { return dirs[i] }, BookieArgs: []string{"--segment-mib", "4", "--compact-mib-per-second", "1"},
	})
	victim := w.c.Bookies[0]
	run := w.load(func(c *workload.Config) { c.Size = 3000 })
	w.damaged = victim // whose copies nobody counts on
	hit := 0
	for _, how := range []string{"flip", "zero", "cut short"} {
		for _, sealed := range []bool{true, false} {
			w.more(run, 1400)
			before, _ := w.holds(victim, nil)
			w.strike(run, victim.Kill)
			files := w.segments(dirs[0])
			if len(files) < 2 {
				t.Fatalf("%d segments", len(files))
			}
			file := files[len(files)-1]
			if sealed {
				file = files[len(files)-2]
			}
			w.damage(file, how)
			w.check(victim.Start(w.ctx))
			_, unknown := w.holds(victim, before)
			t.Logf("%s, sealed %t: of %d entries, %d cannot be told", how, sealed, len(before), unknown)
			hit += unknown
		}
	}
	if hit == 0 {
		t.Error("no damage hit anything that was known before")
	}
	w.more(run, 300)
	w.finish(run)
}
