//go:build linux && !noroot

package powercut

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

var (
	cuts    = flag.Int("cuts", 5, "power cuts on each file system")
	fileSys = flag.String("fs", "", "the file system, if not all: ext4 or xfs")
	seed    = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of what is done; when the power goes is chance all the same")
	results = flag.String("results", "", "file that takes the table of results")
	version = flag.String("version", "unknown", "what is tested, as the results name it")
)

const (
	patience   = 2 * time.Minute // with one cut, from the start of its process to the end of the check
	cutsALife  = 20              // that a store goes through before the next one begins
	volumeSize = 400 << 20
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envDir); dir != "" {
		fmt.Fprintln(os.Stderr, runChild(dir))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// The power of a store's disk is cut while it is in full use, or while it starts: all that was acknowledged is there, and
// nothing acknowledged is denied.
func TestStore(t *testing.T) {
	kinds := volume.Kinds()
	if *fileSys != "" {
		kinds = []volume.Kind{volume.Kind(*fileSys)}
	}
	began := time.Now()
	lanes := make([]*lane, len(kinds))
	t.Run("cuts", func(t *testing.T) {
		for i, kind := range kinds {
			lanes[i] = &lane{kind: kind, rng: rand.New(rand.NewPCG(*seed, uint64(i)))}
			t.Run(string(kind), func(t *testing.T) {
				t.Parallel()
				lanes[i].run(t)
			})
		}
	})
	table := report(lanes, *version)
	t.Logf("seed %d, %v\n%s", *seed, time.Since(began).Round(time.Second), table)
	if *results != "" && !t.Failed() {
		if err := os.WriteFile(*results, []byte(table), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// lane is one volume and the stores on it, one after the other.
type lane struct {
	*testing.T
	kind    volume.Kind
	rng     *rand.Rand
	vol     *volume.Volume
	log     bytes.Buffer // of the last child
	segment int64
	*model
	sums map[volume.How]*tally
}

func (l *lane) run(t *testing.T) {
	t.Helper()
	l.T = t
	l.sums = map[volume.How]*tally{volume.DropLog: {}, volume.KeepLog: {}}
	vol, err := volume.New(l.kind, t.TempDir(), volumeSize)
	if err != nil {
		t.Fatalf("%v: this test needs root, and mkfs of the file system; `go test -tags noroot` leaves it out", err)
	}
	l.vol = vol
	t.Cleanup(func() {
		if err := vol.Close(); err != nil {
			t.Error(err)
		}
	})
	full := true
	for i := range *cuts {
		if i%cutsALife == 0 || full {
			if err := os.RemoveAll(l.dir()); err != nil {
				t.Fatal(err)
			}
			l.model = newModel()
			l.segment = 64 << (10 + 2*l.rng.IntN(3))
		}
		how := volume.DropLog
		if i%3 == 2 {
			how = volume.KeepLog
		}
		l.tally = l.sums[how]
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		full, err = l.cut(ctx, i, how)
		cancel()
		if err != nil {
			t.Fatalf("cut %d, %v: %v\n%s", i, how, err, l.log.String())
		}
	}
}

func (l *lane) dir() string { return filepath.Join(l.vol.Dir(), "bookie", "data") }

// cut lets a process work on the store, cuts the power, and looks at what is there afterwards. It reports whether the disk
// is rather full.
func (l *lane) cut(ctx context.Context, i int, how volume.How) (full bool, err error) {
	if err := l.workAndCut(ctx, i, how); err != nil {
		return false, err
	}
	if err := l.vol.Remount(); err != nil {
		return false, err
	}
	l.Cuts++
	if !l.opened {
		l.DuringStart++
	}
	cfg := storeConfig(l.dir(), l.segment)
	cfg.CompactBytesPerSecond = -1
	s, err := ledgerstore.Open(ctx, cfg, vfs.OS(), slog.New(slog.NewTextHandler(&l.log, nil)), nil)
	if err != nil {
		return false, err
	}
	usage := s.Usage()
	return usage.Free < usage.Total/2, errors.Join(l.check(ctx, s), s.Close())
}

func (l *lane) workAndCut(ctx context.Context, i int, how volume.How) (err error) {
	hear, say, err := os.Pipe()
	if err != nil {
		return err
	}
	defer hear.Close()
	l.log.Reset()
	child := exec.Command(os.Args[0], "-test.run=^$")
	child.Stderr = &l.log
	child.ExtraFiles = []*os.File{say}
	child.Env = append(os.Environ(), envDir+"="+l.dir(), fmt.Sprint(envSeed, "=", l.rng.Uint64()),
		fmt.Sprint(envFirst, "=", 1000*(i+1)), fmt.Sprint(envSize, "=", l.segment))
	l.begin()
	err = child.Start()
	_ = say.Close() // the child has its own
	if err != nil {
		return err
	}
	heard := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		heard <- readNotes(hear, l.hear)
	}()
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait() // it was killed
		<-ended
		err = errors.Join(err, <-heard)
	}()
	if l.rng.IntN(6) == 0 && i%cutsALife > 0 { // the start has something to do
		time.Sleep(time.Duration(l.rng.IntN(60)) * time.Millisecond) // any moment will do
	} else {
		answers := l.rng.IntN(4000)
		if err := l.until(ctx, ended, func() bool { return l.opened && l.answers >= answers }); err != nil {
			return fmt.Errorf("wait for %d answers: %w", answers, err)
		}
	}
	if err := l.darken(); err != nil {
		return err
	}
	return l.vol.Cut(how)
}
