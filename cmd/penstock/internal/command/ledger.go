package command

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

type fragmentSlot struct {
	StorageUUID string `json:"storageUUID"`
	Bookie      string `json:"bookie"`
	Zone        string `json:"zone"`
}

type fragment struct {
	FirstEntry int64          `json:"firstEntry"`
	Slots      []fragmentSlot `json:"slots"`
}

type ledgerDetail struct {
	ID          uint64     `json:"id"`
	State       string     `json:"state"`
	Term        uint64     `json:"term"`
	Ensemble    uint32     `json:"ensemble"`
	WriteQuorum uint32     `json:"writeQuorum"`
	AckQuorum   uint32     `json:"ackQuorum"`
	MinZones    uint32     `json:"minZones"`
	LastEntry   int64      `json:"lastEntry"`
	Bytes       uint64     `json:"bytes"`
	Chain       string     `json:"chain"`
	Fragments   []fragment `json:"fragments"`
}

func (a *app) ledgerCommand() *cobra.Command {
	cmd := group("ledger", "Ledgers: replicated runs of entries under the topics")
	cmd.AddCommand(a.ledgerList(), a.ledgerDescribe(), a.ledgerRead(), a.ledgerVerify())
	return cmd
}

func ledgerOf(l *brokerv1.Ledger) ledgerDetail {
	d := ledgerDetail{
		ID: l.GetId(), State: l.GetState(), Term: l.GetTerm(), Ensemble: l.GetEnsemble(), WriteQuorum: l.GetWriteQuorum(),
		AckQuorum: l.GetAckQuorum(), MinZones: l.GetMinZones(), LastEntry: l.GetLastEntry(), Bytes: l.GetBytes(), Chain: l.GetChain(),
		Fragments: []fragment{},
	}
	for _, f := range l.GetFragments() {
		g := fragment{FirstEntry: f.GetFirstEntry(), Slots: []fragmentSlot{}}
		for _, s := range f.GetSlots() {
			g.Slots = append(g.Slots, fragmentSlot{s.GetStorageUuid(), s.GetBookie(), s.GetZone()})
		}
		d.Fragments = append(d.Fragments, g)
	}
	return d
}

func (f fragment) bookies() string {
	names := make([]string, len(f.Slots))
	for i, s := range f.Slots {
		names[i] = s.Bookie
		if s.Bookie == "" {
			names[i] = s.StorageUUID
		}
	}
	return strings.Join(names, ",")
}

func (a *app) ledgerList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List ledgers: of a topic, on a bookie, or all", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			if damaged, err := cmd.Flags().GetBool("under-replicated"); err != nil || damaged {
				if err != nil {
					return err
				}
				return a.listUnderReplicated(cmd, format)
			}
			request := &brokerv1.ListLedgersRequest{}
			for _, err := range []error{
				stringFlag(cmd, "topic", &request.Topic), stringFlag(cmd, "on", &request.Bookie),
			} {
				if err != nil {
					return err
				}
			}
			if request.Limit, err = cmd.Flags().GetUint32("limit"); err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.ListLedgers(ctx, request)
				if err != nil {
					return err
				}
				v := view{kind: "LedgerList", wide: 1, columns: []string{"LEDGER", "STATE", "E/QW/QA", "LAST", "BYTES", "BOOKIES", "CHAIN"}}
				for _, l := range response.GetLedgers() {
					d := ledgerOf(l)
					bookies := "-"
					if n := len(d.Fragments); n > 0 {
						bookies = d.Fragments[n-1].bookies()
					}
					v.rows = append(v.rows, row{name: decimal(d.ID), data: d, cells: []string{
						decimal(d.ID), d.State, fmt.Sprintf("%d/%d/%d", d.Ensemble, d.WriteQuorum, d.AckQuorum),
						d.last(), d.size(), bookies, d.Chain,
					}})
				}
				if err := v.print(a.out, format); err != nil {
					return err
				}
				if response.GetMore() {
					a.progress("there are more: raise --limit, or narrow with --topic or --on")
				}
				return nil
			})
		},
	}
	cmd.Flags().String("topic", "", "only ledgers of this topic or partition")
	cmd.Flags().String("on", "", "only ledgers that name this bookie (id or storage UUID)")
	cmd.Flags().Uint32("limit", 1000, "at most so many")
	cmd.Flags().Bool("under-replicated", false, "only ledgers that lack copies or have them where they should not be, and what is done about it; --on: those on it")
	addOutputFlag(cmd)
	return cmd
}

func stringFlag(cmd *cobra.Command, name string, to *string) (err error) {
	*to, err = cmd.Flags().GetString(name)
	return err
}

func (d ledgerDetail) closed() bool { return d.State == "CLOSED" || d.State == "DELETING" }

func (d ledgerDetail) last() string {
	if !d.closed() {
		return "…"
	}
	return strconv.FormatInt(d.LastEntry, 10)
}

func (d ledgerDetail) size() string {
	if !d.closed() {
		return "…"
	}
	return bytesText(d.Bytes)
}

func ledgerID(text string) (uint64, error) {
	id, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return 0, settings.Usagef("%q is not a ledger id: want a number", text)
	}
	return id, nil
}

func (a *app) ledgerDescribe() *cobra.Command {
	cmd := &cobra.Command{
		Use: "describe LEDGER", Short: "Show a ledger's metadata", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			id, err := ledgerID(args[0])
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.DescribeLedger(ctx, &brokerv1.DescribeLedgerRequest{Id: id})
				if err != nil {
					return err
				}
				d := ledgerOf(response.GetLedger())
				var fragments []string
				for _, f := range d.Fragments {
					fragments = append(fragments, fmt.Sprintf("from entry %d on %s", f.FirstEntry, f.bookies()))
				}
				v := view{
					kind: "Ledger", single: true,
					columns: []string{"LEDGER", "STATE", "TERM", "E/QW/QA", "MIN ZONES", "LAST", "BYTES", "CHAIN", "FRAGMENTS"},
					rows: []row{{name: decimal(d.ID), data: d, cells: []string{
						decimal(d.ID), d.State, decimal(d.Term), fmt.Sprintf("%d/%d/%d", d.Ensemble, d.WriteQuorum, d.AckQuorum),
						strconv.FormatUint(uint64(d.MinZones), 10), d.last(), d.size(), d.Chain, strings.Join(fragments, "\n"),
					}}},
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) ledgerRead() *cobra.Command {
	cmd := &cobra.Command{
		Use: "read LEDGER", Short: "Print stored entries, up to what is confirmed, as hex dumps", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := ledgerID(args[0])
			if err != nil {
				return err
			}
			request := &brokerv1.ReadLedgerRequest{Id: id}
			if request.FirstEntry, err = cmd.Flags().GetInt64("first"); err != nil {
				return err
			}
			if request.Limit, err = cmd.Flags().GetUint32("limit"); err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				stream, err := c.ReadLedger(ctx, request)
				if err != nil {
					return err
				}
				for {
					e, err := stream.Recv()
					if errors.Is(err, io.EOF) {
						return nil
					}
					if err != nil {
						return err
					}
					fmt.Fprintf(a.out, "entry %d, %d bytes\n%s", e.GetEntry(), len(e.GetBody()), hex.Dump(e.GetBody()))
				}
			})
		},
	}
	cmd.Flags().Int64("first", 0, "first entry")
	cmd.Flags().Uint32("limit", 10, "at most so many entries; 0 is all")
	return cmd
}
