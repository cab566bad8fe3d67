// Package vfs is the seam between Penstock's storage and the disk: positioned writes, explicit data and
// directory syncs, renames, preallocation, space, one lock. Three implementations stand behind it: [OS] for a
// real Linux file system, [Mem] with the losses of a power cut, and [Faulty], which wraps either and fails it
// by rule.
//
// The loop of its callers:
//
//	f, err := fs.Create("dir/000001.seg") // fails if it exists
//	err = f.Allocate(0, size)             // ENOSPC now, not later
//	_, err = f.WriteAt(header, 0)
//	err = f.Sync()                        // data, size and blocks are on disk
//	err = fs.SyncDir("dir")               // and so is the name
//	for {
//		_, err = f.WriteAt(batch, off)
//		err = f.Datasync() // may overlap with later WriteAt and Datasync calls
//	}
//
// What is promised: bytes are durable once a Datasync or Sync that began after their WriteAt returned has
// succeeded; a name (created, renamed, removed) is durable once SyncDir of its directory has succeeded.
// Nothing else is promised, and Mem takes away everything that is not: syncing a file does not make its name
// durable, and unsynced bytes may survive in any combination of 512-byte sectors.
//
// A failed Datasync or Sync means that the bytes may be lost although a later call succeeds. It must not be
// retried; the caller's store is over.
package vfs
