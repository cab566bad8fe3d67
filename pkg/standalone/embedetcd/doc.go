// Package embedetcd runs one etcd member inside the process, for `penstock standalone` and for tests.
//
//	etcd, err := embedetcd.Start(ctx, embedetcd.Config{Dir: dir})
//	if err != nil {
//		return err
//	}
//	defer etcd.Close()
//	store := meta.New(etcd.Client(), "demo", log)
//
// It is the ordinary server with small settings: ports chosen by the system unless asked for, short ticks
// so that a single member elects itself at once, a small quota, frequent snapshots and compaction by
// revision so that an idle cluster stays small. A production cluster runs etcd on its own.
package embedetcd
