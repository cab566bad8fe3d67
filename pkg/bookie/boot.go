package bookie

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelRun names what keeps unsynced writes of a directory: this run of the kernel, and, where the kernel tells, this
// time that the directory's file system is mounted. It is the same in every mount namespace and at every path, since a
// service that is started again in a sandbox or container finds what it wrote, and would see another id of the mount.
func kernelRun(dir string) (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot id: %w", err)
	}
	id := strings.TrimSpace(string(b))
	if m, ok := mounted(dir); ok {
		id += "/" + strconv.FormatUint(m, 16)
	}
	return id, nil
}

// mounted returns a number that is another each time that the file system with the directory is mounted anew: the
// kernel makes a directory in sysfs when it mounts an ext4 or XFS, and never uses the number of an inode there twice. It
// reports false for other file systems.
func mounted(dir string) (uint64, bool) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, false
	}
	device, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return 0, false
	}
	for _, kind := range []string{"ext4", "xfs"} {
		if err := unix.Stat(filepath.Join("/sys/fs", kind, filepath.Base(device)), &st); err == nil {
			return st.Ino, true
		}
	}
	return 0, false
}
