//go:build linux

package hosts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Trouble is what a wire does to the frames of both directions. The zero Trouble is none.
type Trouble struct {
	// Loss and Repeat are shares of the frames, from 0 to 1, that are lost, or come twice.
	Loss, Repeat float64
	// Delay of each frame, and up to Jitter more; frames keep their order.
	Delay, Jitter time.Duration
	// Reset answers every TCP segment with a reset, to both ends, in its place.
	Reset bool
}

// Wire is what a host hangs on instead of a cable of the kernel: two devices, between which this program carries frames.
// The kernel's own means of delaying packets are not on every machine.
type Wire struct {
	mu      sync.Mutex
	trouble Trouble
	rng     *rand.Rand
}

// Wire puts a host on a wire. Call it before the host is placed.
func (n *Network) Wire(name string, seed uint64) *Wire {
	w := &Wire{rng: rand.New(rand.NewPCG(seed, 0))} //nolint:gosec // for faults
	n.wires[name] = w
	return w
}

// Set changes the trouble.
func (w *Wire) Set(t Trouble) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trouble = t
}

// lay makes the wire's two ends, eth0 of a namespace and a port of this one, and carries frames until the test has ended.
func (n *Network) lay(w *Wire, space, port string) {
	n.Helper()
	there, err := tapIn("/run/netns/"+space, "eth0")
	if err != nil {
		n.Fatal(err)
	}
	here, err := tap(port)
	if err != nil {
		_ = there.Close()
		n.Fatal(err)
	}
	var carrying sync.WaitGroup
	carrying.Go(func() { w.carry(there, here) })
	carrying.Go(func() { w.carry(here, there) })
	n.Cleanup(func() {
		_ = there.Close()
		_ = here.Close()
		carrying.Wait()
	})
}

// tapIn makes a device in another network namespace.
func tapIn(space, name string) (f *os.File, err error) {
	err = within(space, func() error {
		f, err = tap(name)
		return err
	})
	return f, err
}

// within calls f on a thread that is in another network namespace. The thread ends with it.
func within(space string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
			ns, err := os.Open(space)
			if err != nil {
				return fmt.Errorf("open network namespace: %w", err)
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("enter network namespace: %w", err)
			}
			return f()
		}()
	}()
	return <-done
}

func tap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make device %s: %w", name, err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make device %s: %w", name, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}

const (
	maxFrame  = 64 << 10
	maxUnder  = 10_000 // frames on their way in one direction; more are lost
	macLength = 6
)

type parcel struct {
	due   time.Time
	frame []byte
}

// carry moves frames from one end to the other until either is closed.
func (w *Wire) carry(from, to *os.File) {
	under := make(chan parcel, maxUnder)
	var delivering sync.WaitGroup
	delivering.Go(func() {
		for p := range under {
			if d := time.Until(p.due); d > 0 {
				time.Sleep(d)
			}
			_, _ = to.Write(p.frame) // a device that is down loses it
		}
	})
	defer delivering.Wait()
	defer close(under)
	for buffer := make([]byte, maxFrame); ; {
		n, err := from.Read(buffer)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			if errors.Is(err, unix.EIO) { // the device is not up yet
				time.Sleep(time.Millisecond)
				continue
			}
			return
		}
		t, copies, delay := w.fate()
		frame := append([]byte(nil), buffer[:n]...)
		if back, forth := resets(frame); t.Reset && back != nil {
			_, _ = from.Write(back)
			frame = forth
		}
		for range copies {
			select {
			case under <- parcel{time.Now().Add(delay), frame}:
			default:
			}
		}
	}
}

// fate draws what becomes of a frame.
func (w *Wire) fate() (t Trouble, copies int, delay time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t, copies, delay = w.trouble, 1, w.trouble.Delay
	if t.Jitter > 0 {
		delay += time.Duration(w.rng.Int64N(int64(t.Jitter)))
	}
	switch {
	case t.Loss > 0 && w.rng.Float64() < t.Loss:
		copies = 0
	case t.Repeat > 0 && w.rng.Float64() < t.Repeat:
		copies = 2
	}
	return t, copies, delay
}

// Where things are in a frame of Ethernet, IPv4 and TCP, and TCP's flags.
const (
	ethernet  = 14
	ipLength  = 20 // of what is made here
	tcpLength = 20
	flagFin   = 1
	flagSyn   = 2
	flagReset = 4
	flagAck   = 16
)

// resets makes, of a TCP segment, the resets that end its connection: one back to its sender and one on to its receiver.
// They are nil for anything else, and for a reset.
func resets(frame []byte) (back, forth []byte) {
	if len(frame) < ethernet+ipLength || binary.BigEndian.Uint16(frame[12:]) != unix.ETH_P_IP {
		return nil, nil
	}
	ip := frame[ethernet:]
	header := int(ip[0]&15) * 4
	total := int(binary.BigEndian.Uint16(ip[2:]))
	if ip[9] != unix.IPPROTO_TCP || header < ipLength || total < header+tcpLength || len(ip) < total {
		return nil, nil
	}
	tcp := ip[header:total]
	offset, flags := int(tcp[12]>>4)*4, tcp[13]
	if flags&flagReset != 0 || len(tcp) < offset {
		return nil, nil
	}
	seq, ack := binary.BigEndian.Uint32(tcp[4:]), binary.BigEndian.Uint32(tcp[8:])
	next := seq + uint32(len(tcp)-offset)
	if flags&(flagSyn|flagFin) != 0 {
		next++
	}
	forth = segment(frame[:macLength], frame[macLength:2*macLength], ip[12:16], ip[16:20], tcp[0:2], tcp[2:4], seq, ack, flagReset|flagAck)
	if flags&flagAck == 0 {
		ack = 0
	}
	back = segment(frame[macLength:2*macLength], frame[:macLength], ip[16:20], ip[12:16], tcp[2:4], tcp[0:2], ack, next, flagReset|flagAck)
	return back, forth
}

// segment is a frame with a TCP segment that holds no data.
func segment(toMAC, fromMAC, from, to, fromPort, toPort []byte, seq, ack uint32, flags byte) []byte {
	f := make([]byte, 0, ethernet+ipLength+tcpLength)
	f = append(append(f, toMAC...), fromMAC...)
	f = binary.BigEndian.AppendUint16(f, unix.ETH_P_IP)
	f = append(f, 0x45, 0, 0, ipLength+tcpLength, 0, 0, 0x40, 0, 64, unix.IPPROTO_TCP, 0, 0)
	f = append(append(f, from...), to...)
	f = append(append(f, fromPort...), toPort...)
	f = binary.BigEndian.AppendUint32(f, seq)
	f = binary.BigEndian.AppendUint32(f, ack)
	f = append(f, tcpLength/4<<4, flags, 0, 0, 0, 0, 0, 0)
	ip, tcp := f[ethernet:ethernet+ipLength], f[ethernet+ipLength:]
	binary.BigEndian.PutUint16(ip[10:], checksum(0, ip))
	pseudo := append(append([]byte(nil), ip[12:20]...), 0, unix.IPPROTO_TCP, 0, tcpLength)
	binary.BigEndian.PutUint16(tcp[16:], checksum(sum(0, pseudo), tcp))
	return f
}

func sum(s uint32, b []byte) uint32 {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	return s
}

// checksum is the Internet's.
func checksum(s uint32, b []byte) uint16 {
	s = sum(s, b)
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}
