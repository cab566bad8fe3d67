//go:build linux

package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// Faults of disks.

// onVolumes gives each bookie a file system of its own.
func onVolumes(megabytes int64, args ...string) func(*site, *process.Config) {
	return func(s *site, cfg *process.Config) {
		for range bookies {
			v, err := volume.New(volume.Ext4, s.TempDir(), megabytes<<20)
			if err != nil {
				s.Fatal(err)
			}
			s.Cleanup(func() {
				if err := v.Close(); err != nil {
					s.Error(err)
				}
			})
			s.disks = append(s.disks, v)
			s.dirs = append(s.dirs, filepath.Join(v.Dir(), "data"))
		}
		cfg.BookieDir = func(i int) string { return s.dirs[i] }
		cfg.BookieArgs = append(cfg.BookieArgs, args...)
	}
}

// onDirectories gives each bookie a directory that the fault may touch.
func onDirectories(s *site, cfg *process.Config) {
	for range bookies {
		s.dirs = append(s.dirs, filepath.Join(s.TempDir(), "data"))
	}
	cfg.BookieDir = func(i int) string { return s.dirs[i] }
}

// cutPower cuts so many bookies' power at once.
func cutPower(n int) func(*site) error {
	return func(s *site) error {
		struck, err := s.ensemble()
		if err != nil {
			return err
		}
		if n > len(struck) {
			struck = s.c.Bookies
		} else {
			struck = struck[:n]
		}
		// Nobody answers once the power is gone, whatever a call that was under way then returns.
		if err := s.freeze(struck...); err != nil {
			return err
		}
		how := volume.DropLog
		if s.rng.IntN(2) == 0 {
			how = volume.KeepLog
		}
		for _, p := range struck {
			if err := s.disks[s.index(p)].Cut(how); err != nil {
				return err
			}
		}
		if err := killAll(struck); err != nil {
			return err
		}
		for _, p := range struck {
			if err := s.disks[s.index(p)].Remount(); err != nil {
				return err
			}
		}
		if err := s.hold(2 * time.Second); err != nil {
			return err
		}
		return s.startAll(struck...)
	}
}

// failSync has syncs of one bookie fail, once in each of its threads or always, until it has ended.
func failSync(which string) func(*site) error {
	return func(s *site) error {
		p, err := s.victim()
		if err != nil {
			return err
		}
		end, err := s.inject(p, "fdatasync,fsync", "error=EIO"+which)
		if err != nil {
			return err
		}
		code, ok := s.ends(p, soon)
		end()
		s.expect(ok && code != 0, "a bookie whose sync failed went on, or ended with exit code 0")
		s.goal = "ends with a code that is not 0"
		if !ok {
			if err := p.Kill(); err != nil {
				return err
			}
		}
		return s.startAll(p)
	}
}

// slowSync has each sync of a process take longer.
func (s *site) slowSync(p *process.Process, by, d time.Duration) error {
	end, err := s.inject(p, "fdatasync,fsync", fmt.Sprintf("delay_enter=%d", by.Microseconds()))
	if err != nil {
		return err
	}
	defer end()
	return s.hold(d)
}

func slowBookieSync(s *site) error {
	p, err := s.victim()
	if err != nil {
		return err
	}
	return s.slowSync(p, 200*time.Millisecond, 5*time.Second)
}

func slowEtcdLeader(s *site) error {
	p, err := s.c.EtcdLeader(s.ctx)
	if err != nil {
		return err
	}
	return s.slowSync(p, 500*time.Millisecond, 5*time.Second)
}

// damage has a bookie lose what its newest file holds from the middle on, in some way. It is the same bookie each time: a
// majority is more than copies are kept for.
func damage(how func(f *os.File, middle, end int64) error) func(*site) error {
	return func(s *site) error {
		if s.rotten == nil {
			p, err := s.victim()
			if err != nil {
				return err
			}
			s.rotten = p
		}
		p := s.rotten
		if err := p.Kill(); err != nil {
			return err
		}
		path, err := newestSegment(s.dirs[s.index(p)])
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		end := int64(len(data))
		for end > 0 && data[end-1] == 0 {
			end--
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		if err := errors.Join(how(f, end/2, end), f.Close()); err != nil {
			return err
		}
		if err := s.startAll(p); err != nil {
			return err
		}
		s.note("what %s lost is not repaired: repair is not built", p.Name)
		return s.hold(2 * time.Second)
	}
}

const rotLength = 64

func flip(f *os.File, middle, _ int64) error {
	b := make([]byte, rotLength)
	n, err := f.ReadAt(b, middle)
	if n == 0 {
		return err
	}
	for i := range b[:n] {
		b[i] ^= 0xff
	}
	_, err = f.WriteAt(b[:n], middle)
	return err
}

func zero(f *os.File, middle, end int64) error {
	_, err := f.WriteAt(make([]byte, min(4096, end-middle)), middle)
	return err
}

func truncate(f *os.File, middle, _ int64) error { return f.Truncate(middle) }

// refuses starts a bookie whose disk is not what it should be: it must end, and say that by its exit code.
func (s *site) refuses(p *process.Process) error {
	if err := p.Launch(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	if p.WaitReady(ctx) == nil {
		return fmt.Errorf("%s starts on a disk that is not its own, or old", p.Name)
	}
	if code := p.ExitCode(); code != 5 {
		return fmt.Errorf("%s, on a disk that is not its own, or old, ends with exit code %d", p.Name, code)
	}
	s.goal = "refused"
	return nil
}

// wipe takes a bookie's disk away, for a while.
func wipe(s *site) error {
	p, err := s.victim()
	if err != nil {
		return err
	}
	if err := p.Kill(); err != nil {
		return err
	}
	dir := s.dirs[s.index(p)]
	if err := os.Rename(dir, dir+".kept"); err != nil {
		return err
	}
	if err := s.refuses(p); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(dir), os.Rename(dir+".kept", dir)); err != nil {
		return err
	}
	return s.startAll(p)
}

// restoreOld puts a copy that was made earlier in place of a bookie's disk, for a while.
func restoreOld(s *site) error {
	p, err := s.victim()
	if err != nil {
		return err
	}
	dir := s.dirs[s.index(p)]
	if err := p.Kill(); err != nil {
		return err
	}
	if err := os.CopyFS(dir+".old", os.DirFS(dir)); err != nil {
		return err
	}
	if err := s.startAll(p); err != nil {
		return err
	}
	if err := s.hold(3 * time.Second); err != nil {
		return err
	}
	if err := p.Kill(); err != nil {
		return err
	}
	if err := errors.Join(os.Rename(dir, dir+".kept"), os.Rename(dir+".old", dir)); err != nil {
		return err
	}
	if err := s.refuses(p); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(dir), os.Rename(dir+".kept", dir)); err != nil {
		return err
	}
	return s.startAll(p)
}

// fillDisks takes all space of so many bookies' disks, for a while.
func fillDisks(n int) func(*site) error {
	return func(s *site) error {
		var fillers []string
		var full []*process.Process
		for _, i := range s.rng.Perm(len(s.disks))[:n] {
			path, err := fill(s.disks[i].Dir())
			if err != nil {
				return err
			}
			fillers, full = append(fillers, path), append(full, s.c.Bookies[i])
		}
		all := func(state string) func(context.Context) bool {
			return func(ctx context.Context) bool {
				now := s.states(ctx)
				for _, p := range full {
					if now[p.Name] != state {
						return false
					}
				}
				return true
			}
		}
		if !s.within(soon, all("FULL")) { // what is trimmed meanwhile makes room again
			s.note("not all of them were full at once: %v", s.states(s.ctx))
		}
		if err := s.hold(3 * time.Second); err != nil {
			return err
		}
		for _, path := range fillers {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
		s.goal = "writable again by themselves"
		return s.until("bookies that have space again are writable", all("WRITABLE"))
	}
}

// fill takes all space of a volume but a few pages.
func fill(dir string) (string, error) {
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	for chunk := make([]byte, 1<<20); len(chunk) >= 4096; {
		if _, err := f.Write(chunk); err != nil {
			chunk = chunk[:len(chunk)/2]
		}
	}
	_ = f.Close() // whatever it could not keep
	return path, nil
}

// readOnly has the file system of one bookie find itself broken.
func readOnly(s *site) error {
	p, err := s.victim()
	if err != nil {
		return err
	}
	disk := s.disks[s.index(p)]
	if err := disk.Fail(); err != nil {
		return err
	}
	code, ok := s.ends(p, soon)
	s.expect(ok && code != 0, "a bookie whose file system is read-only goes on, or ends with exit code 0")
	s.goal = "ends with a code that is not 0"
	if !ok {
		if err := p.Kill(); err != nil {
			return err
		}
	}
	if err := disk.Remount(); err != nil {
		return err
	}
	return s.startAll(p)
}

// slowDisk lets one bookie's disk take 20 writes a second.
func slowDisk(s *site) error {
	p, err := s.victim()
	if err != nil {
		return err
	}
	device, err := deviceOf(s.disks[s.index(p)].Dir())
	if err != nil {
		return err
	}
	g, err := s.group("blkio", p)
	if err != nil {
		return err
	}
	if err := g.set("blkio.throttle.write_iops_device", device+" 20"); err != nil {
		return err
	}
	err = s.hold(6 * time.Second)
	return errors.Join(err, g.set("blkio.throttle.write_iops_device", device+" 0"))
}
