package rawdisk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Config says where to write.
type Config struct {
	// Dir is an existing directory on the disk; a directory of its own is made in it, and removed by Close.
	Dir string
	// Files is how many may be written at once. 0 means 3.
	Files int
	// FileBytes is the size of each. 0 means 256 MiB.
	FileBytes int64
	// New leaves the files empty, so that they grow to that size while they are written: every block is one that the file
	// system and the device have to find first.
	New bool
}

// Disk is a number of files.
type Disk struct {
	dir   string
	files []*diskFile
}

type diskFile struct {
	file vfs.File
	size int64
	at   int64 // where the next group goes
	n    uint64
}

// Measured is what a call of Write did.
type Measured struct {
	Files, GroupBytes int
	Elapsed           time.Duration
	Groups            uint64 // each written and synced
	Bytes             uint64
	// Latency of a group's write and sync, in nanoseconds.
	Latency *hdrhistogram.Histogram
}

// BytesPerSecond is the rate of all files together.
func (m Measured) BytesPerSecond() float64 { return float64(m.Bytes) / m.Elapsed.Seconds() }

// GroupsPerSecond is how many groups were synced in a second, of all files together.
func (m Measured) GroupsPerSecond() float64 { return float64(m.Groups) / m.Elapsed.Seconds() }

const (
	defaultFiles     = 3
	defaultFileBytes = 256 << 20
	prewriteChunk    = 1 << 20
	// maxLatency is the longest that is told apart: a minute.
	maxLatency = int64(time.Minute)
)

// Open makes the files, and writes them once unless they are to be new.
func Open(ctx context.Context, cfg Config) (_ *Disk, err error) {
	if cfg.Files == 0 {
		cfg.Files = defaultFiles
	}
	if cfg.FileBytes == 0 {
		cfg.FileBytes = defaultFileBytes
	}
	dir, err := os.MkdirTemp(cfg.Dir, "penstock-rawdisk-")
	if err != nil {
		return nil, fmt.Errorf("make directory for disk test: %w", err)
	}
	d := &Disk{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	for i := range cfg.Files {
		f, err := vfs.OS().Create(filepath.Join(dir, fmt.Sprintf("log-%d", i)))
		if err != nil {
			return nil, fmt.Errorf("make file for disk test: %w", err)
		}
		d.files = append(d.files, &diskFile{file: f, size: cfg.FileBytes})
	}
	if cfg.New {
		return d, nil
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, f := range d.files {
		group.Go(func() error { return f.prewrite(ctx) })
	}
	if err := group.Wait(); err != nil {
		return nil, fmt.Errorf("write file for disk test: %w", err)
	}
	return d, nil
}

func (f *diskFile) prewrite(ctx context.Context) error {
	if err := f.file.Allocate(0, f.size); err != nil {
		return err
	}
	chunk := noise(prewriteChunk)
	for at := int64(0); at < f.size; at += int64(len(chunk)) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if _, err := f.file.WriteAt(chunk[:min(int64(len(chunk)), f.size-at)], at); err != nil {
			return err
		}
	}
	return f.file.Sync()
}

// noise is what neither a disk nor a file system can make smaller.
func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b) // never fails
	return b
}

// Write writes groups of so many bytes to each of the first files, syncing each group before the next one, for so long; one
// at least to each.
func (d *Disk) Write(ctx context.Context, files, groupBytes int, duration time.Duration) (Measured, error) {
	switch {
	case files < 1 || files > len(d.files):
		return Measured{}, fmt.Errorf("write to disk: %d files: want 1 to %d", files, len(d.files))
	case groupBytes < 8 || int64(groupBytes) > d.files[0].size:
		return Measured{}, fmt.Errorf("write to disk: groups of %d bytes: want 8 to %d, the size of a file", groupBytes, d.files[0].size)
	case duration <= 0:
		return Measured{}, fmt.Errorf("write to disk: for %v: want more than 0", duration)
	}
	latencies := make([]*hdrhistogram.Histogram, files)
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for i, f := range d.files[:files] {
		latencies[i] = newHistogram()
		group.Go(func() error { return f.write(ctx, groupBytes, began.Add(duration), latencies[i]) })
	}
	err := group.Wait()
	m := Measured{Files: files, GroupBytes: groupBytes, Elapsed: time.Since(began), Latency: newHistogram()}
	for _, h := range latencies {
		m.Latency.Merge(h)
	}
	m.Groups = uint64(m.Latency.TotalCount())
	m.Bytes = m.Groups * uint64(groupBytes)
	if err != nil {
		return m, fmt.Errorf("write to disk: %w", err)
	}
	return m, nil
}

func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1_000, maxLatency, 3) }

func (f *diskFile) write(ctx context.Context, groupBytes int, end time.Time, latency *hdrhistogram.Histogram) error {
	buf := noise(groupBytes)
	for began, first := time.Now(), true; first || began.Before(end); first = false {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := f.writeGroup(buf); err != nil {
			return err
		}
		now := time.Now()
		_ = latency.RecordValue(min(int64(now.Sub(began)), maxLatency)) // fails only beyond its range
		began = now
	}
	return nil
}

// writeGroup writes and syncs a group that differs from all before in each block.
func (f *diskFile) writeGroup(buf []byte) error {
	for i := 0; i+8 <= len(buf); i += vfs.BlockSize {
		binary.LittleEndian.PutUint64(buf[i:], f.n)
		f.n++
	}
	if f.at+int64(len(buf)) > f.size {
		f.at = 0
	}
	if _, err := f.file.WriteAt(buf, f.at); err != nil {
		return err
	}
	f.at += int64(len(buf))
	return f.file.Datasync()
}

// Close removes the files.
func (d *Disk) Close() error {
	var errs []error
	for _, f := range d.files {
		errs = append(errs, f.file.Close())
	}
	d.files = nil
	if err := errors.Join(append(errs, os.RemoveAll(d.dir))...); err != nil {
		return fmt.Errorf("remove files of disk test: %w", err)
	}
	return nil
}
