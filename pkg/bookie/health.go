package bookie

import (
	"context"
	"errors"
	"fmt"
	iofs "io/fs"
	"log/slog"
	"path"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// health is whether the bookie can do its work: it serves, and its disk has synced something lately. A session with
// etcd is no part of it: open ledgers are served without.
type health struct {
	fs       vfs.FS
	file     string
	interval time.Duration
	stored   func() time.Time // when the data path last answered OK
	log      *slog.Logger

	mu      sync.Mutex
	synced  time.Time
	serving bool
	fatal   error
	failing bool
}

func newHealth(fs vfs.FS, dir string, interval time.Duration, stored func() time.Time, log *slog.Logger) *health {
	return &health{fs: fs, file: path.Join(dir, probeName), interval: interval, stored: stored, log: log}
}

// run syncs a few bytes per interval, unless the data path has synced something meanwhile.
func (h *health) run(ctx context.Context) {
	ticker := time.NewTicker(h.interval)
	defer ticker.Stop()
	for {
		if last := h.stored(); time.Since(last) < h.interval {
			h.note(last, nil)
		} else {
			err := h.probe()
			h.note(time.Now(), err)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (h *health) probe() error {
	f, err := h.fs.Open(h.file)
	if errors.Is(err, iofs.ErrNotExist) {
		f, err = h.fs.Create(h.file)
	}
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte("ok\n"), 0)
	if err == nil {
		err = f.Datasync()
	}
	return errors.Join(err, f.Close())
}

func (h *health) note(at time.Time, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		h.synced = at
	}
	if failed := err != nil; failed != h.failing {
		h.failing = failed
		if failed {
			h.log.Error("disk does not sync", slog.Any("error", err))
		} else {
			h.log.Info("disk syncs again")
		}
	}
}

func (h *health) setServing(on bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.serving = on
}

func (h *health) setFatal(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fatal = err
}

// live is nil unless only a restart helps.
func (h *health) live() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fatal
}

// lastSync is when something was last synced; the zero time for never.
func (h *health) lastSync() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if last := h.stored(); last.After(h.synced) {
		return last
	}
	return h.synced
}

// ready is nil if the bookie serves, and otherwise says why not.
func (h *health) ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch limit := 4 * h.interval; {
	case h.fatal != nil:
		return h.fatal
	case !h.serving:
		return errors.New("not serving yet, or not any more")
	case time.Since(h.synced) > limit:
		return fmt.Errorf("nothing was synced for %v", limit)
	}
	return nil
}
