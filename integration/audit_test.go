package integration

import (
	"github.com/penstock-mq/penstock/integration/audit"
	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// audit asks every bookie for every entry that it should hold.
func (w *town) audit() {
	w.Helper()
	sum, err := audit.Run(w.ctx, w.c, func(p *process.Process) bool { return p == w.damaged })
	if err != nil {
		w.Error(err)
	}
	w.Log(sum)
}

// fewLedgers fails the test when ledgers were made in a loop.
func (w *town) fewLedgers() {
	w.Helper()
	ledgers, err := audit.Ledgers(w.ctx, w.c)
	w.check(err)
	if len(ledgers) > 20 {
		w.Errorf("there are %d ledgers", len(ledgers))
	}
}
