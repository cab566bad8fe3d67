package chain

import "sync"

// What an append needs, and what is told of several, is used again.

var items sync.Pool

func getItem() *Item {
	it, ok := items.Get().(*Item)
	if !ok {
		it = new(Item)
		it.cb = it.onDone
	}
	return it
}

func putItem(it *Item) {
	*it = Item{cb: it.cb}
	items.Put(it)
}

var outboxes = sync.Pool{New: func() any { s := make([]Action, 0, 64); return &s }}

func getOutbox() []Action { return (*outboxes.Get().(*[]Action))[:0] } //nolint:forcetypeassert // likewise

func putOutbox(s []Action) {
	clear(s)
	outboxes.Put(&s)
}
