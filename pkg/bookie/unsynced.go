package bookie

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	iofs "io/fs"
	"log/slog"
	"path"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// What a bookie does that acknowledges entries before they are synced ([ledgerstore.SyncPolicy]). While it may, a mark
// lies on its disk that names the boot of the kernel, and this time that the file system is mounted (see kernelRun); a
// clean stop makes it an empty one, in its place, since a full disk has no room for another when the bookie comes back. A start that finds the mark of another boot or mount has lost, perhaps, what was acknowledged:
// every ledger that it may have held, and that is not closed, goes to limbo and is fenced before anything is answered. The
// mark of this one means that the process was killed, and that what it wrote was in the kernel's cache: nothing is lost. If
// a sync fails, the mark says so, since the cache is not to be trusted after that. Where that cannot be written, the
// file system has gone away, and has to be mounted again before anything starts on it.

const (
	markName    = "UNSYNCED"
	markTmpName = "UNSYNCED.tmp"
	markVersion = 1
	markFixed   = 12
	maxBootID   = 64
	markSize    = markFixed + maxBootID + 4
)

var markMagic = [8]byte{'P', 'N', 'S', 'T', 'U', 'N', 'S', 'Y'}

// mark is the file UNSYNCED. The zero mark says that nothing is unsynced.
type mark struct {
	boot string // and mount
	lost bool   // a sync has failed
}

func encodeMark(m mark) []byte {
	b := append([]byte{}, markMagic[:]...)
	b = binary.BigEndian.AppendUint16(b, markVersion)
	lost := byte(0)
	if m.lost {
		lost = 1
	}
	b = append(b, lost, byte(len(m.boot)))
	b = append(b, m.boot...)
	b = binary.BigEndian.AppendUint32(b, entry.CRC32C(b))
	return append(b, make([]byte, markSize-len(b))...)
}

// decodeMark reads the whole file. One that is damaged says that something may be lost, as it is.
func decodeMark(b []byte) mark {
	damaged := mark{lost: true}
	switch {
	case len(b) < markFixed+4 || [8]byte(b[:8]) != markMagic || binary.BigEndian.Uint16(b[8:]) != markVersion:
		return damaged
	}
	end := markFixed + int(b[11])
	if end > len(b)-4 || entry.CRC32C(b[:end]) != binary.BigEndian.Uint32(b[end:]) {
		return damaged
	}
	for _, x := range b[end+4:] {
		if x != 0 {
			return damaged
		}
	}
	return mark{boot: string(b[markFixed:end]), lost: b[10] != 0}
}

func (d disk) loadMark() (m mark, there bool, err error) {
	b, err := readAll(d.fs, path.Join(d.dir, markName))
	switch {
	case errors.Is(err, iofs.ErrNotExist):
		return mark{}, false, nil
	case err != nil:
		return mark{}, false, fmt.Errorf("read %s: %w", markName, err)
	}
	return decodeMark(b), true, nil
}

// writeMark writes the mark, durably: in its place, if it has one that is large enough, since a full disk has no room for another.
// A write that is cut short leaves what is damaged, and that means that entries may be lost.
func (d disk) writeMark(m mark) error {
	name := path.Join(d.dir, markName)
	if info, err := d.fs.Stat(name); err == nil && info.Size == markSize {
		f, err := d.fs.Open(name)
		if err != nil {
			return fmt.Errorf("open %s: %w", markName, err)
		}
		return errors.Join(writeSynced(f, encodeMark(m)), f.Close())
	}
	tmp := path.Join(d.dir, markTmpName)
	if err := d.fs.Remove(tmp); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return fmt.Errorf("remove old %s: %w", markTmpName, err)
	}
	f, err := d.fs.Create(tmp)
	if err != nil {
		return fmt.Errorf("create %s: %w", markName, err)
	}
	if err := errors.Join(writeSynced(f, encodeMark(m)), f.Close()); err != nil {
		return err
	}
	return d.rename(markTmpName, markName)
}

func writeSynced(f vfs.File, b []byte) error {
	_, err := f.WriteAt(b, 0)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", markName, err)
	}
	return nil
}

func (d disk) removeMark() error {
	if err := d.fs.Remove(path.Join(d.dir, markName)); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", markName, err)
	}
	if err := d.fs.SyncDir(d.dir); err != nil {
		return fmt.Errorf("sync data directory: %w", err)
	}
	return nil
}

func (b *Bookie) disk() disk { return disk{fs: b.env.FS, dir: b.cfg.DataDir} }

// lazy reports whether entries are acknowledged before they are synced.
func (b *Bookie) lazy() bool { return b.cfg.Store.Sync.Interval > 0 }

// settleUnsynced puts ledgers in limbo if acknowledged entries may have been lost since the last run, and leaves the mark
// as this run needs it. The store is open, and nothing is served yet.
func (b *Bookie) settleUnsynced(ctx context.Context) error {
	m, there, err := b.disk().loadMark()
	if err != nil {
		return err
	}
	if !there && !b.lazy() {
		return nil
	}
	id := b.env.BootID
	if id == nil {
		id = func() (string, error) { return kernelRun(b.cfg.DataDir) }
	}
	boot, err := id()
	switch {
	case err != nil && b.lazy():
		return fmt.Errorf("a sync interval needs to tell a power cut from a killed process: %w", err)
	case err != nil:
		boot = ""
	case boot == "" || len(boot) > maxBootID:
		return fmt.Errorf("the kernel's boot id %q makes no sense", boot)
	}
	if there && m != (mark{}) && (m.lost || m.boot != boot) {
		if err := b.limboOpen(ctx); err != nil {
			return err
		}
	}
	if !b.lazy() {
		return b.disk().removeMark()
	}
	b.log.Warn("entries are acknowledged before they are synced: a power cut loses them, and puts this bookie's open ledgers in limbo",
		slog.String("sync", b.cfg.Store.Sync.String()))
	if err := b.disk().writeMark(mark{boot: boot}); err != nil {
		return err
	}
	b.marked = true
	return nil
}

// limboOpen puts in limbo what metadata says this disk may hold entries of, apart from closed ledgers: of those it is
// known what there is.
func (b *Bookie) limboOpen(ctx context.Context) error {
	ids, err := b.env.Meta.LedgersOn(ctx, b.me.Storage)
	if err != nil {
		return fmt.Errorf("list ledgers that may have lost entries: %w", err)
	}
	var open []entry.LedgerID
	for _, id := range ids {
		l, err := b.env.Meta.GetLedger(ctx, id)
		switch {
		case errors.Is(err, meta.ErrNotFound):
			continue
		case err != nil:
			return fmt.Errorf("read a ledger that may have lost entries: %w", err)
		case l.State == meta.LedgerOpen || l.State == meta.LedgerInRecovery:
			open = append(open, id)
		}
	}
	b.log.Warn("the last run acknowledged entries before they were synced, and has not stopped by itself: acknowledged entries may have been lost, "+
		"and every ledger that is not closed is in limbo until it is repaired, or its limbo is ended by hand", slog.Int("ledgers", len(open)))
	if err := b.store.SetLimbo(ctx, open...); err != nil {
		return fmt.Errorf("put ledgers in limbo: %w", err)
	}
	return nil
}

// noteStop is called when the store has stopped: by itself, because of err, or because it was closed.
func (b *Bookie) noteStop(err error) {
	if !b.marked { // what lies there is of an earlier run
		return
	}
	if err == nil {
		err = b.disk().writeMark(mark{})
	} else {
		// The kernel may have dropped what it could not write. If that cannot be noted either, the file system is dead.
		err = b.disk().writeMark(mark{lost: true})
	}
	if err != nil {
		b.log.Error("cannot note on the disk how this bookie stopped", slog.Any("error", err))
	}
}
