//go:build linux

package faults

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Faults of clocks. The programs are built with a package time whose Now adds what a file says to the wall clock, and
// leaves the monotonic one alone, as a step of a machine's clock does.

const skewVariable = "CLOCK_SKEW_FILE"

// skewSource goes into package time. Now is called where no system call may be made, so the file is in memory.
const skewSource = `package time

import (
	"sync/atomic"
	"syscall"
	"unsafe"
)

// skew is what the file says, in seconds.
var skew = new(atomic.Int64)

func init() {
	path, ok := syscall.Getenv("` + skewVariable + `")
	if !ok {
		return
	}
	fd, err := open(path)
	if err != nil {
		panic("open " + path + ": " + err.Error())
	}
	b, err := syscall.Mmap(int(fd), 0, skewSize, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		panic("map " + path + ": " + err.Error())
	}
	closefd(fd)
	skew = (*atomic.Int64)(unsafe.Pointer(&b[0]))
}

const skewSize = 8
`

// skewSize is the file's: seconds, as this machine keeps numbers.
const skewSize = 8

const (
	nowBefore = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	nowAfter  = nowBefore + "\tsec += skew.Load()\n"
)

var skewed struct {
	once sync.Once
	dir  string
	err  error
}

// skewedPrograms builds bookie and broker with such a clock, once, and returns their directory, which the caller of
// removeSkewed removes.
func skewedPrograms(programs string) (string, error) {
	skewed.once.Do(func() { skewed.dir, skewed.err = buildSkewed(programs) })
	return skewed.dir, skewed.err
}

func removeSkewed() {
	if skewed.dir != "" {
		_ = os.RemoveAll(skewed.dir)
	}
}

func buildSkewed(programs string) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "penstock-skewed-"); err != nil {
		return "", err
	}
	root, err := exec.Command("go", "env", "GOROOT").Output() //nolint:noctx // short
	if err != nil {
		return dir, fmt.Errorf("find Go: %w", err)
	}
	source := filepath.Join(strings.TrimSpace(string(root)), "src", "time")
	text, err := os.ReadFile(filepath.Join(source, "time.go"))
	if err != nil {
		return dir, err
	}
	changed := strings.Replace(string(text), nowBefore, nowAfter, 1)
	if changed == string(text) {
		return dir, errors.New("this Go's time.Now is not the one that this test can change")
	}
	overlay := map[string]map[string]string{"Replace": {
		filepath.Join(source, "time.go"): filepath.Join(dir, "time.go"),
		filepath.Join(source, "skew.go"): filepath.Join(dir, "skew.go"),
	}}
	list, err := json.Marshal(overlay)
	if err != nil {
		return dir, err
	}
	for name, content := range map[string]string{"time.go": changed, "skew.go": skewSource, "overlay.json": string(list)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			return dir, err
		}
	}
	//nolint:gosec,noctx // of this project
	build := exec.Command("go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", dir+"/", "./cmd/bookie", "./cmd/broker")
	build.Dir = filepath.Dir(programs)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return dir, fmt.Errorf("build programs with another clock: %w: %s", err, out)
	}
	return dir, os.Symlink(filepath.Join(programs, "etcd"), filepath.Join(dir, "etcd"))
}

// onOwnClocks gives each process a clock that can be wrong.
func onOwnClocks(s *site, cfg *process.Config) {
	programs, err := skewedPrograms(cfg.Programs)
	if err != nil {
		s.Fatal(err)
	}
	cfg.Programs = programs
	dir := s.TempDir()
	s.skews = make(map[string]string)
	cfg.Place = func(name string) (string, []string) {
		if s.skews[name] == "" {
			s.skews[name] = filepath.Join(dir, name)
			if err := os.WriteFile(s.skews[name], make([]byte, skewSize), 0o600); err != nil {
				s.Fatal(err)
			}
		}
		return "127.0.0.1", []string{"env", skewVariable + "=" + s.skews[name]}
	}
}

// setClock makes the clocks of some processes wrong, from now on.
func (s *site) setClock(d time.Duration, all ...*process.Process) error {
	for _, p := range all {
		f, err := os.OpenFile(s.skews[p.Name], os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(d/time.Second)), 0)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// stepClocks has the clocks of the owner and of one bookie step by an hour or a day, forth or back, and back to the truth.
func stepClocks(s *site) error {
	owner, err := s.owner()
	if err != nil {
		return err
	}
	bookie, err := s.victim()
	if err != nil {
		return err
	}
	d := []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour}[s.rng.IntN(4)]
	if err := s.setClock(d, owner, bookie); err != nil {
		return err
	}
	if err := s.hold(4 * time.Second); err != nil {
		return err
	}
	// Another owner, with another idea of the time.
	if err := owner.Kill(); err != nil {
		return err
	}
	if err := s.hold(2 * time.Second); err != nil {
		return err
	}
	if err := s.startAll(owner); err != nil {
		return err
	}
	return s.setClock(0, owner, bookie)
}

// strobeClocks has all clocks jump to and fro.
func strobeClocks(s *site) error {
	all := append(append([]*process.Process(nil), s.c.Brokers...), s.c.Bookies...)
	for range 50 {
		for _, p := range all {
			if err := s.setClock(time.Duration(s.rng.Int64N(int64(48*time.Hour)))-24*time.Hour, p); err != nil {
				return err
			}
		}
		if err := s.hold(100 * time.Millisecond); err != nil {
			return err
		}
	}
	return s.setClock(0, all...)
}
