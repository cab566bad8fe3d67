package command

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

type underReplicated struct {
	ID               uint64    `json:"id"`
	Owner            string    `json:"owner"`
	Chain            string    `json:"chain"`
	Causes           []string  `json:"causes"`
	Since            time.Time `json:"since"`
	BelowWriteQuorum uint64    `json:"belowWriteQuorum"`
	BelowAckQuorum   uint64    `json:"belowAckQuorum"`
	Unavailable      uint64    `json:"unavailable"`
	Misplaced        uint64    `json:"misplaced"`
	Bookies          []string  `json:"bookies"`
	State            string    `json:"state"`
	Reason           string    `json:"reason"`
	Doing            string    `json:"doing"`
	Worker           string    `json:"worker"`
	CopiedEntries    uint64    `json:"copiedEntries"`
	CopiedBytes      uint64    `json:"copiedBytes"`
}

// listUnderReplicated prints the replication census.
func (a *app) listUnderReplicated(cmd *cobra.Command, format string) error {
	request := &brokerv1.ListUnderReplicatedRequest{}
	if err := stringFlag(cmd, "on", &request.Bookie); err != nil {
		return err
	}
	if cmd.Flags().Changed("topic") {
		return settings.Usagef("--topic and --under-replicated do not go together")
	}
	var err error
	if request.Limit, err = cmd.Flags().GetUint32("limit"); err != nil {
		return err
	}
	return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
		response, err := c.ListUnderReplicated(ctx, request)
		if err != nil {
			return err
		}
		v := view{kind: "UnderReplicatedLedgerList", wide: 3, columns: []string{
			"LEDGER", "OF", "CAUSE", "AGE", "BELOW QW", "BELOW QA", "UNAVAILABLE", "MISPLACED", "BOOKIES", "STATE", "REASON", "DOING", "COPIED", "WORKER",
		}}
		for _, l := range response.GetLedgers() {
			d := underReplicated{
				l.GetLedger(), l.GetOwner(), l.GetChain(), l.GetCauses(), l.GetSince().AsTime(), l.GetBelowWriteQuorum(), l.GetBelowAckQuorum(),
				l.GetUnavailable(), l.GetMisplaced(), l.GetBookies(), l.GetState(), l.GetReason(), l.GetDoing(), l.GetWorker(),
				l.GetCopiedEntries(), l.GetCopiedBytes(),
			}
			v.rows = append(v.rows, row{name: decimal(d.ID), data: d, cells: []string{
				decimal(d.ID), orNone(d.Owner), strings.Join(d.Causes, ","), time.Since(d.Since).Round(time.Second).String(),
				decimal(d.BelowWriteQuorum), decimal(d.BelowAckQuorum), decimal(d.Unavailable), decimal(d.Misplaced),
				orNone(strings.Join(d.Bookies, ",")), d.State, orNone(d.Reason), orNone(d.Doing),
				fmt.Sprintf("%d entries, %s", d.CopiedEntries, bytesText(d.CopiedBytes)), orNone(d.Worker),
			}})
		}
		if err := v.print(a.out, format); err != nil {
			return err
		}
		a.tellCensus(response)
		return nil
	})
}

// tellCensus says what the list does not.
func (a *app) tellCensus(r *brokerv1.ListUnderReplicatedResponse) {
	for _, k := range r.GetAbsent() {
		since := time.Since(k.GetSince().AsTime()).Round(time.Second)
		if left := time.Until(k.GetLost().AsTime()).Round(time.Second); left > 0 {
			a.progress("bookie %s is absent since %s ago; its %d ledgers are repaired from in %s on", k.GetId(), since, k.GetLedgers(), left)
		} else {
			a.progress("bookie %s is absent since %s ago; %d ledgers name it still", k.GetId(), since, k.GetLedgers())
		}
	}
	if r.GetMore() {
		a.progress("there are more: raise --limit, or narrow with --on")
	}
	if n := r.GetWaiting(); n > 0 {
		a.progress("%d more damaged ledgers follow as these are done", n)
	}
	if r.GetAt() == nil {
		a.progress("nobody has looked yet: the census is kept by a broker, which begins a few seconds after its start")
	}
}
