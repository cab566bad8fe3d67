package ledgerstore

import (
	"bytes"
	"context"
	"testing"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// modelLedger is what a ledger must be.
type modelLedger struct {
	entries map[entry.EntryID][]byte
	term    entry.Term
	limbo   bool
	lac     entry.EntryID
}

// model is a store in a few lines: maps, no disk. Whatever is done to the real one, restarts and power cuts included,
// the two give the same answers.
type model struct {
	t       *rapid.T
	fs      *vfs.Mem
	s       *Store
	ledgers map[entry.LedgerID]*modelLedger
	filler  entry.LedgerID
	seed    uint64
}

const modelLedgers, modelEntries, modelTerms = 4, 24, 4

func (m *model) open() {
	cfg := crashConfig()
	s, err := Open(context.Background(), cfg, m.fs, quiet, nil)
	if err != nil {
		m.t.Fatalf("open: %v", err)
	}
	m.s = s
}

func (m *model) ledger(l entry.LedgerID) *modelLedger {
	if m.ledgers[l] == nil {
		m.ledgers[l] = &modelLedger{entries: map[entry.EntryID][]byte{}, lac: entry.NoEntry}
	}
	return m.ledgers[l]
}

func (m *model) drawLedger() entry.LedgerID {
	return entry.LedgerID(rapid.IntRange(1, modelLedgers).Draw(m.t, "ledger"))
}

func (m *model) drawTerm() entry.Term {
	return entry.Term(rapid.IntRange(1, modelTerms).Draw(m.t, "term"))
}

func (m *model) want(err error, want bookiewire.Code) {
	m.t.Helper()
	if got := codeOf(err); got != want {
		m.t.Fatalf("answer is %v (%v), want %v", got, err, want)
	}
}

func (m *model) add(t *rapid.T) {
	l := m.drawLedger()
	e := entry.EntryID(rapid.IntRange(0, modelEntries).Draw(t, "entry"))
	recovery := rapid.Bool().Draw(t, "recovery")
	opts := []addOption{withLAC(e - 1), withBody(body(l, e, 300))}
	if rapid.IntRange(0, 9).Draw(t, "other") == 0 {
		opts = append(opts, withBody([]byte("other bytes")))
	}
	var term entry.Term
	if recovery {
		term = entry.Term(rapid.IntRange(0, modelTerms).Draw(t, "term"))
		opts = append(opts, recoveryAdd(term))
	}
	known := m.ledgers[l]
	buried := m.s.Tombstoned(l)
	a := newAdd(m.s, l, e, nil, opts...)
	err := add(m.s, l, e, opts...)
	switch {
	case known == nil && buried && !recovery:
		m.want(err, bookiewire.NotAdmitted)
		return
	case known != nil && recovery && term < known.term, known != nil && !recovery && (known.term > 0 || known.limbo):
		m.want(err, bookiewire.Fenced)
		return
	case known != nil && known.entries[e] != nil:
		if bytes.Equal(known.entries[e], a.Body) {
			m.want(err, bookiewire.OK)
			known.term = max(known.term, term)
		} else {
			m.want(err, bookiewire.BadRequest)
		}
		return
	}
	m.want(err, bookiewire.OK)
	lm := m.ledger(l)
	lm.entries[e] = a.Body
	lm.lac = max(lm.lac, a.LAC)
	lm.term = max(lm.term, term)
}

func (m *model) fence(*rapid.T) {
	l, term := m.drawLedger(), m.drawTerm()
	r, err := fence(m.s, l, term)
	if known := m.ledgers[l]; known != nil && term < known.term {
		m.want(err, bookiewire.Fenced)
		return
	}
	m.want(err, bookiewire.OK)
	lm := m.ledger(l)
	lm.term = term
	if r.LAC != lm.lac {
		m.t.Fatalf("fence answers LAC %d, want %d", r.LAC, lm.lac)
	}
}

func (m *model) recoveryRead(t *rapid.T) {
	l, term := m.drawLedger(), m.drawTerm()
	e := entry.EntryID(rapid.IntRange(0, modelEntries).Draw(t, "entry"))
	err := recoveryRead(m.s, l, e, term)
	if known := m.ledgers[l]; known != nil && term < known.term {
		m.want(err, bookiewire.Fenced)
		return
	}
	lm := m.ledger(l)
	lm.term = term
	switch {
	case lm.entries[e] != nil:
		m.want(err, bookiewire.OK)
	case lm.limbo:
		m.want(err, bookiewire.Unknown)
	default:
		m.want(err, bookiewire.NoEntry)
	}
}

func (m *model) writeLAC(t *rapid.T) {
	l := m.drawLedger()
	lac := entry.EntryID(rapid.IntRange(0, modelEntries).Draw(t, "lac"))
	err := writeLAC(m.s, l, lac)
	if m.ledgers[l] == nil {
		m.want(err, bookiewire.NoLedger)
		return
	}
	m.want(err, bookiewire.OK)
	m.ledgers[l].lac = max(m.ledgers[l].lac, lac)
}

func (m *model) limbo(t *rapid.T) {
	l := m.drawLedger()
	if rapid.Bool().Draw(t, "clear") {
		m.want(m.s.ClearLimbo(context.Background(), l), bookiewire.OK)
		if m.ledgers[l] != nil {
			m.ledgers[l].limbo = false
		}
		return
	}
	m.want(m.s.SetLimbo(context.Background(), l), bookiewire.OK)
	lm := m.ledger(l)
	lm.limbo = true
	lm.term = max(lm.term, 1)
}

func (m *model) remove(*rapid.T) {
	l := m.drawLedger()
	m.want(m.s.DeleteLedger(context.Background(), l, m.s.Mark(l)), bookiewire.OK)
	delete(m.ledgers, l)
}

// fill rolls segments with a ledger that is deleted at once, so that compaction has work.
func (m *model) fill(*rapid.T) {
	m.filler++
	for e := range entry.EntryID(30) {
		if err := add(m.s, m.filler, e, withBody(body(m.filler, e, 900))); err != nil {
			m.t.Fatal(err)
		}
	}
	m.want(m.s.DeleteLedger(context.Background(), m.filler, m.s.Mark(m.filler)), bookiewire.OK)
}

func (m *model) compact(*rapid.T) {
	if _, err := m.s.CompactOnce(context.Background()); err != nil {
		m.t.Fatal(err)
	}
}

func (m *model) restart(*rapid.T) {
	if err := m.s.Close(); err != nil {
		m.t.Fatal(err)
	}
	m.open()
}

// crash is a power cut between requests: everything was answered, so nothing may be missing.
func (m *model) crash(*rapid.T) {
	m.seed++
	m.fs.CutPowerAfter(0)
	_ = m.s.Close()
	m.fs.Crash(newRand(m.seed))
	m.fs.CutPowerAfter(-1)
	m.open()
}

// check compares everything.
func (m *model) check(t *rapid.T) {
	for l := entry.LedgerID(1); l <= modelLedgers; l++ {
		want := m.ledgers[l]
		got, there := m.s.Ledger(l)
		if there != (want != nil) {
			t.Fatalf("ledger %d: there %t, want %t", l, there, want != nil)
		}
		if want != nil && (got.Term != want.term || got.LAC != want.lac || got.Limbo != want.limbo || got.Entries != int64(len(want.entries))) {
			t.Fatalf("ledger %d: %+v, want %+v", l, got, want)
		}
		for e := range entry.EntryID(modelEntries + 1) {
			b, err := readOne(m.s, l, e)
			switch {
			case want == nil:
				m.want(err, bookiewire.NoLedger)
			case want.entries[e] == nil && want.limbo:
				m.want(err, bookiewire.Unknown)
			case want.entries[e] == nil:
				m.want(err, bookiewire.NoEntry)
			case err != nil || !bytes.Equal(b, want.entries[e]):
				t.Fatalf("entry %d:%d: %q, %v", l, e, b, err)
			}
		}
	}
	if loss := m.s.Loss(); loss.All || len(loss.Ledgers) > 0 {
		t.Fatalf("loss %+v", loss)
	}
}

func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := &model{t: t, fs: vfs.NewMem(), ledgers: map[entry.LedgerID]*modelLedger{}, filler: 1000}
		m.open()
		defer func() { _ = m.s.Close() }()
		t.Repeat(map[string]func(*rapid.T){
			"add": m.add, "add2": m.add, "add3": m.add, "fence": m.fence, "recovery read": m.recoveryRead, "lac": m.writeLAC,
			"limbo": m.limbo, "delete": m.remove, "fill": m.fill, "compact": m.compact, "compact2": m.compact,
			"restart": m.restart, "crash": m.crash, "": m.check,
		})
	})
}
