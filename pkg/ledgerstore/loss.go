package ledgerstore

import (
	"cmp"
	"errors"
	"fmt"
	iofs "io/fs"
	"path"
	"slices"
	"syscall"

	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// What a start does about a manifest, a segment or records that are lost.

// recordLoss says in the log, durably, that every ledger is in limbo, before the first manifest lists the log: a start
// that is cut short before finds the manifest lost again.
func (r *recovery) recordLoss() error {
	s := r.store
	known := s.table.snapshot()
	slices.SortFunc(known, func(a, b *ledger) int { return cmp.Compare(a.id, b.id) })
	var recs []segment.Record
	for _, l := range known {
		if l.term == 0 && l.id != everyLedger {
			recs = append(recs, segment.Record{Kind: segment.KindFence, Ledger: l.id, Term: 1})
		}
		if !l.limbo && l.id != everyLedger {
			recs = append(recs, segment.Record{Kind: segment.KindLimbo, Ledger: l.id})
		}
	}
	recs = append(recs, segment.Record{Kind: segment.KindLimbo, Ledger: everyLedger})
	seg := &Segment{seq: s.nextSequence()}
	size := mib/16 + int64(len(recs))*3*segment.RecordOverhead // with its row in the footer
	w, err := s.create(seg, size, ordinary)
	if errors.Is(err, syscall.ENOSPC) {
		w, err = s.create(seg, size, lastReserve)
	}
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(recs, maxGroupRecords) {
		if _, err := w.AppendBatch(batch, 0); err != nil {
			return err
		}
	}
	if err := w.Seal(); err != nil {
		return err
	}
	seg.handle.close()
	listed := manifestSegment{sequence: seg.seq, rewrite: seg.gen, uuid: seg.uuid}
	if err := s.publish(true, func(m *manifest) { m.add(listed) }); err != nil {
		return err
	}
	f, err := r.openSegment(listed, 0)
	if err != nil || f == nil {
		return errors.Join(fmt.Errorf("read the record of the loss in %s", seg.path), err)
	}
	r.found = append(r.found, f)
	for _, c := range f.controls {
		r.loadControl(f.seg, c)
	}
	return nil
}

// Holds reports whether dir has a manifest or a segment. It has both, always, once Open has returned a store.
func Holds(fs vfs.FS, dir string) (bool, error) {
	names, err := fs.List(dir)
	if errors.Is(err, iofs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("list data directory: %w", err)
	}
	return slices.ContainsFunc(names, func(name string) bool {
		_, _, ok := parseSegmentName(name)
		return ok || name == manifestName
	}), nil
}

// readManifest returns the manifest in force; a fresh one in an empty directory that may be empty; and one made up
// from the files if it is damaged or gone.
func (r *recovery) readManifest() (*manifest, error) {
	s := r.store
	m, err := readManifest(s.fs, s.cfg.Dir)
	switch {
	case err == nil && m != nil:
		if m.cluster != s.cfg.Cluster || m.storage != s.cfg.Storage {
			return nil, fmt.Errorf("the data belongs to storage %s of cluster %s, this is %s of %s: start with the right directory, or empty it to begin as a new bookie",
				m.storage, m.cluster, s.cfg.Storage, s.cfg.Cluster)
		}
		return m, nil
	case err != nil && !errors.Is(err, errManifest):
		return nil, err
	}
	fresh := &manifest{next: 1, cluster: s.cfg.Cluster, storage: s.cfg.Storage}
	names, listErr := s.fs.List(s.cfg.Dir)
	if listErr != nil {
		return nil, fmt.Errorf("list data directory: %w", listErr)
	}
	for _, name := range names {
		if seq, rewrite, ok := parseSegmentName(name); ok {
			r.adopt(fresh, name, seq, rewrite)
			fresh.next = max(fresh.next, seq+1) // also of a file that is left alone
		}
	}
	if err != nil || len(fresh.segments) > 0 || !s.cfg.Fresh {
		// Without the list it cannot be told whether a segment is missing.
		r.all, r.noList = true, true
		s.log.Error("manifest is lost: every ledger is put in limbo", "dir", s.cfg.Dir, "segments", len(fresh.segments), "error", err)
	}
	if r.noList {
		return fresh, nil
	}
	fresh.edition = 1
	if err := writeManifest(s.fs, s.cfg.Dir, fresh); err != nil {
		return nil, err
	}
	return fresh, nil
}

// adopt lists a segment file that a lost manifest may have listed. Of rewrites the newest that is whole counts.
func (r *recovery) adopt(m *manifest, name string, seq uint64, rewrite uint32) {
	s := r.store
	at := path.Join(s.cfg.Dir, name)
	h, err := segment.ReadHeader(s.fs, at)
	if err != nil || h.Sequence != seq || h.Storage != s.cfg.Storage {
		s.log.Error("file is not a segment of this store and is left alone", "path", at, "error", err)
		return
	}
	if rewrite > 0 {
		whole, err := segment.Open(s.fs, at)
		if err != nil {
			return
		}
		_ = whole.Close() // only read
	}
	m.add(manifestSegment{sequence: seq, rewrite: rewrite, uuid: h.SegmentUUID})
}

func (r *recovery) noteDamage(f *recovered) {
	c := f.scan.Corrupt
	if c == nil {
		return
	}
	r.store.log.Error("segment has lost records that were acknowledged: their ledgers are put in limbo",
		"path", f.seg.path, "gaps", len(c.Gaps), "ledgers", len(c.Ledgers), "all", c.AllLedgers)
	r.all = r.all || c.AllLedgers
	r.loss = append(r.loss, c.Ledgers...)
}

// dropLost forgets segments that are lost, once the limbo is durable that they leave behind.
func (r *recovery) dropLost() error {
	s := r.store
	if len(r.lost) == 0 {
		return nil
	}
	err := s.publish(true, func(m *manifest) {
		for _, l := range r.lost {
			m.remove(l.sequence)
		}
	})
	if err != nil {
		return err
	}
	for _, l := range r.lost {
		at := path.Join(s.cfg.Dir, segmentName(l.sequence, l.rewrite))
		if err := s.fs.Rename(at, at+".lost"); err != nil && !errors.Is(err, iofs.ErrNotExist) {
			return fmt.Errorf("set lost segment aside: %w", err)
		}
	}
	return s.fs.SyncDir(s.cfg.Dir)
}
