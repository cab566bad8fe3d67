package volume

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is a file system.
type Kind string

// The kinds that can be cut.
const (
	Ext4 Kind = "ext4"
	XFS  Kind = "xfs"
)

// Kinds are all of them.
func Kinds() []Kind { return []Kind{Ext4, XFS} }

// How is what becomes of the file system's own log in a cut.
type How uint32

// The numbers are the ioctl's.
const (
	// KeepLog writes out the log first: names and sizes of the last moment survive, and not the bytes that they stand for.
	KeepLog How = 1
	// DropLog loses what the log has in memory.
	DropLog How = 2
)

// String says which.
func (h How) String() string {
	if h == KeepLog {
		return "log kept"
	}
	return "log dropped"
}

// shutdown is the ioctl that stops a file system in its tracks: XFS's, which ext4 has taken over.
const shutdown = 0x8004587d

// Volume is one file system. Its methods are for one goroutine.
type Volume struct {
	kind   Kind
	device string // the loop device's name
	loop   *os.File
	root   int // descriptor of the mount's root, of nothing while there is none; its number stays
}

// New makes a file system of some bytes; XFS takes no less than 300 MB. They are taken from dir's file system as they are
// written.
func New(kind Kind, dir string, bytes int64) (_ *Volume, err error) {
	image, err := os.CreateTemp(dir, "volume-")
	if err != nil {
		return nil, fmt.Errorf("make volume: %w", err)
	}
	defer image.Close() // the device keeps it
	if err := errors.Join(os.Remove(image.Name()), image.Truncate(bytes)); err != nil {
		return nil, fmt.Errorf("make volume: %w", err)
	}
	v := &Volume{kind: kind}
	if v.root, err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("make volume: %w", err)
	}
	if err := v.attach(image); err != nil {
		return nil, errors.Join(err, unix.Close(v.root))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, v.Close())
		}
	}()
	mkfs := map[Kind][]string{
		Ext4: {"-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"},
		XFS:  {"-q", "-f", "-K"},
	}[kind]
	//nolint:gosec,noctx // of a fixed set, and short
	if out, err := exec.Command("mkfs."+string(kind), append(mkfs, "/dev/"+v.device)...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mkfs.%s: %w: %s", kind, err, out)
	}
	return v, v.mount()
}

// attach gives the image a loop device, which goes when nobody uses it any more.
func (v *Volume) attach(image *os.File) error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("make loop device: %w", err)
	}
	defer control.Close()
	for range 100 { // others take devices as well
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), unix.LOOP_CTL_GET_FREE, 0)
		if errno != 0 {
			return fmt.Errorf("find a loop device: %w", errno)
		}
		v.device = fmt.Sprintf("loop%d", n)
		if v.loop, err = os.OpenFile("/dev/"+v.device, os.O_RDWR, 0); err != nil {
			continue
		}
		cfg := unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		if err = unix.IoctlLoopConfigure(int(v.loop.Fd()), &cfg); err == nil {
			return nil
		}
		err = errors.Join(err, v.loop.Close())
	}
	return fmt.Errorf("make loop device: %w", err)
}

// mount mounts the device, nowhere.
func (v *Volume) mount() error {
	fs, err := unix.Fsopen(string(v.kind), unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open file system %s: %w", v.kind, err)
	}
	defer unix.Close(fs)
	err = unix.FsconfigSetString(fs, "source", "/dev/"+v.device)
	if err == nil && v.kind == Ext4 {
		err = unix.FsconfigSetString(fs, "errors", "remount-ro")
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return fmt.Errorf("mount %s: %w: %s", v.device, err, messages(fs))
	}
	root, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mount %s: %w: %s", v.device, err, messages(fs))
	}
	return v.point(root)
}

// point has the root be another descriptor's, which is closed.
func (v *Volume) point(fd int) error {
	if err := errors.Join(unix.Dup3(fd, v.root, unix.O_CLOEXEC), unix.Close(fd)); err != nil {
		return fmt.Errorf("keep the descriptor of a volume: %w", err)
	}
	return nil
}

// messages are what the kernel had to say.
func messages(fs int) string {
	var out []string
	for b := make([]byte, 4096); ; {
		n, err := unix.Read(fs, b)
		if err != nil || n <= 0 {
			return strings.Join(out, "; ")
		}
		out = append(out, strings.TrimSpace(string(b[:n])))
	}
}

// Dir is the root directory, under the same name after each Remount. Other processes can use it as long as this one lives.
func (v *Volume) Dir() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), v.root) }

// Cut cuts the power: from now on nothing reaches the disk, and every call that would write fails.
func (v *Volume) Cut(how How) error {
	// The descriptor of the mount is one of a path alone, on which there are no ioctls.
	f, err := os.Open(v.Dir())
	if err != nil {
		return fmt.Errorf("cut power: %w", err)
	}
	defer f.Close()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), shutdown, int(how)); err != nil {
		return fmt.Errorf("cut power: %w", err)
	}
	return nil
}

// patience is how long Remount waits for files to be closed: processes that were killed may be long in a call.
const patience = time.Minute

// Remount ends the file system and starts it again from what is on the disk. Nobody may have a file of it open; those
// who have are waited for.
func (v *Volume) Remount() error {
	if err := v.unmount(); err != nil {
		return err
	}
	return v.mount()
}

func (v *Volume) unmount() error {
	nothing, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("unmount: %w", err)
	}
	if err := v.point(nothing); err != nil {
		return err
	}
	// A mounted device cannot be opened exclusively.
	for until := time.Now().Add(patience); ; {
		fd, err := unix.Open("/dev/"+v.device, unix.O_RDWR|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if err == nil {
			return unix.Close(fd)
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(until) {
			return fmt.Errorf("unmount %s: somebody has files of it open: %w", v.device, err)
		}
		time.Sleep(time.Millisecond)
	}
}

// Fail makes the file system find itself broken, as after a failed write of its own log: an ext4 is read-only from then on.
func (v *Volume) Fail() error {
	if v.kind != Ext4 {
		return fmt.Errorf("a file system of kind %s has no such switch", v.kind)
	}
	if err := os.WriteFile(filepath.Join("/sys/fs/ext4", v.device, "trigger_fs_error"), []byte("1"), 0); err != nil {
		return fmt.Errorf("break file system: %w", err)
	}
	return nil
}

// Close ends the file system; nothing of it is left.
func (v *Volume) Close() error {
	return errors.Join(v.unmount(), unix.Close(v.root), v.loop.Close())
}
