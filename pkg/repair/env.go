package repair

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/bookieclient"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/lease"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// Config says who repairs, and how much. Zero fields mean the defaults, but for Worker, which is required.
type Config struct {
	// Worker names this process: a broker's id.
	Worker string
	// Delay is how long a bookie must be away before its copies are made anew; 10 min. Negative: at once.
	Delay time.Duration
	// BytesPerSecond bounds copying in the whole cluster; 100 MiB. Each live broker takes an equal part.
	BytesPerSecond int64
	// Parallel is how many ledgers are worked on at a time; 4.
	Parallel int
	// MaxRecords is how many damaged ledgers have a record at a time; 2000.
	MaxRecords int
	// ScanEvery is the pause between two looks of the auditor, PollEvery between two of a worker for something to do; 5 s and 2 s.
	ScanEvery, PollEvery time.Duration
	// RetryFirst is the pause after a first failure; it doubles up to RetryMost; 1 s and 1 min.
	RetryFirst, RetryMost time.Duration
	// DamageEvery is the time between two questions to each bookie for what it found unreadable; 30 s.
	DamageEvery time.Duration
	// CompareEvery is the time in between the comparisons of two ledgers with what their bookies have; 50 ms.
	CompareEvery time.Duration
	// CompareRound is the least time between two comparisons of all ledgers; 10 min.
	CompareRound time.Duration
	// LeaveWithin is how long owners have to leave a live bookie that is to be emptied, before they are asked to close ledgers; 15 s.
	LeaveWithin time.Duration
	// IntentFor is how long an intent lasts at least; 10 min. What is large gets more.
	IntentFor time.Duration
}

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.Delay, 10*time.Minute)
	c.Delay = max(c.Delay, 0)
	def(&c.ScanEvery, 5*time.Second)
	def(&c.PollEvery, 2*time.Second)
	def(&c.RetryFirst, time.Second)
	def(&c.RetryMost, time.Minute)
	def(&c.DamageEvery, 30*time.Second)
	def(&c.CompareEvery, 50*time.Millisecond)
	def(&c.CompareRound, 10*time.Minute)
	def(&c.LeaveWithin, 15*time.Second)
	def(&c.IntentFor, 10*time.Minute)
	if c.BytesPerSecond == 0 {
		c.BytesPerSecond = 100 << 20
	}
	if c.Parallel == 0 {
		c.Parallel = 4
	}
	if c.MaxRecords == 0 {
		c.MaxRecords = 2000
	}
	return c
}

// LeaseID names the lease under which something is claimed.
type LeaseID = lease.ID

// Metadata is what repair needs of the metadata store. *meta.Store is one.
type Metadata interface {
	GetLedger(ctx context.Context, id entry.LedgerID) (meta.Ledger, error)
	ListLedgers(ctx context.Context, after entry.LedgerID, limit int) ([]meta.Ledger, error)
	Holdings(ctx context.Context, u entry.StorageUUID) (meta.Holdings, error)
	ListCookies(ctx context.Context) ([]meta.Cookie, error)
	BookieRegistered(ctx context.Context, u entry.StorageUUID) (bool, error)
	ConfirmDeleted(ctx context.Context, id entry.LedgerID, u entry.StorageUUID) error

	AddIntent(ctx context.Context, id entry.LedgerID, intent meta.ReplicaIntent) (meta.Ledger, error)
	DropIntent(ctx context.Context, id entry.LedgerID, target entry.StorageUUID, fragment entry.EntryID) (meta.Ledger, error)
	SwapReplica(ctx context.Context, id entry.LedgerID, fragment meta.Fragment, old entry.StorageUUID, replacement meta.Slot, deadline time.Time) (meta.Ledger, error)

	GetRepair(ctx context.Context, id entry.LedgerID) (meta.Repair, error)
	ListRepairs(ctx context.Context, after entry.LedgerID, limit int) (meta.RepairList, error)
	NoteRepair(ctx context.Context, r meta.Repair) error
	UpdateRepair(ctx context.Context, r meta.Repair) (meta.Repair, error)
	EndRepair(ctx context.Context, r meta.Repair) error
	ClaimRepair(ctx context.Context, id entry.LedgerID, worker string, lease LeaseID) (bool, error)
	ReleaseRepair(ctx context.Context, id entry.LedgerID, lease LeaseID) error
	ClaimAudit(ctx context.Context, worker string, lease LeaseID) (bool, error)
	GetRepairCensus(ctx context.Context) (meta.RepairCensus, error)
	PutRepairCensus(ctx context.Context, c meta.RepairCensus) error
}

// Control asks bookies what no frame of the data path does. *bookieclient.Control is one.
type Control interface {
	// ListEntries lists which of first … last, at most bookieclient.MaxListed, are durable at u and not known to be unreadable.
	ListEntries(ctx context.Context, u entry.StorageUUID, l entry.LedgerID, first, last entry.EntryID) (bookieclient.Listing, error)
	// ListDamage lists what u found unreadable.
	ListDamage(ctx context.Context, u entry.StorageUUID) ([]bookieclient.Damage, error)
	// EndLimbo says that u has all of a ledger again.
	EndLimbo(ctx context.Context, u entry.StorageUUID, l entry.LedgerID) error
}

// Owners asks the owners of ledgers.
type Owners interface {
	// Release has the owner of an open ledger close it, and take it first if nobody has it. It returns once that is done.
	Release(ctx context.Context, l meta.Ledger) error
}

// Session is the lease under which this process claims things. *lease.Session is one.
type Session interface {
	Wait(ctx context.Context) (*lease.Grant, error)
}

// Env is what repair needs from outside.
type Env struct {
	Meta     Metadata
	Topology Topology
	Session  Session
	// Ledger reads and adds: its Bookies and Metadata.
	Ledger  ledger.Env
	Control Control
	Owners  Owners
	// Sched runs what goes on beside the caller, and waits; nil: goroutines and the clock.
	Sched sched.Scheduler
	// Log and Registerer may be nil.
	Log        *slog.Logger
	Registerer prometheus.Registerer
}
