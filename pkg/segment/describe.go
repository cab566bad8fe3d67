package segment

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Description is what [Dump] prints, for programs. Offsets and sizes are in bytes of the file; an entry or LAC of -1 is
// none; a nonce and a checksum are hexadecimal.
type Description struct {
	State      string `json:"state"` // "sealed", "sealed by recovery", "unsealed" or "retired"
	Segment    string `json:"segment,omitempty"`
	Sequence   uint64 `json:"sequence"`
	Generation uint32 `json:"generation"`
	Cluster    string `json:"cluster,omitempty"`
	Storage    string `json:"storage,omitempty"`
	Size       int64  `json:"size"`
	Reserved   int64  `json:"reserved"`

	Batches []BatchDescription `json:"batches"`
	Gaps    []GapDescription   `json:"gaps"`    // what is unreadable
	Verdict string             `json:"verdict"` // "whole", "torn tail", "corrupt", or "" of a retired segment
	// LostAll and LostLedgers say which ledgers may have lost records in a corrupt segment.
	LostAll     bool             `json:"lostAll"`
	LostLedgers []entry.LedgerID `json:"lostLedgers"`
	End         int64            `json:"end"` // where batches end

	Footer *FooterDescription `json:"footer,omitempty"` // of a sealed segment
}

// GapDescription is a range that cannot be read.
type GapDescription struct {
	Offset int64 `json:"offset"`
	End    int64 `json:"end"`
}

// BatchDescription is one write.
type BatchDescription struct {
	Offset      int64               `json:"offset"`
	Sequence    uint64              `json:"sequence"`
	Bytes       int64               `json:"bytes"`
	DurableUpTo int64               `json:"durableUpTo"`
	PrevDurable int64               `json:"previousDurableUpTo"`
	Records     []RecordDescription `json:"records"`
}

// RecordDescription is one record without its body.
type RecordDescription struct {
	Offset   int64          `json:"offset"`
	Kind     string         `json:"kind"`
	Ledger   entry.LedgerID `json:"ledger"`
	Entry    entry.EntryID  `json:"entry"`
	LAC      entry.EntryID  `json:"lac"`
	Term     entry.Term     `json:"term"`
	Nonce    string         `json:"nonce"`
	Body     int            `json:"bodyBytes"`
	Checksum string         `json:"checksum,omitempty"` // of an entry, or of a control's body
}

// FooterDescription is the footer, as far as it can be read.
type FooterDescription struct {
	Entries  int64               `json:"entries"`
	Ledgers  []LedgerDescription `json:"ledgers"`
	Controls []RecordDescription `json:"controls"`
	Gaps     []GapDescription    `json:"gaps"`
	Damage   []string            `json:"damage"`
}

// LedgerDescription sums up a ledger's records in the segment.
type LedgerDescription struct {
	Ledger  entry.LedgerID `json:"ledger"`
	Entries int64          `json:"entries"`
	First   entry.EntryID  `json:"first"`
	Last    entry.EntryID  `json:"last"`
	LAC     entry.EntryID  `json:"lac"`
	Term    entry.Term     `json:"term"`
	Nonce   string         `json:"nonce"`
	Bytes   int64          `json:"bytes"`
}

// Describe reads what [Dump] prints, and fails as it does. It holds a description of every record in memory, some two
// hundred bytes each.
func Describe(fs vfs.FS, path string) (*Description, error) {
	f, err := fs.OpenRead(path)
	if err != nil {
		return nil, fmt.Errorf("describe segment: %w", err)
	}
	d := &dumper{out: bufio.NewWriter(io.Discard), f: f, path: path, doc: &Description{
		Batches: []BatchDescription{}, Gaps: []GapDescription{}, LostLedgers: []entry.LedgerID{},
	}}
	if err := errors.Join(d.run(), f.Close()); err != nil {
		return nil, fmt.Errorf("describe segment: %w", err)
	}
	return d.doc, nil
}

func (d *Description) header(state string, h fileHeader, size int64) {
	if d == nil {
		return
	}
	d.State, d.Generation, d.Size = state, h.Generation, size
	if h.retired {
		return
	}
	d.Segment, d.Sequence, d.Cluster, d.Storage = h.SegmentUUID.String(), h.Sequence, h.Cluster.String(), h.Storage.String()
	d.Reserved = h.size
}

func (d *Description) batch(off int64, h batchHeader) {
	if d == nil {
		return
	}
	d.Batches = append(d.Batches, BatchDescription{
		Offset: off, Sequence: uint64(h.seq), Bytes: batchHeaderSize + int64(h.length), DurableUpTo: int64(h.durableUpto),
		PrevDurable: int64(h.prevDurable), Records: []RecordDescription{},
	})
}

func (d *Description) record(r *Record, off int64) {
	if d == nil {
		return
	}
	b := &d.Batches[len(d.Batches)-1]
	b.Records = append(b.Records, describeRecord(r, off))
}

func describeRecord(r *Record, off int64) RecordDescription {
	d := RecordDescription{
		Offset: off, Kind: r.Kind.String(), Ledger: r.Ledger, Entry: r.Entry, LAC: r.LAC, Term: r.Term,
		Nonce: fmt.Sprintf("%016x", r.Nonce), Body: len(r.Body),
	}
	if r.Kind == KindEntry || len(r.Body) > 0 {
		d.Checksum = fmt.Sprintf("%08x", r.Checksum)
	}
	return d
}

func (d *Description) gap(g Gap) {
	if d != nil {
		d.Gaps = append(d.Gaps, GapDescription(g))
	}
}

func (d *Description) verdict(rec *Recovered) {
	if d == nil {
		return
	}
	d.End = rec.End
	switch {
	case rec.Corrupt != nil:
		d.Verdict, d.LostAll = "corrupt", rec.Corrupt.AllLedgers
		d.LostLedgers = append(d.LostLedgers, rec.Corrupt.Ledgers...)
	case rec.Torn:
		d.Verdict = "torn tail"
	default:
		d.Verdict = "whole"
	}
}

func (d *Description) footer(entries int64, ledgers []LedgerInfo, controls []Control, gaps []Gap, damage []string) {
	if d == nil {
		return
	}
	f := &FooterDescription{
		Entries: entries, Ledgers: []LedgerDescription{}, Controls: []RecordDescription{}, Gaps: []GapDescription{}, Damage: append([]string{}, damage...),
	}
	for _, l := range ledgers {
		f.Ledgers = append(f.Ledgers, LedgerDescription{
			Ledger: l.Ledger, Entries: int64(l.Entries), First: l.First, Last: l.Last, LAC: l.LAC, Term: l.Term,
			Nonce: fmt.Sprintf("%016x", l.Nonce), Bytes: l.Bytes,
		})
	}
	for _, c := range controls {
		r := Record{Kind: c.Kind, Ledger: c.Ledger, Entry: c.Entry, LAC: c.LAC, Term: c.Term, Nonce: c.Nonce}
		f.Controls = append(f.Controls, describeRecord(&r, c.Location.Offset))
	}
	for _, g := range gaps {
		f.Gaps = append(f.Gaps, GapDescription(g))
	}
	d.Footer = f
}
