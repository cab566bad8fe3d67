package sim

import (
	"context"
	"slices"

	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// chainEnv is what a broker's chains under a guard work with: the product's transactions, of which the ghost hears.
func (b *broker) chainEnv(g meta.Guard) chain.Env {
	env := b.env
	env.Ledger.Metadata = ensembles{b.meta.Owned(g), b}
	env.Meta = ends{b.meta, b}
	return env
}

// ensembles are the transactions of a ledger's writer.
type ensembles struct {
	*meta.Owned
	b *broker
}

// ChangeEnsemble implements ledger.Metadata.
func (m ensembles) ChangeEnsemble(ctx context.Context, l meta.Ledger, fragments []meta.Fragment) (meta.Ledger, error) {
	g := m.b.w.ghost
	lac := fragments[len(fragments)-1].First - 1
	if slices.Contains(m.b.w.levels, ledger.AckAll) { // the change may take along what is confirmed and misses copies
		lac = max(lac, g.provable(g.ledger(l.ID)))
	}
	defer g.proposes(m.b, l.ID, lac, "a change of the ensemble")()
	return m.Owned.ChangeEnsemble(ctx, l, fragments) //nolint:wrapcheck // it is the product's
}

// ends are the transactions that close ledgers.
type ends struct {
	*meta.Store
	b *broker
}

// CloseLedger implements chain.Metadata.
func (m ends) CloseLedger(ctx context.Context, guard meta.Guard, c meta.Chain, closing meta.Closing) (meta.Chain, meta.Ledger, error) {
	defer m.proposes(&closing)()
	return m.Store.CloseLedger(ctx, guard, c, closing) //nolint:wrapcheck // it is the product's
}

// OpenLedger implements chain.Metadata.
func (m ends) OpenLedger(ctx context.Context, guard meta.Guard, c meta.Chain, l meta.Ledger, closing *meta.Closing) (meta.Chain, meta.Ledger, error) {
	defer m.proposes(closing)()
	return m.Store.OpenLedger(ctx, guard, c, l, closing) //nolint:wrapcheck // it is the product's
}

func (m ends) proposes(closing *meta.Closing) (done func()) {
	if closing == nil || closing.Recovery {
		return func() {}
	}
	return m.b.w.ghost.proposes(m.b, closing.Ledger.ID, closing.Last, "the end")
}

var (
	_ ledger.Metadata = ensembles{}
	_ chain.Metadata  = ends{}
)
