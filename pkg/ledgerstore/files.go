package ledgerstore

import (
	"crypto/rand"
	"errors"
	"fmt"
	iofs "io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

const (
	lockName  = "LOCK"
	spareForm = "spare-%d.seg"
	// roomName is a file that is there for the space that it takes: a new manifest needs some.
	roomName = "ROOM"
	// maxOpenSegments bounds the descriptors kept open for reading.
	maxOpenSegments = 512
)

func segmentName(seq uint64, rewrite uint32) string {
	return fmt.Sprintf("%016x-%04x.seg", seq, rewrite)
}

// parseSegmentName accepts exactly what segmentName writes.
func parseSegmentName(name string) (seq uint64, rewrite uint32, ok bool) {
	base, _ := strings.CutSuffix(name, ".seg")
	before, after, _ := strings.Cut(base, "-")
	seq, seqErr := strconv.ParseUint(before, 16, 64)
	n, err := strconv.ParseUint(after, 16, 32)
	return seq, uint32(n), seqErr == nil && err == nil && name == segmentName(seq, uint32(n))
}

func parseSpareName(name string) (n int, ok bool) {
	_, err := fmt.Sscanf(name, spareForm, &n)
	return n, err == nil && name == fmt.Sprintf(spareForm, n)
}

// segments are the files of a store.
type segments struct {
	mu        sync.RWMutex
	all       []*Segment // by sequence
	spares    []string   // names
	nextSpare int
	opened    int // since the last trim

	publishing sync.Mutex // over writing the manifest
	manifest   *manifest
}

func (g *segments) list() []*Segment {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return slices.Clone(g.all)
}

func (g *segments) insert(s *Segment) {
	g.mu.Lock()
	defer g.mu.Unlock()
	i, _ := slices.BinarySearchFunc(g.all, s, func(a, b *Segment) int {
		if a.seq != b.seq {
			if a.seq < b.seq {
				return -1
			}
			return 1
		}
		return int(a.gen) - int(b.gen)
	})
	g.all = slices.Insert(g.all, i, s)
}

func (g *segments) drop(s *Segment) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = slices.DeleteFunc(g.all, func(o *Segment) bool { return o == s })
}

// trim closes files that nobody reads when many were opened.
func (g *segments) trim() {
	g.mu.Lock()
	g.opened++
	if g.opened < maxOpenSegments {
		g.mu.Unlock()
		return
	}
	g.opened = 0
	all := slices.Clone(g.all)
	g.mu.Unlock()
	open := 0
	for _, s := range all {
		if s.handle.isOpen() {
			if open++; open > maxOpenSegments/2 {
				s.handle.trim()
			}
		}
	}
}

// publish changes the manifest, durably. With reserve a full disk makes room for it, if need be at the cost of a spare file. An
// error that is ENOSPC, or a want of file descriptors, has changed nothing; after any other it is not known which manifest a restart will find.
func (s *Store) publish(reserve bool, change func(*manifest)) error {
	g := &s.segments
	g.publishing.Lock()
	defer g.publishing.Unlock()
	m := g.manifest.clone()
	change(m)
	err := writeManifest(s.fs, s.cfg.Dir, m)
	if reserve && errors.Is(err, syscall.ENOSPC) && s.fs.Remove(path.Join(s.cfg.Dir, roomName)) == nil {
		err = writeManifest(s.fs, s.cfg.Dir, m)
		defer s.keepRoom()
	}
	if reserve && errors.Is(err, syscall.ENOSPC) && s.shrinkSpare(int64(2*m.size())) {
		err = writeManifest(s.fs, s.cfg.Dir, m)
	}
	if err != nil {
		return err
	}
	g.manifest = m
	return nil
}

// keepRoom takes space for a manifest, if there is some: until a new one has taken the place of the old one there are
// two. Nothing depends on the file, so that nothing of it is synced.
func (s *Store) keepRoom() {
	at := path.Join(s.cfg.Dir, roomName)
	want := max(spareSlack(s.cfg.SegmentSize), int64(2*s.segments.manifest.size()))
	if info, err := s.fs.Stat(at); err == nil && info.Size >= want {
		return
	}
	f, err := s.fs.Open(at)
	if errors.Is(err, iofs.ErrNotExist) {
		f, err = s.fs.Create(at)
	}
	if err == nil {
		err = errors.Join(f.Allocate(0, want), f.Close())
	}
	if err != nil && !shortage(err) {
		s.log.Warn("cannot keep room for a manifest", "path", at, "error", err)
	}
}

// shrinkSpare cuts a spare file to give the disk n bytes, and reports whether there was one.
func (s *Store) shrinkSpare(n int64) bool {
	s.segments.mu.RLock()
	spares := slices.Clone(s.segments.spares)
	s.segments.mu.RUnlock()
	for _, name := range spares {
		at := path.Join(s.cfg.Dir, name)
		info, err := s.fs.Stat(at)
		if err == nil {
			err = s.cut(at, info.Size-max(spareSlack(info.Size), min(n, info.Size/4)))
		}
		if err == nil {
			return true
		}
	}
	return false
}

// spareSlack is what a spare file of a size gives up when the disk has nothing left.
func spareSlack(size int64) int64 { return min(64<<10, size/4) }

func (s *Store) cut(at string, size int64) error {
	f, err := s.fs.Open(at)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

func (s *Store) nextSequence() uint64 {
	s.segments.publishing.Lock()
	defer s.segments.publishing.Unlock()
	return s.segments.manifest.next
}

func newUUID() (u entry.UUID) {
	_, _ = rand.Read(u[:]) // never fails
	return u
}

// depth is how deep a new file may reach into the spare files.
type depth int

const (
	// ordinary takes a spare file only if there are more than the reserve.
	ordinary depth = iota
	// reserve takes all but the last one.
	reserve
	// lastReserve is for compaction, which gives back more, and for a start that finds no room in the last segment: without one
	// to write to there is no way to free space.
	lastReserve
)

// prepare makes the next segment of the log, durably listed.
func (s *Store) prepare(d depth) (*Segment, error) { return s.prepareSized(s.cfg.SegmentSize, d) }

func (s *Store) prepareSized(size int64, d depth) (*Segment, error) {
	seg := &Segment{seq: s.nextSequence()}
	w, err := s.create(seg, size, d)
	if err != nil {
		return nil, err
	}
	err = s.publish(d > ordinary, func(m *manifest) {
		m.add(manifestSegment{sequence: seg.seq, rewrite: seg.gen, uuid: seg.uuid})
	})
	switch {
	case shortage(err):
		return nil, errors.Join(err, s.discard(seg))
	case err != nil: // it may be listed: the next start will see
		return nil, errors.Join(err, w.Close())
	}
	s.segments.insert(seg)
	s.next.Store(seg)
	return seg, nil
}

// create makes the file of seg. On an error there is none, and a spare file that was taken is one again.
func (s *Store) create(seg *Segment, size int64, d depth) (*segment.Writer, error) {
	seg.path = path.Join(s.cfg.Dir, segmentName(seg.seq, seg.gen))
	seg.uuid = newUUID()
	h := segment.Header{SegmentUUID: seg.uuid, Sequence: seg.seq, Cluster: s.cfg.Cluster, Storage: s.cfg.Storage}
	spare := s.takeSpare(d)
	w, err := s.createFile(seg.path, h, size, spare, d > ordinary)
	switch {
	case err == nil:
	case spare != "":
		return nil, errors.Join(err, s.putBack(seg.path, spare))
	case errors.Is(err, iofs.ErrExist): // whatever it is, it is not what failed here
		return nil, err
	default:
		if rmErr := s.fs.Remove(seg.path); rmErr != nil && !errors.Is(rmErr, iofs.ErrNotExist) {
			err = errors.Join(err, rmErr)
		}
		return nil, err
	}
	seg.appender, seg.handle.writer = w, w
	seg.size.Store(w.Size())
	return w, nil
}

// putBack makes a spare of a file again that was one when it was taken.
func (s *Store) putBack(at, spare string) error {
	if _, err := s.fs.Stat(at); err == nil { // else it still has its name
		if err := segment.Retire(s.fs, at, path.Join(s.cfg.Dir, spare)); err != nil {
			return errors.Join(err, s.fs.Remove(at))
		}
	}
	s.addSpare(spare)
	return nil
}

func (s *Store) createFile(at string, h segment.Header, size int64, spare string, reserve bool) (*segment.Writer, error) {
	if spare == "" {
		return segment.Create(s.fs, at, h, size, false)
	}
	from := path.Join(s.cfg.Dir, spare)
	info, err := s.fs.Stat(from)
	if err != nil {
		return nil, fmt.Errorf("take spare: %w", err)
	}
	if reserve {
		// The disk may have no byte left: a little of the file goes to the manifest that is to list it.
		size = min(size, info.Size-spareSlack(info.Size))
		if err := s.cut(from, size); err != nil {
			return nil, fmt.Errorf("take spare: %w", err)
		}
		info.Size = size
	}
	if err := s.fs.Rename(from, at); err != nil {
		return nil, fmt.Errorf("take spare: %w", err)
	}
	w, err := segment.Create(s.fs, at, h, size, true)
	if errors.Is(err, syscall.ENOSPC) && info.Size < size {
		// A sealed file was cut behind its footer; with no byte left on the disk that much has to do.
		w, err = segment.Create(s.fs, at, h, info.Size, true)
	}
	return w, err
}

// takeSpare returns the name of a spare file that may be used, "" if there is none.
func (s *Store) takeSpare(d depth) string {
	g := &s.segments
	g.mu.Lock()
	defer g.mu.Unlock()
	n, kept := len(g.spares), 0
	switch d {
	case ordinary:
		kept = s.cfg.Spares
	case reserve:
		kept = min(s.cfg.Spares-1, 1)
	case lastReserve:
	}
	if n <= kept {
		return ""
	}
	name := g.spares[n-1]
	g.spares = g.spares[:n-1]
	return name
}

// maxSpares is the reserve, and one for the log to take next.
func (s *Store) maxSpares() int { return s.cfg.Spares + 1 }

// discard removes a file that the manifest does not list, or keeps it as a spare.
func (s *Store) discard(seg *Segment) error {
	idle := seg.handle.close()
	s.footers.drop(seg)
	info, err := s.fs.Stat(seg.path)
	if err != nil {
		return fmt.Errorf("discard segment: %w", err)
	}
	if idle && info.Size < s.cfg.SegmentSize && s.spareCount() < s.cfg.Spares && s.growFile(seg.path) == nil {
		info.Size = s.cfg.SegmentSize
	}
	if idle && info.Size >= s.cfg.SegmentSize/2 && info.Size <= s.cfg.SegmentSize {
		if name, ok := s.nameSpare(); ok {
			if err := segment.Retire(s.fs, seg.path, path.Join(s.cfg.Dir, name)); err != nil {
				return errors.Join(fmt.Errorf("keep segment as spare: %w", err), s.fs.Remove(seg.path))
			}
			s.addSpare(name)
			return nil
		}
	}
	if err := s.fs.Remove(seg.path); err != nil {
		return fmt.Errorf("discard segment: %w", err)
	}
	return nil
}

// nameSpare returns a name for another spare, if there is to be one.
func (s *Store) nameSpare() (string, bool) {
	g := &s.segments
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.spares) >= s.maxSpares() {
		return "", false
	}
	g.nextSpare++
	return fmt.Sprintf(spareForm, g.nextSpare), true
}

func (s *Store) addSpare(name string) {
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	s.segments.spares = append(s.segments.spares, name)
}

// fillReserve allocates spare files until the reserve is complete, whatever the watermarks say: they count it as free.
func (s *Store) fillReserve() error {
	s.segments.publishing.Lock()
	s.keepRoom()
	s.segments.publishing.Unlock()
	if err := s.growSpares(); err != nil {
		return fmt.Errorf("fill reserve: %w", err)
	}
	for s.spareCount() < s.cfg.Spares {
		disk, err := s.fs.Usage(s.cfg.Dir)
		if err != nil {
			return fmt.Errorf("fill reserve: %w", err)
		}
		if !s.hasRoom(disk) {
			return nil
		}
		name, ok := s.nameSpare()
		if !ok {
			return nil
		}
		temp := path.Join(s.cfg.Dir, name+".tmp")
		h := segment.Header{SegmentUUID: newUUID(), Cluster: s.cfg.Cluster, Storage: s.cfg.Storage}
		w, err := segment.Create(s.fs, temp, h, s.cfg.SegmentSize, false)
		if err == nil {
			err = w.Close()
		}
		if err == nil {
			err = segment.Retire(s.fs, temp, path.Join(s.cfg.Dir, name))
		}
		if err != nil {
			if rmErr := s.fs.Remove(temp); rmErr != nil && !errors.Is(rmErr, iofs.ErrNotExist) {
				err = errors.Join(err, rmErr)
			}
			return fmt.Errorf("fill reserve: %w", err)
		}
		s.addSpare(name)
	}
	return nil
}

// hasRoom reports whether the disk has room for a segment, and what goes with it.
func (s *Store) hasRoom(disk vfs.Usage) bool { return disk.Free >= uint64(s.cfg.SegmentSize+mib) }

// growSpares gives spare files back what was cut off them.
func (s *Store) growSpares() error {
	s.segments.mu.RLock()
	defer s.segments.mu.RUnlock() // none is taken meanwhile
	for _, name := range s.segments.spares {
		at := path.Join(s.cfg.Dir, name)
		info, err := s.fs.Stat(at)
		if err != nil {
			return err
		}
		if info.Size >= s.cfg.SegmentSize {
			continue
		}
		if err := s.growFile(at); err != nil {
			return err
		}
	}
	return nil
}

// growFile makes a file as large as a segment.
func (s *Store) growFile(at string) error {
	f, err := s.fs.Open(at)
	if err != nil {
		return err
	}
	return errors.Join(f.Allocate(0, s.cfg.SegmentSize), f.Close())
}

func (s *Store) spareCount() int {
	s.segments.mu.RLock()
	defer s.segments.mu.RUnlock()
	return len(s.segments.spares)
}
