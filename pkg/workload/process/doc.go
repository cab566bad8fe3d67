// Package process runs a cluster of real processes on the loopback interface: etcd, bookies and brokers, as built. It is
// for demonstrations and tests, which kill, freeze and restart them.
//
//	c, err := process.Start(ctx, process.Config{Programs: "bin", Dir: dir, Bookies: 4, Brokers: 2})
//	if err != nil {
//		return err
//	}
//	defer c.Close()
//	…
//	c.Brokers[0].Kill()                 // kill -9
//	err = c.Brokers[0].Start(ctx)       // the same again; returns when ready
//
// A [Group] does the same with programs of others, such as another broker's to compare with.
//
// Each process logs to a file of its own under Dir/logs, kept over restarts. A [Cluster] signals the processes that it
// started and no others. It leaves none behind: Close kills what runs, and on Linux the kernel kills the rest should the
// program that holds the cluster die without closing it.
package process
