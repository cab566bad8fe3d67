package sim

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Fault is a kind of fault.
type Fault string

// The kinds of faults. In brackets, the cells of the matrix.
const (
	BrokerCrash  Fault = "broker-crash"   // kill -9 and a new process [F1]
	BrokerLeave  Fault = "broker-leave"   // it hands over, and a new process comes
	BrokerPause  Fault = "broker-pause"   // STOP, CONT: a zombie [F4]
	BrokerCut    Fault = "broker-cut"     // from etcd, the data path stays up [F9]
	BookieKill   Fault = "bookie-kill"    // kill -9, page cache kept [F2]
	PowerCut     Fault = "power-cut"      // of one bookie [F3]
	BlackOut     Fault = "black-out"      // of all bookies at once [F3]
	BookiePause  Fault = "bookie-pause"   // STOP, CONT [F5]
	BookieCut    Fault = "bookie-cut"     // from etcd
	Partition    Fault = "partition"      // broker from bookie, both ways [F7]
	OneWay       Fault = "one-way"        // [F8]
	Reset        Fault = "reset"          // connections break [F12]
	EtcdAway     Fault = "etcd-away"      // no leader [F10, F11]
	DiskFull     Fault = "disk-full"      // of one bookie, for a while [F16]
	Scarce       Fault = "scarce"         // too few bookies take new ledgers, as if the others' disks were full [F16]
	Wipe         Fault = "wipe"           // a disk is gone for good, fewer than Qa of them
	SyncError    Fault = "sync-error"     // a sync fails once, and what it was to bring to the disk is lost [F13]
	WriteError   Fault = "write-error"    // a write fails once [F13]
	BitRot       Fault = "bit-rot"        // bytes of a segment are changed, on fewer than Qa disks [F14]
	Provoke      Fault = "provoke"        // connections break and adds are held up just when a recovery begins [F8, F12]
	ClockStep    Fault = "clock-step"     // a machine's clock is wrong, for processes that start from now on [F18]
	PowerCutStep Fault = "power-cut-step" // power goes in the midst of what a bookie does to its disk [F3]
	Listings     Fault = "listings"       // what bookies' collectors read of the metadata fails, or leaves out what is there [F23]
)

var allFaults = []Fault{
	BrokerCrash, BrokerLeave, BrokerPause, BrokerCut, BookieKill, PowerCut, BlackOut, BookiePause, BookieCut, Partition, OneWay, Reset, EtcdAway,
	DiskFull, Scarce, Wipe, PowerCutStep, SyncError, WriteError, BitRot, Provoke, ClockStep, Listings,
}

const diskSize = 512 << 20

// pickFaults draws a swarm: a few kinds, so that runs differ.
func pickFaults(k *kernel) []Fault {
	var some []Fault
	n := 1 + k.rng.IntN(5)
	for _, i := range k.rng.Perm(len(allFaults))[:n] {
		some = append(some, allFaults[i])
	}
	return some
}

func (w *world) mischief() {
	if w.healed {
		return
	}
	pause := w.between(50*time.Millisecond, 2500*time.Millisecond)
	pause = calmer(w, pause, 10)
	w.after(pause, w.mischief)
	f := pick(w.kernel, w.faults)
	span := w.between(20*time.Millisecond, 3*time.Second)
	if w.chance(6) {
		span = w.between(3*time.Second, 9*time.Second)
	}
	w.inject(f, span)
}

// unlessHealed has f run in a while, if faults are on still.
func (w *world) unlessHealed(d time.Duration, f func()) {
	w.after(d, func() {
		if !w.healed {
			f()
		}
	})
}

func (w *world) inject(f Fault, span time.Duration) {
	br, k := pick(w.kernel, w.brokers), pick(w.kernel, w.bookies)
	w.trace("sim", subject{}, "%s: %s %s for %v", f, br.name, k.name, span)
	switch f { //nolint:exhaustive // those of disks that came later are injected elsewhere
	case BrokerCrash:
		br.crash("killed")
		w.unlessHealed(span, func() {
			if !br.up {
				br.boot()
			}
		})
	case BrokerLeave:
		br.leave(span)
	case BrokerPause:
		br.pause()
		w.unlessHealed(span*2, br.resume)
	case BrokerCut:
		br.etcd.cut = true
		w.unlessHealed(span*2, func() { br.etcd.cut = false })
	case BookieKill:
		k.crash("killed")
		w.restart(k, span)
	case PowerCut:
		k.powerCut()
		w.restart(k, span)
	case PowerCutStep:
		k.mem.CutPowerAfter(w.rng.IntN(40))
		w.unlessHealed(span, func() { // unless it has met the cut by itself
			k.powerCut()
			w.restart(k, span/4)
		})
	case BlackOut:
		for _, k := range w.bookies {
			k.powerCut()
			w.restart(k, w.between(0, span))
		}
	case BookiePause:
		k.pause()
		w.unlessHealed(span, k.resume)
	case BookieCut:
		k.etcd.cut = true
		w.unlessHealed(span, func() { k.etcd.cut = false })
	case Partition:
		w.block(br.name, k.name, span)
		w.block(k.name, br.name, span)
	case OneWay:
		if w.chance(2) {
			w.block(br.name, k.name, span)
		} else {
			w.block(k.name, br.name, span)
		}
	case Reset:
		for _, l := range br.client.opened {
			if w.chance(2) {
				l.reset(w.net.delay())
			}
		}
	case EtcdAway:
		w.etcd.goAway()
		w.unlessHealed(span, w.etcd.back)
	case DiskFull:
		if !k.powerIsOff() {
			k.fill(uint64(w.rng.IntN(128<<10)), span)
		}
	case Scarce:
		w.scarce = w.now + span + time.Second
		br.leave(span) // whoever comes next has to open ledgers
	case SyncError:
		k.errors = append(k.errors, k.disk.Add(vfs.Rule{Op: vfs.OpSync, After: w.rng.IntN(30), Times: 1, Err: syscall.EIO, LoseUnsynced: true}))
	case WriteError:
		k.errors = append(k.errors, k.disk.Add(vfs.Rule{Op: vfs.OpWrite, After: w.rng.IntN(30), Times: 1, Err: syscall.EIO}))
	case BitRot:
		if !k.rotten && w.harmed >= w.replication.AckQuorum-1 {
			return
		}
		if !k.rotten {
			w.harmed++
			k.rotten = true
		}
		k.rot()
	case ClockStep:
		p := &br.process
		if w.chance(2) {
			p = &k.process
		}
		p.skew = pick(w.kernel, []time.Duration{0, time.Hour, 24 * time.Hour, -time.Hour, -24 * time.Hour, w.between(-10*time.Second, 10*time.Second)})
		w.trace("sim", subject{}, "the clock of %s is off by %v", p.name, p.skew)
	case Listings:
		k.lie = refused + lie(w.rng.IntN(int(liesEnd-refused)))
		w.unlessHealed(4*span, func() { k.lie = truthful })
	case Provoke: // when there is a recovery
	case Wipe:
		if w.harmed < w.replication.AckQuorum-1 || k.rotten {
			if !k.rotten {
				w.harmed++
			}
			k.wipe()
			w.restart(k, span)
		}
	}
}

// provoke makes trouble at the moment when a recovery has raised its term: requests of the new owner end with their
// connections, and what the others have sent is held up.
func (w *world) provoke(by *broker) {
	if w.healed || !slices.Contains(w.faults, Provoke) || !w.chance(2) {
		return
	}
	for _, k := range w.bookies {
		l := by.client.link(k.uuid, forRecoveries)
		if w.chance(2) {
			w.unlessHealed(w.between(0, 4*time.Millisecond), func() { l.reset(0) })
		}
		for _, b := range w.brokers {
			if b != by && w.chance(2) {
				w.block(b.name, k.name, w.between(5*time.Millisecond, 400*time.Millisecond))
			}
		}
		if w.chance(4) {
			w.unlessHealed(w.between(time.Millisecond, 10*time.Millisecond), func() { w.block(k.name, by.name, w.between(10*time.Millisecond, 300*time.Millisecond)) })
		}
	}
}

// provokeTrim kills a broker at the moment when it has trimmed: what it knew of acknowledgements, and is on no disk, is lost.
func (w *world) provokeTrim(by *broker) {
	if by == nil || w.healed || !slices.Contains(w.faults, BrokerCrash) || !w.chance(6) {
		return
	}
	w.after(0, func() { by.crash("it has just trimmed") })
	w.unlessHealed(w.between(20*time.Millisecond, time.Second), func() {
		if !by.up {
			by.boot()
		}
	})
}

// provokeReads breaks connections, more than once, while a log is about to be read from its beginning: some of it cannot be read
// then, for the moment.
func (b *broker) provokeReads() {
	w := b.w
	if w.healed || !slices.Contains(w.faults, Provoke) && !slices.Contains(w.faults, Reset) || w.chance(2) {
		return
	}
	for range 1 + w.rng.IntN(20) {
		w.unlessHealed(w.between(0, 60*time.Millisecond), func() {
			for _, k := range w.bookies {
				if !w.chance(4) {
					b.client.link(k.uuid, forReads).reset(0)
				}
			}
		})
	}
}

// rot damages a few bytes of a segment; what is written there later is whole.
func (b *bookieProcess) rot() {
	names, err := b.mem.List(storeDir)
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".seg") })
	if err != nil || len(names) == 0 {
		return
	}
	at := storeDir + "/" + pick(b.w.kernel, names)
	info, err := b.mem.Stat(at)
	if err != nil || info.Size == 0 {
		return
	}
	var flips []vfs.Flip
	offset := b.w.rng.Int64N(min(info.Size, 24<<10))
	for i := range int64(1 + b.w.rng.IntN(8)) {
		flips = append(flips, vfs.Flip{Offset: offset + i, Mask: byte(1 + b.w.rng.IntN(255))})
	}
	if err := b.mem.Rot(at, flips); err != nil {
		panic(err)
	}
}

func (w *world) block(from, to string, span time.Duration) {
	w.net.block(from, to)
	w.unlessHealed(span, func() { w.net.open(from, to) })
}

// restart starts a bookie after a while, unless it runs by then.
func (w *world) restart(k *bookieProcess, after time.Duration) {
	w.unlessHealed(after, func() {
		if !k.up {
			k.bootAgain()
		}
	})
}

func (b *bookieProcess) powerIsOff() bool {
	_, err := b.mem.Stat("/")
	return errors.Is(err, vfs.ErrPowerCut)
}

// bootAgain boots, and again if the power goes meanwhile.
func (b *bookieProcess) bootAgain() {
	b.boot()
	if !b.up && !b.w.failed() {
		if b.powerIsOff() {
			b.mem.Crash(b.w.rng)
		}
		b.w.after(b.w.between(10*time.Millisecond, 500*time.Millisecond), func() {
			if !b.up {
				b.bootAgain()
			}
		})
	}
}

// healFaults ends every fault.
func (w *world) healFaults() {
	for _, br := range w.brokers {
		br.etcd.cut = false
		br.resume()
		if !br.up {
			br.boot()
		}
		for _, k := range w.bookies {
			w.net.open(br.name, k.name)
			w.net.open(k.name, br.name)
		}
		for _, o := range w.brokers {
			w.net.open(br.name, o.name)
		}
	}
	for _, k := range w.bookies {
		k.etcd.cut = false
		k.lie = truthful
		k.makeRoom()
		k.ownDisk()
		k.remount()
		k.endErrors()
		if k.powerIsOff() {
			k.powerCut()
		}
		k.mem.CutPowerAfter(-1)
		k.resume()
		if !k.up {
			k.bootAgain()
		}
	}
	w.healRepairers()
	w.etcd.back()
}
