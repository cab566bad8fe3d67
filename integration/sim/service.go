package sim

import (
	"context"

	"github.com/penstock-mq/penstock/pkg/meta"
)

// topic is what one owner at a time serves, under one bundle. What it is made of is its kind's.
type topic struct {
	index  int
	bundle meta.BundleID
	chain  meta.ChainID
	more   map[meta.ChainID]bool // of the same bundle
	kind   kind
}

// kind is a layer of the product as the simulation exercises it.
type kind interface {
	// open makes a broker that has just become the owner serve the topic. It runs in a task, and may be called again after
	// an error, unless that is meta.ErrEpoch. ctx ends with the ownership.
	open(ctx context.Context, b *broker, tp *topic, guard meta.Guard) (service, error)
	// check holds what is in the end, when all is healed and closed, against what was promised.
	check(tp *topic)
}

// service is a topic at the broker that serves it, or believes so. Methods that take no context are called from outside of
// tasks, by broker.do, and must not wait.
type service interface {
	// work is called now and then, and gives it something to do.
	work()
	// probe calls done once it has served something from one end to the other, if it does.
	probe(done func())
	// close ends it in good order.
	close(ctx context.Context) error
	// shutdown drops it. It waits for nothing but its own tasks.
	shutdown()
	// lost is closed when it is of no use any more, though the ownership may still be there.
	lost() <-chan struct{}
}
