package statelog

import (
	"sort"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// inlineBytes is the largest value that the index keeps itself.
const inlineBytes = 128

// Index knows what is live in a log: which record of each key is the newest, where it lies, and in what order they
// lie there. It is pure: it is told what was stored, in order, and says what is to be written again.
//
// The live records are in one list in the order of the log. To rewrite is to take from its head, and to note an
// update is to move to its end, so neither depends on how much is live. Rejected: live counts per ledger, with a scan of
// a ledger when it is to be emptied; the scan reads mostly what is dead.
type Index struct {
	owners map[string]*ownerState
	// oldest and newest are the ends of the list.
	oldest, newest *item
	live           int64
	count          int
	// pending counts the records of a key, or an owner's deletion (an empty name), that are handed to the chain and not
	// yet applied: what they supersede is not worth rewriting, and must not be rewritten after them.
	pending map[pendingKey]int
}

type pendingKey struct{ owner, name string }

type ownerState struct {
	name  string
	items map[string]*item
}

// item is a live record. Its name is kind and key.
type item struct {
	owner      *ownerState
	name       string
	at         entry.Position
	size       int32
	inline     []byte // the value, if it is small and good
	bad        error
	prev, next *item
}

// NewIndex returns the index of an empty log.
func NewIndex() *Index {
	return &Index{owners: map[string]*ownerState{}, pending: map[pendingKey]int{}}
}

// Live returns the bytes that the live records take, encoded, and their number.
func (x *Index) Live() (bytes int64, records int) { return x.live, x.count }

// Owners returns the owners that have live records, sorted.
func (x *Index) Owners() []string {
	out := make([]string, 0, len(x.owners))
	for name := range x.owners {
		out = append(out, name)
	}
	sort.Strings(out)
	return out
}

func itemName(kind uint8, key []byte) string {
	var room [64]byte
	b := append(room[:0], kind)
	return string(append(b, key...))
}

// apply notes a record that is stored at a position.
func (x *Index) apply(at entry.Position, r *stored) {
	if r.op == opBefore {
		return
	}
	if r.op == opDeleteOwner {
		if o := x.owners[r.owner]; o != nil {
			for _, it := range o.items {
				x.unlink(it)
			}
			delete(x.owners, r.owner)
		}
		return
	}
	o := x.owners[r.owner]
	var room [64]byte
	name := append(append(room[:0], r.kind), r.key...)
	if r.op == opDelete {
		if o == nil {
			return
		}
		if it := o.items[string(name)]; it != nil {
			x.remove(it)
		}
		return
	}
	if o == nil {
		o = &ownerState{name: r.owner, items: map[string]*item{}}
		x.owners[r.owner] = o
	}
	it := o.items[string(name)]
	if it == nil {
		it = &item{owner: o, name: string(name)}
		o.items[it.name] = it
	} else {
		x.unlink(it)
	}
	it.at, it.size, it.bad, it.inline = at, int32(r.size), r.bad, nil
	if r.bad == nil && len(r.value) <= inlineBytes {
		it.inline = append([]byte{}, r.value...)
	}
	x.link(it)
}

func (x *Index) remove(it *item) {
	x.unlink(it)
	delete(it.owner.items, it.name)
	if len(it.owner.items) == 0 {
		delete(x.owners, it.owner.name)
	}
}

func (x *Index) link(it *item) {
	it.prev, it.next = x.newest, nil
	if x.newest == nil {
		x.oldest = it
	} else {
		x.newest.next = it
	}
	x.newest = it
	x.live += int64(it.size)
	x.count++
}

func (x *Index) unlink(it *item) {
	if it.prev == nil {
		x.oldest = it.next
	} else {
		it.prev.next = it.next
	}
	if it.next == nil {
		x.newest = it.prev
	} else {
		it.next.prev = it.prev
	}
	it.prev, it.next = nil, nil
	x.live -= int64(it.size)
	x.count--
}

// hold notes that a record is under way; release, that it is no longer.
func (x *Index) hold(owner, name string) { x.pending[pendingKey{owner, name}]++ }

func (x *Index) release(owner, name string) {
	k := pendingKey{owner, name}
	if x.pending[k]--; x.pending[k] == 0 {
		delete(x.pending, k)
	}
}

// superseded tells whether something newer than the item is under way.
func (x *Index) superseded(it *item) bool {
	return x.pending[pendingKey{it.owner.name, it.name}] > 0 || x.pending[pendingKey{it.owner.name, ""}] > 0
}

// current tells whether a live record is still where it was.
func (x *Index) current(it *item, at entry.Position) bool {
	o := x.owners[it.owner.name]
	return o != nil && o.items[it.name] == it && it.at == at
}

// toRewrite returns the oldest live records of a ledger, up to so many bytes, at least one; nil if it has none.
// Superseded ones are left out; waiting tells whether there are any of those.
func (x *Index) toRewrite(l entry.LedgerID, bytes int) (out []rewrite, waiting bool) {
	for it := x.oldest; it != nil && it.at.Ledger <= l; it = it.next {
		if x.superseded(it) {
			waiting = true
			continue
		}
		out = append(out, rewrite{it: it, at: it.at, inline: it.inline, bad: it.bad})
		if bytes -= int(it.size); bytes <= 0 {
			break
		}
	}
	return out, waiting
}

// rewrite is a live record to be written again.
type rewrite struct {
	it     *item
	at     entry.Position
	inline []byte
	value  []byte
	bad    error
}
