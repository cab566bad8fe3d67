package model

import (
	"math/bits"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
)

const (
	maxBookies = 5
	maxEntries = 3
)

// disk is what a bookie's disk says about the ledger, and what is on its way to it. It restates ledgerstore.Core for one
// ledger, with everything durable when it is answered; TestBookieIsALedgerstore compares the two.
type disk struct {
	flags flags
	has   uint8 // entries
	term  uint8
	// In the network: the writer's adds, answers to them, and the adds that the writer awaits the answer of.
	sent, acked, awaited uint8
	// Likewise recoveries' adds, and repairs'.
	recovered [2]uint8
	copies    [2]uint8
	// sighted is a pass of garbage collection's note: 1 + entries.
	sighted uint8
}

type flags uint16

const (
	known  flags = 1 << iota // the ledger
	limbo                    // entries of it may have been lost
	buried                   // it was deleted here
	gone                     // the disk, for good
	// admits: a writer's add, or a recovery's or repair's, had a look at the record, which lets it in. Stale: the ledger's
	// generation has moved since.
	admitsWriter
	admitsOther
	staleWriter
	staleOther
	// marked: a pass of garbage collection has read the ledger's mark. Touched: it has moved since.
	marked
	touched
)

func (b *disk) is(f flags) bool { return b.flags&f != 0 }

// moved bumps the ledger's generation.
func (b *disk) moved() {
	if b.is(admitsWriter) {
		b.flags |= staleWriter
	}
	if b.is(admitsOther) {
		b.flags |= staleOther
	}
}

// touch moves the ledger's mark.
func (b *disk) touch() {
	if b.is(marked) {
		b.flags |= touched
	}
}

// appear makes the ledger known.
func (b *disk) appear() {
	if !b.is(known) {
		b.touch()
	}
	b.flags |= known
}

func (b *disk) entries() uint8 { return uint8(bits.OnesCount8(b.has)) }

// add is a writer's, to a ledger that is known, or which it was admitted to.
func (b *disk) add(c *Config, e int) bookiewire.Code {
	switch {
	case !b.is(known) && b.is(buried) && !c.lacks("a tombstone refuses writers"):
		return bookiewire.NotAdmitted
	case b.term > 0 && !c.lacks("a fence refuses writers"), b.is(limbo) && !c.lacks("limbo refuses writers"):
		return bookiewire.Fenced
	}
	b.appear()
	b.has |= 1 << e
	return bookiewire.OK
}

// addAgain is a recovery's or a repair's.
func (b *disk) addAgain(c *Config, e int, term uint8) bookiewire.Code {
	if term < b.term && !c.lacks("a bookie compares terms") {
		return bookiewire.Fenced
	}
	b.touch()
	b.flags |= known
	if term > b.term && !c.lacks("a recovery's add raises the term") {
		b.moved()
		b.term = term
	}
	b.has |= 1 << e
	return bookiewire.OK
}

func (b *disk) fence(c *Config, term uint8) bookiewire.Code {
	switch {
	case term < b.term && !c.lacks("a bookie compares terms"):
		return bookiewire.Fenced
	case !b.is(known) && c.lacks("a fence of an unknown ledger is kept"):
		return bookiewire.OK
	}
	if !b.is(known) || term > b.term {
		b.moved()
	}
	b.appear()
	b.term = max(b.term, term)
	return bookiewire.OK
}

// read is a recovery's, and fences.
func (b *disk) read(c *Config, e int, term uint8) bookiewire.Code {
	if !c.lacks("a recovery's read fences") {
		if code := b.fence(c, term); code != bookiewire.OK {
			return code
		}
	}
	switch {
	case b.has>>e&1 != 0:
		return bookiewire.OK
	case b.is(limbo) && !c.lacks("limbo denies nothing"):
		return bookiewire.Unknown
	case !b.is(known):
		return bookiewire.NoLedger
	}
	return bookiewire.NoEntry
}

// buryMarked deletes the ledger by a mark, and reports whether it did.
func (b *disk) buryMarked(c *Config) bool {
	if b.is(known) && b.is(touched) && !c.lacks("what was added since the record was read is not deleted") {
		return false
	}
	b.bury()
	return true
}

// bury deletes the ledger.
func (b *disk) bury() {
	b.moved()
	b.flags = b.flags&^(known|limbo|touched) | buried
	b.has, b.term, b.sighted = 0, 0, 0
}

// lose is a disk that comes back under its name with nothing on it, noticed before it serves.
func (b *disk) lose(c *Config) {
	b.flags = known | limbo
	b.has, b.term, b.acked, b.sighted = 0, 1, 0, 0
	if c.lacks("limbo refuses writers") {
		b.term = 0
	}
}
