// Package volume makes real file systems for tests, each on a loop device of its own, whose power can be cut: what was
// not synced is gone then, as far as the file system goes. It needs root, Linux, and mkfs of the file system.
//
//	v, err := volume.New(volume.XFS, dir, 400<<20) // dir takes the image, which has no name there
//	defer v.Close()
//	write(v.Dir())
//	err = v.Cut(volume.DropLog) // every write fails from here on
//	// end the processes that have files open there
//	err = v.Remount() // the file system recovers from its log; v.Dir() is the same
//
// A volume is mounted nowhere: its directory is reached through a descriptor of this process, under a path of /proc that
// other processes can use as well. So no other mount namespace comes to hold it, and nothing is left behind, neither a
// mount nor a loop device nor an image, however the process ends. Mount points in a temporary directory were
// the alternative: a test that panics leaves them, and a network namespace that is made meanwhile keeps a copy of them,
// with which the file system goes on after it seemed unmounted.
//
// The loop device has no cache to lose: a cut loses what the file system had not handed to the device. Whether it
// asks a device to empty its cache is the kernel's business, and not tested here.
package volume
