// Package rawdisk measures what a disk can do at best for a broker that syncs before it acknowledges: the limit that other
// figures are fractions of.
//
//	d, err := rawdisk.Open(ctx, rawdisk.Config{Dir: dir, Files: 3})
//	if err != nil {
//		return err
//	}
//	defer d.Close()
//	groups, err := d.Write(ctx, 3, 1<<20, 5*time.Second)    // three logs, groups of 1 MiB
//	single, err := d.Write(ctx, 1, 4<<10, 5*time.Second)    // one log, one small message at a time
//
// Write may be called again and again, so that it can take turns with what it is compared to. A [Probe] is for beside a
// load: a small write and sync every few milliseconds, which tells how long a bare sync takes on a disk that is busy.
//
// Each writer has a file of its own and does what a log does: it writes a group at the end of what it wrote before, through
// the page cache, and syncs it with fdatasync, one at a time. Files are written once before anything is measured, and used
// again from their beginning when their end is reached, as recycled segments are: a sync then changes no metadata. New files,
// which grow, measure the file system's journal and the device's allocation too, which virtual disks have: they are the limit
// of a log that recycles nothing yet. Writing around the cache is not what the broker does.
package rawdisk
