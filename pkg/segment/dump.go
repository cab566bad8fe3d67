package segment

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Dump prints a segment for people: header, batches with their records, the verdict on its end that a recovery
// would reach (without what the next segment knows), and the footer. It changes nothing and may be used on a segment
// that is being written. What is damaged is part of the output; an error means that the file could not be read, has
// no header, or that out failed.
func Dump(out io.Writer, fs vfs.FS, path string) error {
	f, err := fs.OpenRead(path)
	if err != nil {
		return fmt.Errorf("dump segment: %w", err)
	}
	d := &dumper{out: bufio.NewWriter(out), f: f, path: path}
	err = d.run()
	if err = errors.Join(err, d.out.Flush(), f.Close()); err != nil {
		return fmt.Errorf("dump segment: %w", err)
	}
	return nil
}

type dumper struct {
	out  *bufio.Writer
	f    vfs.File
	path string
	size int64

	doc    *Description // filled in unless it is nil
	broken []string     // what of the footer is damaged
}

func (d *dumper) line(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

func (d *dumper) run() error {
	h, err := readHeaderBlock(d.f, d.path)
	if err != nil {
		return err
	}
	if d.size, err = d.f.Size(); err != nil {
		return err
	}
	t, sealed, err := readTrailer(d.f, d.path, h.Header, d.size)
	if err != nil {
		return err
	}
	state := "unsealed"
	switch {
	case h.retired:
		d.doc.header("retired", h, d.size)
		d.line("state      retired, kept for reuse\ngeneration %d\nsize       %d", h.Generation, d.size)
		return nil
	case sealed:
		state = "sealed"
		if t.flags&flagRecovered != 0 {
			state = "sealed by recovery"
		}
	}
	d.doc.header(state, h, d.size)
	d.line("state      %s", state)
	d.line("segment    %s", h.SegmentUUID)
	d.line("sequence   %d", h.Sequence)
	d.line("generation %d", h.Generation)
	d.line("cluster    %s", h.Cluster)
	d.line("storage    %s", h.Storage)
	d.line("size       %d, reserved %d", d.size, h.size)
	rec, err := scanFile(d.f, d.path, 0)
	if err != nil {
		return err
	}
	r := &Reader{f: d.f, path: d.path, header: h.Header, seed: newSeed(h.Header), size: d.size, trailer: t}
	if err := d.batches(r, rec); err != nil {
		return err
	}
	d.verdict(rec)
	if sealed {
		d.footer(r)
	}
	return nil
}

// batches prints what the scan has found readable.
func (d *dumper) batches(r *Reader, rec *Recovered) error {
	w := &walk{r: r, win: newWindow(d.f, rec.End), off: headerBlockSize}
	if rec.Corrupt != nil {
		w.gaps = rec.Corrupt.Gaps
	}
	w.onGap = func(g Gap) {
		d.doc.gap(g)
		d.line("%d: unreadable up to %d", g.Offset, g.End)
	}
	w.onBatch = func(h batchHeader) {
		d.doc.batch(w.off, h)
		d.line("%d: batch %d, %d records, %d bytes, durable up to %d, previous segment up to %d",
			w.off, h.seq, h.count, batchHeaderSize+int64(h.length), h.durableUpto, h.prevDurable)
	}
	return w.run(rec.End, func(r Record, loc Location) error {
		d.doc.record(&r, loc.Offset)
		d.line("  %d: %s", loc.Offset, describe(&r, len(r.Body)))
		return nil
	})
}

// describe prints what of a record is not empty.
func describe(r *Record, body int) string {
	s := fmt.Sprintf("%s %d", r.Kind, r.Ledger)
	if r.Entry != entry.NoEntry {
		s += fmt.Sprintf(":%d", r.Entry)
	}
	if r.LAC != entry.NoEntry || r.Kind == KindEntry || r.Kind == KindLAC {
		s += fmt.Sprintf(" lac %d", r.LAC)
	}
	if r.Term != 0 {
		s += fmt.Sprintf(" term %d", r.Term)
	}
	if r.Nonce != 0 {
		s += fmt.Sprintf(" nonce %016x", r.Nonce)
	}
	if r.Kind == KindEntry || body > 0 {
		s += fmt.Sprintf(" body %d checksum %08x", body, r.Checksum)
	}
	return s
}

func (d *dumper) verdict(rec *Recovered) {
	d.doc.verdict(rec)
	switch {
	case rec.Corrupt != nil && rec.Corrupt.AllLedgers:
		d.line("verdict    corrupt: any ledger may have lost records; batches end at %d", rec.End)
	case rec.Corrupt != nil:
		d.line("verdict    corrupt: ledgers %v have lost records; batches end at %d", rec.Corrupt.Ledgers, rec.End)
	case rec.Torn:
		d.line("verdict    torn tail: batches end at %d, and what follows was never acknowledged", rec.End)
	default:
		d.line("verdict    whole: batches end at %d", rec.End)
	}
}

// footer prints the tables of a sealed segment, as far as they can be read.
func (d *dumper) footer(r *Reader) {
	t := r.trailer
	d.line("footer     %d batches, %d entries, %d ledger rows, %d controls, %d gaps, previous segment durable up to %d",
		t.batches, t.indexRows, t.ledgerRows, t.controlRows, t.gapRows, t.prevDurable)
	ledgers, err := r.Ledgers()
	for _, l := range ledgers {
		d.line("  ledger %d: %d entries from %d to %d, lac %d, term %d, nonce %016x, %d bytes",
			l.Ledger, l.Entries, l.First, l.Last, l.LAC, l.Term, l.Nonce, l.Bytes)
	}
	d.damage(err)
	controls, err := r.Controls()
	for _, c := range controls {
		rec := Record{Kind: c.Kind, Ledger: c.Ledger, Entry: c.Entry, LAC: c.LAC, Term: c.Term, Nonce: c.Nonce}
		d.line("  control at %d: %s", c.Location.Offset, describe(&rec, 0))
	}
	d.damage(err)
	gaps, err := r.Gaps()
	for _, g := range gaps {
		d.line("  gap from %d to %d", g.Offset, g.End)
	}
	d.damage(err)
	d.damage(r.Index(func(IndexEntry) error { return nil }))
	d.doc.footer(int64(t.indexRows), ledgers, controls, gaps, d.broken)
}

func (d *dumper) damage(err error) {
	if err != nil {
		d.broken = append(d.broken, err.Error())
		d.line("  damaged: %v", err)
	}
}
