package model

import (
	"encoding/binary"

	"github.com/penstock-mq/penstock/pkg/meta"
)

// pack writes s into b, which is as long as packed says. Only what the configuration has is written.
func (c *Config) pack(s *state, b []byte) {
	put := func(n int, v uint64) {
		for range n {
			b[0] = byte(v)
			v >>= 8
			b = b[1:]
		}
	}
	put(3, uint64(s.writer))
	put(2, uint64(s.record))
	put(2, uint64(s.answer))
	put(1, uint64(s.exposed+1)|uint64(s.failures)<<3|uint64(s.recoveryFailures)<<5)
	for r := range c.Recoveries {
		put(4, uint64(s.recovery[r])|uint64(s.term[r])<<28)
	}
	if c.Lossy {
		put(3, uint64(s.late))
	}
	if c.losses()+c.Drops > 0 {
		put(1, uint64(s.lost)|uint64(s.drops)<<4)
	}
	if c.Collect {
		put(2, uint64(s.looked))
		put(1, uint64(s.collects)|uint64(s.dooms)<<4)
	}
	for i := range c.Repairs {
		p := &s.repair[i]
		put(2, uint64(p.record))
		put(2, uint64(p.phase)|uint64(p.fragment)<<4|uint64(p.old)<<8|uint64(p.target)<<12)
	}
	for i := range c.Bookies {
		k := &s.bookies[i]
		put(5, uint64(k.has)|uint64(k.sent)<<3|uint64(k.acked)<<6|uint64(k.awaited)<<9|uint64(k.recovered[0])<<12|
			uint64(k.recovered[1])<<15|uint64(k.copies[0])<<18|uint64(k.copies[1])<<21|uint64(k.term)<<24|uint64(k.sighted)<<26|
			uint64(k.flags)<<29)
	}
}

// packed is how long a packed state is.
func (c *Config) packed() int {
	n := 8 + 4*c.Recoveries + 4*c.Repairs + 5*c.Bookies
	if c.Lossy {
		n += 3
	}
	if c.losses()+c.Drops > 0 {
		n++
	}
	if c.Collect {
		n += 3
	}
	return n
}

func (c *Config) unpack(b []byte) (s state) {
	get := func(n int) (v uint64) {
		var word [8]byte
		copy(word[:], b[:n])
		b = b[n:]
		return binary.LittleEndian.Uint64(word[:])
	}
	small := func(v uint64, from, bits int) uint8 { return uint8(v >> from & (1<<bits - 1)) }
	s.writer, s.record, s.answer = uint32(get(3)), uint32(get(2)), uint32(get(2))
	v := get(1)
	s.exposed, s.failures, s.recoveryFailures = int8(small(v, 0, 3))-1, small(v, 3, 2), small(v, 5, 3)
	for r := range c.Recoveries {
		v := get(4)
		s.recovery[r], s.term[r] = uint32(v&(1<<28-1)), small(v, 28, 4)
	}
	if c.Lossy {
		s.late = uint32(get(3))
	}
	if c.losses()+c.Drops > 0 {
		v := get(1)
		s.lost, s.drops = small(v, 0, 4), small(v, 4, 4)
	}
	if c.Collect {
		s.looked = uint32(get(2))
		v := get(1)
		s.collects, s.dooms = small(v, 0, 4), small(v, 4, 4)
	}
	for i := range c.Repairs {
		s.repair[i].record = uint32(get(2))
		v := get(2)
		s.repair[i].phase, s.repair[i].fragment = repairPhase(small(v, 0, 4)), small(v, 4, 4)
		s.repair[i].old, s.repair[i].target = small(v, 8, 4), small(v, 12, 4)
	}
	for i := range c.Bookies {
		v := get(5)
		s.bookies[i] = disk{
			has: small(v, 0, 3), sent: small(v, 3, 3), acked: small(v, 6, 3), awaited: small(v, 9, 3),
			recovered: [2]uint8{small(v, 12, 3), small(v, 15, 3)}, copies: [2]uint8{small(v, 18, 3), small(v, 21, 3)},
			term: small(v, 24, 2), sighted: small(v, 26, 3), flags: flags(v >> 29),
		}
	}
	return s
}

// settle brings s into a form that it shares with the states that differ in nothing that can still matter.
func (w *world) settle(s *state) {
	c := w.cfg
	over := w.writer[s.writer].over
	if over || w.record[s.record].l.State != meta.LedgerOpen {
		// A change of the ensemble can only be refused.
		s.failures = uint8(c.Failures)
	}
	upkeep := c.Delete || c.Collect || c.Repairs > 0 || c.Retire
	ended := w.record[s.record].l.State >= meta.LedgerClosed && !upkeep
	for r := range c.Recoveries {
		id := s.recovery[r]
		switch {
		case ended:
			// What is left to do of a recovery adds copies and fences writers, and decides nothing.
			s.recovery[r], s.term[r] = w.recoveryOver, 0
			for b := range s.bookies {
				s.bookies[b].recovered[r] = 0
			}
		case id != 0 && w.recovery[id].over:
			for b := range s.bookies {
				if k := &s.bookies[b]; k.term > s.term[r] {
					k.recovered[r] = 0
				} else if k.is(known) && k.term == s.term[r] {
					k.recovered[r] &^= k.has
				}
			}
		}
	}
	if c.Recoveries == 1 && !upkeep && s.recovery[0] != 0 {
		w.forgetLate(s)
	}
	for b := range s.bookies {
		k := &s.bookies[b]
		if over && (k.term > 0 || k.is(limbo|gone)) && !c.lacks("a fence refuses writers") && !c.lacks("limbo refuses writers") {
			k.sent = 0
		}
		if k.is(known) {
			k.sent &^= k.has &^ k.awaited
		}
	}
}

// forgetLate drops write-backs that nobody waits for: they add copies, which nobody looks for any more.
func (w *world) forgetLate(s *state) {
	var awaited [maxBookies]uint8
	for _, a := range w.recovery[s.recovery[0]].adds {
		awaited[a[2]] |= 1 << a[0]
	}
	for b := range s.bookies {
		s.bookies[b].recovered[0] &= awaited[b]
	}
}
