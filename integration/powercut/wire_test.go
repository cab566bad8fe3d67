//go:build linux && !noroot

package powercut

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// event is a line of what the child tells.
type event uint8

const (
	opened    event = iota + 1 // the store is open
	askAdd                     // entries [a, b) are being added
	addDone                    // entry a is stored; b is 1 for a recovery's write
	askFence                   // with term a
	fenceDone                  // with term a
	askLAC                     // a
	lacDone                    // a
	askLimbo
	limboDone
	askClear
	clearDone
	askDelete
	deleteDone
	refused   // an answer that no story explains: event a, error in the log
	compacted // a bytes were freed
)

// note is one of them.
type note struct {
	event  event
	ledger entry.LedgerID
	a, b   int64
}

const noteSize = 25

// teller writes notes to the pipe, each at once: what is in the pipe when the power goes was said before.
type teller struct {
	mu   sync.Mutex
	pipe *os.File
}

func (t *teller) tell(ev event, l entry.LedgerID, a, b int64) {
	var line [noteSize]byte
	line[0] = byte(ev)
	binary.BigEndian.PutUint64(line[1:], uint64(l))
	binary.BigEndian.PutUint64(line[9:], uint64(a))
	binary.BigEndian.PutUint64(line[17:], uint64(b))
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, err := t.pipe.Write(line[:]); err != nil {
		os.Exit(1) // nobody listens
	}
}

// readNotes calls hear for each note until the pipe's other end is gone. A note that is cut short was not said.
func readNotes(pipe io.Reader, hear func(note)) error {
	var line [noteSize]byte
	for {
		_, err := io.ReadFull(pipe, line[:])
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return err
		}
		hear(note{
			event:  event(line[0]),
			ledger: entry.LedgerID(binary.BigEndian.Uint64(line[1:])),
			a:      int64(binary.BigEndian.Uint64(line[9:])),
			b:      int64(binary.BigEndian.Uint64(line[17:])),
		})
	}
}
