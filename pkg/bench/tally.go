package bench

import (
	"math/bits"
	"sync"
)

// tally is a set of numbers, counted from 0, that come nearly in order and nearly all. It is a list of bitmap pages; one that
// is full is given up for a mark that all full ones share, so that a run of any length takes 8 bytes for 4,096 messages
// beside its holes. It is safe for concurrent use.
type tally struct {
	mu    sync.Mutex
	pages []*tallyPage // nil: nothing of it; &fullPage: all
	count uint64
	spare *tallyPage
}

const (
	pageWords = 64
	pageBits  = pageWords * 64
)

type tallyPage struct {
	words [pageWords]uint64
	count int
}

var fullPage tallyPage

// add reports false for a number that is in the set already.
func (t *tally) add(n uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	at, bit := n/pageBits, n%pageBits
	for uint64(len(t.pages)) <= at {
		t.pages = append(t.pages, nil)
	}
	p := t.pages[at]
	if p == &fullPage {
		return false
	}
	if p == nil {
		if p = t.spare; p == nil {
			p = new(tallyPage)
		}
		t.spare = nil
		t.pages[at] = p
	}
	word, mask := bit/64, uint64(1)<<(bit%64)
	if p.words[word]&mask != 0 {
		return false
	}
	p.words[word] |= mask
	p.count++
	t.count++
	if p.count == pageBits {
		t.pages[at] = &fullPage
		*p = tallyPage{}
		t.spare = p
	}
	return true
}

// size is how many numbers are in the set.
func (t *tally) size() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count
}

// word returns 64 numbers' bits, from 64*i on. The lock is held.
func (t *tally) word(i uint64) uint64 {
	at := i / pageWords
	switch {
	case at >= uint64(len(t.pages)) || t.pages[at] == nil:
		return 0
	case t.pages[at] == &fullPage:
		return ^uint64(0)
	}
	return t.pages[at].words[i%pageWords]
}

// missingFrom counts the numbers below limit that are in t and not in other. It may be called while numbers are added.
func (t *tally) missingFrom(other *tally, limit uint64) (missing uint64) {
	for at := uint64(0); at*pageBits < limit; at++ {
		missing += t.missingPage(other, at, limit)
	}
	return missing
}

// isFull tells whether a page has all its numbers.
func (t *tally) isFull(at uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return at < uint64(len(t.pages)) && t.pages[at] == &fullPage
}

// missingPage is missingFrom of one page. What t has is taken first: meanwhile more of it may come to other.
func (t *tally) missingPage(other *tally, at, limit uint64) (missing uint64) {
	if other.isFull(at) {
		return 0
	}
	t.mu.Lock()
	if at >= uint64(len(t.pages)) || t.pages[at] == nil {
		t.mu.Unlock()
		return 0
	}
	var want [pageWords]uint64
	for i := range want {
		want[i] = t.word(at*pageWords + uint64(i))
	}
	t.mu.Unlock()
	other.mu.Lock()
	defer other.mu.Unlock()
	for i, w := range want {
		first := (at*pageWords + uint64(i)) * 64
		if first >= limit {
			break
		}
		if left := limit - first; left < 64 {
			w &= 1<<left - 1
		}
		missing += uint64(bits.OnesCount64(w &^ other.word(at*pageWords+uint64(i))))
	}
	return missing
}
