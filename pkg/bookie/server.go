package bookie

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/budget"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Storage is what the data path asks of a store; [*ledgerstore.Store] is one, whose comments say what each method
// promises.
type Storage interface {
	Admission(ledger entry.LedgerID) (known bool, generation uint64)
	Add(a *ledgerstore.Add)
	Fence(r bookiewire.Fence, done func(bookiewire.FenceReply, error))
	Read(ctx context.Context, r bookiewire.Read) (bookiewire.ReadReply, error)
	WriteLAC(r bookiewire.WriteLAC, done func(error))
	WaitLAC(ctx context.Context, r bookiewire.WaitLAC) (bookiewire.WaitLACReply, error)
}

// Ledgers reads a ledger's record, linearizably; [*meta.Store] is one.
type Ledgers interface {
	GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error)
}

// Identity is who a bookie is.
type Identity struct {
	Cluster entry.UUID
	Storage entry.StorageUUID
	ID      string
}

// ServerConfig bounds a [Server]. Zero values become the defaults.
type ServerConfig struct {
	// InFlightBytes is the budget of adds that are read and not yet answered. When it is used up, connections are
	// read no further. Default 128 MiB.
	InFlightBytes int64
	// ReadBytes is the budget of answers to reads that are not yet written; one connection may have a quarter of it, so
	// that a peer that does not read its answers does not stop the reads of others. The reads of recoveries have as much
	// for themselves. Default 64 MiB.
	ReadBytes int64
	// FrameBytes is the budget of frames that are larger than the slabs that connections are read into, while they
	// arrive. Default 32 MiB.
	FrameBytes int64
	// MaxConnections is how many connections are served at once; further ones are refused as Overloaded. Default 4096.
	MaxConnections int
	// MaxRequests is how many reads, fences and LACs of one connection are carried out at once; then it is read no
	// further. Default 256.
	MaxRequests int
	// MaxAllRequests is how many requests of all connections are carried out at once, and MaxWaits how many WaitLAC may
	// wait; further ones are refused as Overloaded, but for fences and the reads of recoveries. Default 16384 each.
	MaxAllRequests, MaxWaits int
	// MaxReads is how many reads ask the store at once; recoveries have as many for themselves. Default 32.
	MaxReads int
	// MaxAdmissions is how many ledgers' metadata are read at once. Default 64.
	MaxAdmissions int
	// MaxWait bounds the timeout of a WaitLAC. Default 60 s.
	MaxWait time.Duration
	// HandshakeTimeout is how long a new connection has for its hello. Default 5 s.
	HandshakeTimeout time.Duration
	// FrameTimeout is how long a frame that has begun to come may take to be complete. Default 10 s.
	FrameTimeout time.Duration
	// WriteTimeout is how long a peer may leave its answers unread before it is disconnected. Default 10 s.
	WriteTimeout time.Duration
	// MetadataTimeout is how long an add of an unknown ledger waits for its metadata. Default 5 s.
	MetadataTimeout time.Duration
}

// WithDefaults fills in what is zero.
func (c ServerConfig) WithDefaults() ServerConfig {
	setDefault(&c.InFlightBytes, 128<<20)
	setDefault(&c.ReadBytes, 64<<20)
	setDefault(&c.FrameBytes, 32<<20)
	setDefault(&c.MaxConnections, 4096)
	setDefault(&c.MaxRequests, 256)
	setDefault(&c.MaxAllRequests, 16384)
	setDefault(&c.MaxWaits, 16384)
	setDefault(&c.MaxReads, 32)
	setDefault(&c.MaxAdmissions, 64)
	setDefault(&c.MaxWait, time.Minute)
	setDefault(&c.HandshakeTimeout, 5*time.Second)
	setDefault(&c.FrameTimeout, 10*time.Second)
	setDefault(&c.WriteTimeout, 10*time.Second)
	setDefault(&c.MetadataTimeout, 5*time.Second)
	return c
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Server is a bookie's data path: connections in, store calls out, answers back.
//
// Each connection has one goroutine that reads and one that writes. The reader hands an add to the store at once,
// body in place, and goes on; the store's completion goroutine marks it done; the writer sends whatever was marked
// since its last write as ranges. So one wake-up and one write serve many entries, and nothing waits for anything
// but the disk and the budget of bytes in flight, whose exhaustion stops the reading and is felt by the peer
// as TCP back-pressure. Only an add for a ledger that the store does not know takes a side way, through
// [Admissions], and holds up nobody.
//
// A goroutine per request was rejected for adds: at 100 bytes an entry the scheduling costs more than the work.
type Server struct {
	cfg      ServerConfig
	me       Identity
	store    Storage
	log      *slog.Logger
	metrics  *serverMetrics
	adds     *budget.Budget
	reads    readLimits // ordinary ones
	recovery readLimits // those of recoveries: what ordinary traffic has used up must not keep topics from their next owner
	frames   *budget.Budget
	requests atomic.Int64 // carried out now, over all connections
	waits    atomic.Int64 // WaitLAC that wait now
	admitted *Admissions
	pool     sync.Pool // of *pendingAdd
	slabs    *bookiewire.Slabs
	logged   *rate.Limiter // of what peers do wrong: they may do it as fast as they like
	born     time.Time
	stored   atomic.Int64 // when an add was last answered OK: nanoseconds since born, 0 for never

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	conns    map[*conn]struct{}
	listener net.Listener
	closing  bool
}

// NewServer makes a server. registerer may be nil.
func NewServer(cfg ServerConfig, me Identity, store Storage, ledgers Ledgers, log *slog.Logger, registerer prometheus.Registerer) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{
		cfg: cfg.WithDefaults(), me: me, store: store, log: log,
		born: time.Now(), ctx: ctx, cancel: cancel, conns: make(map[*conn]struct{}),
	}
	s.logged = rate.NewLimiter(2, 20)
	s.adds = budget.New(s.cfg.InFlightBytes)
	s.reads, s.recovery = newReadLimits(s.cfg), newReadLimits(s.cfg)
	s.frames = budget.New(s.cfg.FrameBytes)
	s.metrics = newServerMetrics(registerer, s.adds)
	s.admitted = NewAdmissions(AdmissionConfig{
		Me: me.Storage, Store: store, Ledgers: ledgers, MaxReads: s.cfg.MaxAdmissions, Timeout: s.cfg.MetadataTimeout,
		OnRead: s.metrics.admissionReads.Inc,
	})
	s.slabs = bookiewire.NewSlabs(addSlab, freeSlabs)
	s.pool.New = func() any {
		x := &pendingAdd{}
		x.For = x
		return x
	}
	return s
}

// Serve accepts connections until l is closed, by [Server.Shutdown] or otherwise; it returns nil after a Shutdown.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	s.listener = l
	closing := s.closing
	s.mu.Unlock()
	if closing {
		_ = l.Close()
		return nil
	}
	for {
		nc, err := l.Accept()
		if err != nil {
			if s.ctx.Err() != nil || s.isClosing() {
				return nil //nolint:nilerr // Shutdown closed the listener
			}
			if errors.Is(err, net.ErrClosed) {
				return fmt.Errorf("accept: %w", err)
			}
			// Out of descriptors, or a connection that went before it was accepted: neither ends the bookie.
			s.metrics.acceptErrors.Inc()
			select {
			case <-time.After(50 * time.Millisecond):
			case <-s.ctx.Done():
			}
			continue
		}
		s.start(nc)
	}
}

func (s *Server) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

func (s *Server) start(nc net.Conn) {
	c := newConn(s, nc)
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		_ = nc.Close()
		return
	}
	c.surplus = len(s.conns) >= s.cfg.MaxConnections
	if c.surplus && len(s.conns) >= 2*s.cfg.MaxConnections {
		// Not even a word of refusal: those cost a goroutine each.
		s.mu.Unlock()
		_ = nc.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	s.metrics.connections.Inc()
	go func() {
		defer s.wg.Done()
		c.run()
		s.metrics.connections.Dec()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
}

// Shutdown stops accepting and reading, answers what was read, and waits for it, until ctx ends; then it breaks the
// connections. It returns when every goroutine has ended. The store must answer what it was given, so it is
// closed after the server.
func (s *Server) Shutdown(ctx context.Context) {
	s.mu.Lock()
	s.closing = true
	if s.listener != nil {
		_ = s.listener.Close()
	}
	for c := range s.conns {
		c.drain()
	}
	s.mu.Unlock()
	s.admitted.Stop()
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.kill()
		}
		s.cancel()
	})
	s.wg.Wait()
	stop()
	s.cancel()
	s.admitted.Wait()
}

// LastStored is when an add was last answered OK, that is, when the disk last synced for one;
// the zero time for never.
func (s *Server) LastStored() time.Time {
	since := s.stored.Load()
	if since == 0 {
		return time.Time{}
	}
	return s.born.Add(time.Duration(since))
}

// tell logs what became of a peer's connection, at debug level when there is too much of it.
func (s *Server) tell(level slog.Level, msg string, args ...any) {
	if !s.logged.Allow() {
		level = slog.LevelDebug
	}
	s.log.Log(s.ctx, level, msg, args...)
}

// hello decides about a new peer.
func (s *Server) hello(h bookiewire.Hello, surplus bool) bookiewire.Welcome {
	w := bookiewire.Welcome{Cluster: s.me.Cluster, Storage: s.me.Storage, BookieID: s.me.ID, MaxBody: bookiewire.MaxBody}
	switch {
	case surplus:
		w.Code, w.Detail = bookiewire.Overloaded, fmt.Sprintf("%d connections are open, which is the limit", s.cfg.MaxConnections)
	case h.MinVersion > bookiewire.Version || h.MaxVersion < bookiewire.Version:
		w.Code, w.Detail = bookiewire.BadRequest, fmt.Sprintf("protocol version %d is spoken here, not %d to %d", bookiewire.Version, h.MinVersion, h.MaxVersion)
	case h.Cluster != s.me.Cluster:
		w.Code, w.Detail = bookiewire.Unknown, fmt.Sprintf("this is cluster %s, not %s", s.me.Cluster, h.Cluster)
	case h.Storage != s.me.Storage:
		w.Code, w.Detail = bookiewire.Unknown, fmt.Sprintf("this is storage %s, not %s", s.me.Storage, h.Storage)
	case h.BookieID != "" && h.BookieID != s.me.ID:
		w.Code, w.Detail = bookiewire.Unknown, fmt.Sprintf("this is bookie %q, not %q", s.me.ID, h.BookieID)
	default:
		w.Version = bookiewire.Version
	}
	return w
}
