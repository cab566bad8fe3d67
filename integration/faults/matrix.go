//go:build linux

package faults

import (
	"time"

	"github.com/penstock-mq/penstock/integration/hosts"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// cell is one fault, under which all workloads run.
type cell struct {
	fault, name string
	what        string
	// designed is the design's goal, and why it is not the one here, where that is weaker.
	designed, weaker string
	goal             string        // for availability; beside the verdict
	stall            time.Duration // the goal is met if publishing stands still for no longer; 0: the fault measures it itself
	prepare          func(*site, *process.Config)
	strike           func(*site) error // brings the fault about once, and ends it; nil: not built
	etcds            int
	root             bool // needs it
	short            bool // is one of the few that are always run
	why              string
}

// matrix is what is run, in this order. Names are for -run.
var matrix = []cell{
	{fault: "F1", name: "kill-owner", what: "kill -9 of the broker that serves a topic", goal: "stall < 1 s", stall: time.Second, strike: killOwner, short: true},
	{fault: "F1", name: "kill-brokers", what: "kill -9 of all brokers at once", goal: "recovers", strike: killBrokers},
	{fault: "F2", name: "kill-bookie", what: "kill -9 of a bookie that is written to", goal: "stall < 1 s", stall: time.Second, strike: killBookies(1), short: true},
	{fault: "F2", name: "kill-two", what: "kill -9 of two bookies of an ensemble", goal: "recovers", strike: killBookies(2)},
	{fault: "F2", name: "kill-bookies", what: "kill -9 of all bookies at once", goal: "recovers", strike: killBookies(bookies)},
	{fault: "F2", name: "kill-all", what: "kill -9 of every process at once", goal: "recovers", strike: killEverything},
	{fault: "F3", name: "power-one", what: "power cut of a bookie (ext4 shut down)", goal: "stall < 1 s", stall: time.Second, prepare: onVolumes(640), strike: cutPower(1), root: true},
	{fault: "F3", name: "power-quorum", what: "power cut of two bookies of an ensemble", goal: "recovers", prepare: onVolumes(640), strike: cutPower(2), root: true},
	{fault: "F3", name: "power-all", what: "power cut of all bookies at once", goal: "recovers", prepare: onVolumes(640), strike: cutPower(bookies), root: true},
	{fault: "F4", name: "stop-owner", what: "the owner is stopped for longer than its lease, and goes on", goal: "stall < lease + 2 s", stall: leaseTTL + 2*time.Second, strike: stopOwner, short: true},
	{fault: "F5", name: "stop-bookie", what: "a bookie is stopped for 5 s and more, and goes on", goal: "stall < 1 s", stall: time.Second, strike: stopBookie},
	{fault: "F6", name: "slow-sync", designed: "p99 within 3 times the baseline", weaker: "a share of the baseline would need one that holds still, and the machines that run this do not", what: "each fdatasync of a bookie takes 200 ms longer (strace)", goal: "stall < 1 s", stall: time.Second, strike: slowBookieSync, root: true},
	{fault: "F6", name: "slow-disk", designed: "p99 within 3 times the baseline", weaker: "a share of the baseline would need one that holds still, and the machines that run this do not", what: "a bookie's disk takes 20 writes a second (blkio)", goal: "stall < 1 s", stall: time.Second, prepare: onVolumes(640), strike: slowDisk, root: true},
	{fault: "F7", name: "cut-bookie", what: "the owner and a bookie do not reach each other", goal: "stall < 1 s", stall: time.Second, prepare: onNetwork, strike: cutOwnerFromBookie, root: true},
	{fault: "F8", name: "mute-bookie", what: "a bookie's answers to the owner get lost", goal: "stall < 15 s", stall: 15 * time.Second, prepare: onNetwork, strike: muteBookie, root: true},
	{fault: "F8", name: "deaf-bookie", what: "the owner's requests to a bookie get lost", goal: "stall < 15 s", stall: 15 * time.Second, prepare: onNetwork, strike: deafBookie, root: true},
	{fault: "F8", name: "mute-owner", what: "what the owner sends reaches etcd alone", goal: "stall < 15 s", stall: 15 * time.Second, prepare: onNetwork, strike: muteOwner, root: true},
	{fault: "F9", name: "cut-etcd", what: "the owner does not reach etcd, and everyone else", goal: "stall < lease + 2 s", stall: leaseTTL + 2*time.Second, prepare: onNetwork, strike: cutOwnerFromEtcd, root: true},
	{fault: "F10", name: "kill-leader", what: "kill -9 of etcd's leader", goal: "stall < 1 s", stall: time.Second, prepare: withLongLeases, strike: killEtcdLeader, etcds: 3},
	{fault: "F10", name: "stop-leader", what: "etcd's leader is stopped for 5 s", goal: "stall < 1 s", stall: time.Second, prepare: withLongLeases, strike: stopEtcdLeader, etcds: 3},
	{fault: "F10", name: "slow-leader", what: "each fdatasync of etcd's leader takes 500 ms longer (strace)", goal: "stall < 1 s", stall: time.Second, prepare: withLongLeases, strike: slowEtcdLeader, etcds: 3, root: true},
	{fault: "F11", name: "lose-etcd", what: "two etcds of three are gone for 8 s", goal: "what is open goes on, stall < 2 s", strike: loseEtcd, etcds: 3},
	{fault: "F12", name: "loss", what: "30 % of all frames are lost", goal: "degraded", prepare: onWires, strike: trouble(hosts.Trouble{Loss: 0.3}, true, 4*time.Second), root: true},
	{fault: "F12", name: "delay", what: "frames come 20 to 60 ms later", goal: "degraded", prepare: onWires, strike: trouble(hosts.Trouble{Delay: 20 * time.Millisecond, Jitter: 40 * time.Millisecond}, true, 5*time.Second), root: true},
	{fault: "F12", name: "repeat", what: "30 % of all frames come twice", goal: "degraded", prepare: onWires, strike: trouble(hosts.Trouble{Repeat: 0.3}, true, 5*time.Second), root: true},
	{fault: "F12", name: "reset", what: "all TCP connections of the owner and of a bookie are reset, for 200 ms", goal: "degraded", prepare: onWires, strike: trouble(hosts.Trouble{Reset: true}, false, 200*time.Millisecond), root: true},
	{fault: "F13", name: "sync-once", what: "one fdatasync of a bookie fails (strace, EIO)", goal: "the bookie ends with an error", strike: failSync(":when=1"), root: true},
	{fault: "F13", name: "sync-always", what: "every fdatasync of a bookie fails", goal: "the bookie ends with an error", strike: failSync(""), root: true},
	{fault: "F14", name: "rot-flip", designed: "repaired by itself", weaker: "what is judged is that nothing is lost or served wrong; a cell is over before a scrub has gone over a disk", what: "bytes of one bookie's newest file are flipped", goal: "served by others", prepare: onDirectories, strike: damage(flip)},
	{fault: "F14", name: "rot-zero", designed: "repaired by itself", weaker: "what is judged is that nothing is lost or served wrong; a cell is over before a scrub has gone over a disk", what: "a page of one bookie's newest file is zeros", goal: "served by others", prepare: onDirectories, strike: damage(zero)},
	{fault: "F14", name: "rot-truncate", designed: "repaired by itself", weaker: "what is judged is that nothing is lost or served wrong; a cell is over before a scrub has gone over a disk", what: "one bookie's newest file ends in its middle", goal: "served by others", prepare: onDirectories, strike: damage(truncate)},
	{fault: "F15", name: "wiped-disk", what: "a bookie is started on an empty disk", goal: "refused", prepare: onDirectories, strike: wipe},
	{fault: "F15", name: "old-disk", what: "a bookie is started on an old copy of its disk", goal: "refused", prepare: onDirectories, strike: restoreOld},
	{fault: "F16", name: "full-one", what: "a bookie's disk is full", goal: "stall < 1 s", stall: time.Second, prepare: onVolumes(256, "--segment-mib", "4", "--low-watermark", "0.9", "--high-watermark", "0.95"), strike: fillDisks(1), root: true},
	{fault: "F16", name: "full-all", what: "all disks are full", goal: "writable again by themselves", prepare: onVolumes(256, "--segment-mib", "4", "--low-watermark", "0.9", "--high-watermark", "0.95"), strike: fillDisks(bookies), root: true},
	{fault: "F17", name: "read-only", what: "a bookie's file system becomes read-only", goal: "the bookie ends with an error", prepare: onVolumes(640), strike: readOnly, root: true},
	{fault: "F18", name: "clock-step", what: "the clocks of the owner and a bookie step by ±1 h or ±1 d", goal: "stall < 1 s", stall: time.Second, prepare: onOwnClocks, strike: stepClocks},
	{fault: "F18", name: "clock-strobe", what: "all clocks jump within ±1 d, ten times a second", goal: "stall < 1 s", stall: time.Second, prepare: onOwnClocks, strike: strobeClocks},
	{fault: "F19", name: "memory", designed: "resident memory within the limit, and the p99 of others within twice", weaker: "the others' p99 is not compared, for want of a baseline that holds still; their stall and delay are in the rows above", what: "256 MiB a process, a consumer that takes nothing, a bookie that is stopped, large messages", goal: "resident memory within the limit", prepare: inLittleMemory, strike: starveMemory, root: true},
	{fault: "F20", name: "files", what: "the owner and a bookie can open no more files", goal: "stall < 1 s", stall: time.Second, strike: starveFiles, root: true},
	{fault: "F20", name: "cpu", what: "all brokers and bookies share a fifth of a core", goal: "degraded", strike: starveCPU, root: true},
	{fault: "F20", name: "overload", what: "far more is published than can be stored", goal: "typed errors in time", strike: overload},
	{fault: "F21", name: "decommission", what: "a bookie is drained under load", why: "decommission is not built"},
	{fault: "F22", name: "restart", what: "rolling restart of the same version, in good order", goal: "stall < 1 s", stall: time.Second, strike: restart, short: true},
	{fault: "F22", name: "upgrade", what: "rolling upgrade and downgrade", why: "there is one version"},
	{fault: "F23", name: "listing", what: "bookies' connections to etcd break while they look for what to delete", goal: "stall < 1 s", stall: time.Second, prepare: behindLines, strike: breakListings},
	{fault: "F24", name: "swarm", what: "three of: the owner, two bookies, etcd's leader are killed or stopped at once", goal: "recovers", strike: swarm, etcds: 3},
}

// notBuilt are workloads that will run in every cell.
var notBuilt = []struct{ name, title string }{
	{"W3", "key-shared with single acknowledgements"},
	{"W4", "transactions with aborts"},
}
