package broker

// sendWindow is how many bytes of frames may wait in a consumer's stream, about.
const sendWindow = 8 << 20

// entryRoom is what an entry that waits takes beside its frame, about.
const entryRoom = 128

// credit turns a client's permits, which count messages, into permits for dispatch that keep the bytes waiting in the
// stream bounded: a slow client with large messages and generous permits must not fill the broker's memory. It learns
// the size of messages as they go by, and before it has, allows a few. Where it guessed too low, because larger messages
// followed small ones, full says that what was allowed has to be taken back.
type credit struct {
	held    int64   // permits of the client not passed on
	ahead   int64   // permits passed on and not used
	waiting int64   // bytes in the stream
	average float64 // bytes a message; 0 is unknown
}

// firstPermits is how many messages are allowed before the size of any is known.
const firstPermits = 4

// add takes permits of the client and returns how many to pass on.
func (c *credit) add(n uint32) uint32 {
	c.held += int64(n)
	return c.grant()
}

// queued says that an entry of messages and bytes went into the stream.
func (c *credit) queued(messages, bytes int64) {
	c.ahead -= messages
	c.waiting += bytes
	if size := float64(bytes) / float64(max(messages, 1)); c.average == 0 {
		c.average = max(size, 1)
	} else {
		c.average += (max(size, 1) - c.average) / 16
	}
}

// sent says that bytes left the stream, and returns how many permits to pass on.
func (c *credit) sent(bytes int64) uint32 {
	c.waiting -= bytes
	return c.grant()
}

// full says that more waits in the stream than should.
func (c *credit) full() bool { return c.waiting > sendWindow }

// withdrawn says that n permits were taken back from dispatch, and returns how many to pass on all the same.
func (c *credit) withdrawn(n uint64) uint32 {
	c.held += int64(n)
	c.ahead -= int64(n)
	return c.grant()
}

func (c *credit) grant() uint32 {
	room := int64(firstPermits)
	if c.average > 0 {
		room = int64(float64(sendWindow-c.waiting) / c.average)
		if c.waiting == 0 {
			room = max(room, 1) // a message larger than the window passes alone
		}
	}
	n := min(c.held, room-c.ahead)
	if n <= 0 {
		return 0
	}
	c.held -= n
	c.ahead += n
	return uint32(n)
}
