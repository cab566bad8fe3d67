package ownership

import (
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Event is something that happened to, or became known to, this broker.
type Event interface{ event() }

// The events. Revisions are etcd's; they order what watches and transactions report of one bundle.
type (
	// BrokerSeen says that a broker is registered, this one included.
	BrokerSeen struct {
		ID   string
		Life Life
	}
	// BrokerGone says that a broker's registration is gone: its lease ended.
	BrokerGone struct{ ID string }
	// Suspected says that a broker seems dead: it does not answer pings, or, Refused, nobody listens where it did. It
	// may be said again as long as it is so; only a refusal is fresh evidence each time.
	Suspected struct {
		ID      string
		Life    Life
		Refused bool
	}
	// Trusted says that a broker answers pings.
	Trusted struct {
		ID   string
		Life Life
	}
	// Draining says that a broker is handing its bundles over, and takes none.
	Draining struct {
		ID   string
		Life Life
	}
	// OwnerSeen says who owned a bundle at a revision.
	OwnerSeen struct {
		Bundle meta.BundleID
		Owner  string
		Epoch  entry.Epoch
		Rev    int64
	}
	// OwnerGone says that nobody owned a bundle at a revision.
	OwnerGone struct {
		Bundle meta.BundleID
		Rev    int64
	}
	// Wanted says that a client asked for a bundle.
	Wanted struct{ Bundle meta.BundleID }
	// Taken ends a Take.
	Taken struct {
		Bundle meta.BundleID
		OK     bool
		// NoSuch, when not OK, says that there is no such bundle: its namespace was deleted.
		NoSuch bool
		Epoch  entry.Epoch
		Rev    int64
	}
	// Reacquired ends a Reacquire.
	Reacquired struct {
		Bundle  meta.BundleID
		Outcome ReacquireOutcome
		Rev     int64
	}
	// Stopped ends a Stop.
	Stopped struct{ Bundle meta.BundleID }
	// Released ends a Release, whatever its outcome: the key is gone, or its lease will end.
	Released struct{ Bundle meta.BundleID }
	// Fenced says that serving a bundle met a newer owner.
	Fenced struct {
		Bundle meta.BundleID
		Epoch  entry.Epoch // under which it was served
	}
	// LeaseLost says that etcd no longer has our lease.
	LeaseLost struct{}
	// LeaseRenewed says that we have a lease again.
	LeaseRenewed struct{}
	// Drain begins the hand-over of everything; it is not taken back.
	Drain struct{}
	// Tick tells the time, monotonic, from any origin.
	Tick struct{ Now time.Duration }
)

// Life tells one process from the next of the same name; it is when the process started. What is said of one life does
// not hold for another.
type Life int64

// ReacquireOutcome is how a Reacquire ended.
type ReacquireOutcome uint8

// The outcomes of a Reacquire.
const (
	// ReacquireOK: the key is back under the new lease, the epoch is what it was.
	ReacquireOK ReacquireOutcome = iota
	// ReacquireLost: somebody else took the bundle.
	ReacquireLost
	// ReacquireUnavailable: etcd did not answer.
	ReacquireUnavailable
)

// Action is something that must be done.
type Action interface{ action() }

// The actions.
type (
	// Take the bundle from Owner ("" is nobody) at Epoch.
	Take struct {
		Bundle meta.BundleID
		Owner  string
		Epoch  entry.Epoch
	}
	// Reacquire puts our owner key back, the epoch unchanged.
	Reacquire struct {
		Bundle meta.BundleID
		Epoch  entry.Epoch
	}
	// Serve the bundle under Epoch.
	Serve struct {
		Bundle meta.BundleID
		Epoch  entry.Epoch
	}
	// Stop serving the bundle, first of all; clients are told to go to Next ("" is not known). A bundle that was lost, or
	// is to be handed over, as soon as it was taken is stopped without a Serve.
	Stop struct {
		Bundle meta.BundleID
		Epoch  entry.Epoch
		Reason Reason
		Next   string
	}
	// Release deletes our owner key.
	Release struct {
		Bundle meta.BundleID
		Epoch  entry.Epoch
	}
)

// Reason says why a bundle is stopped.
type Reason string

// The reasons.
const (
	// ReasonReplaced: another broker has a higher epoch.
	ReasonReplaced Reason = "replaced"
	// ReasonFenced: a transaction or a bookie refused what this owner wrote.
	ReasonFenced Reason = "fenced"
	// ReasonHandOver: this broker shuts down in good order.
	ReasonHandOver Reason = "hand-over"
)

func (BrokerSeen) event()   {}
func (BrokerGone) event()   {}
func (Suspected) event()    {}
func (Trusted) event()      {}
func (Draining) event()     {}
func (OwnerSeen) event()    {}
func (OwnerGone) event()    {}
func (Wanted) event()       {}
func (Taken) event()        {}
func (Reacquired) event()   {}
func (Stopped) event()      {}
func (Released) event()     {}
func (Fenced) event()       {}
func (LeaseLost) event()    {}
func (LeaseRenewed) event() {}
func (Drain) event()        {}
func (Tick) event()         {}

func (Take) action()      {}
func (Reacquire) action() {}
func (Serve) action()     {}
func (Stop) action()      {}
func (Release) action()   {}
