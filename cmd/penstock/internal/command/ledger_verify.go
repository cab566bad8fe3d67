package command

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

type copyProblem struct {
	Entry  int64  `json:"entry"`
	Bookie string `json:"bookie"`
	What   string `json:"what"`
	Detail string `json:"detail"`
}

type ledgerVerification struct {
	Ledger   uint64        `json:"ledger"`
	State    string        `json:"state"`
	Entries  uint64        `json:"entries"`
	Copies   uint64        `json:"copies"`
	Good     uint64        `json:"good"`
	Fewest   uint32        `json:"fewest"`
	Bytes    uint64        `json:"bytes"`
	Problems []copyProblem `json:"problems"`
}

// badCopiesError says that copies are not as they should be.
type badCopiesError struct{ bad, all int }

func (e *badCopiesError) Error() string {
	return fmt.Sprintf("verify ledgers: %d of %d have copies that are missing, unreachable or not as they should be", e.bad, e.all)
}

func (a *app) ledgerVerify() *cobra.Command {
	cmd := &cobra.Command{
		Use: "verify [LEDGER...]", Short: "Read every copy of every entry, and compare checksums",
		Long: "Read every copy of every entry of ledgers, or of all ledgers of a topic, and compare checksums. FEWEST is the number of good copies of the entry that has " +
			"the fewest. Of an open ledger, what is confirmed is read, and the newest entries may be on their way to a slow bookie. Exit 1 if a copy is not good.",
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			request := &brokerv1.VerifyLedgersRequest{}
			if err := stringFlag(cmd, "topic", &request.Topic); err != nil {
				return err
			}
			for _, text := range args {
				id, err := ledgerID(text)
				if err != nil {
					return err
				}
				request.Ledgers = append(request.Ledgers, id)
			}
			if (len(args) > 0) == (request.GetTopic() != "") {
				return settings.Usagef("name ledgers, or give --topic")
			}
			return a.connect(cmd.Context(), func(ctx context.Context, c *client.Client) error { return a.verifyLedgers(ctx, c, request, format) })
		},
	}
	cmd.Flags().String("topic", "", "all ledgers of this topic or partition")
	addOutputFlag(cmd)
	return cmd
}

func (a *app) verifyLedgers(ctx context.Context, c *client.Client, request *brokerv1.VerifyLedgersRequest, format string) error {
	opening, done := a.opening(ctx) // what follows takes as long as there is to read
	_, err := c.Admin().ListBrokers(opening, &brokerv1.ListBrokersRequest{})
	done()
	if err != nil {
		return err
	}
	stream, err := c.Admin().VerifyLedgers(ctx, request)
	if err != nil {
		return err
	}
	v := view{kind: "LedgerVerificationList", columns: []string{"LEDGER", "STATE", "ENTRIES", "COPIES", "GOOD", "FEWEST", "BYTES"}}
	bad := 0
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		d := ledgerVerification{
			Ledger: r.GetLedger(), State: r.GetState(), Entries: r.GetEntries(), Copies: r.GetCopies(), Good: r.GetGood(), Fewest: r.GetFewest(),
			Bytes: r.GetBytes(), Problems: []copyProblem{},
		}
		if d.Good < d.Copies {
			bad++
		}
		for _, p := range r.GetProblems() {
			d.Problems = append(d.Problems, copyProblem{p.GetEntry(), p.GetBookie(), p.GetWhat(), p.GetDetail()})
			a.progress("ledger %d entry %d on %s: %s: %s", d.Ledger, p.GetEntry(), p.GetBookie(), p.GetWhat(), p.GetDetail())
		}
		v.rows = append(v.rows, row{name: decimal(d.Ledger), data: d, cells: []string{
			decimal(d.Ledger), d.State, decimal(d.Entries), decimal(d.Copies), decimal(d.Good), decimal(uint64(d.Fewest)), bytesText(d.Bytes),
		}})
	}
	if err := v.print(a.out, format); err != nil {
		return err
	}
	if bad > 0 {
		return &badCopiesError{bad, len(v.rows)}
	}
	return nil
}
