package command

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

// writesToTerminal reports whether a person reads what is written to w.
func writesToTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isTerminal(f)
}

// byteSize is a flag of bytes: "100MiB", "1GiB", or a plain number.
type byteSize uint64

func (b *byteSize) String() string {
	if *b == 0 {
		return "0"
	}
	return strings.ReplaceAll(bytesText(uint64(*b)), " ", "")
}

func (b *byteSize) Type() string { return "bytes" }

func (b *byteSize) Set(text string) error {
	number, unit := text, uint64(1)
	for i, suffix := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if n, ok := strings.CutSuffix(text, suffix); ok {
			number, unit = n, 1<<(10*(i+1))
		}
	}
	n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return fmt.Errorf("%q is no number of bytes: want one like 100MiB", text)
	}
	*b = byteSize(n * unit)
	return nil
}

type bookieDetail struct {
	bookieSummary
	OpenLedgers     uint64     `json:"openLedgers"`
	DeletingLedgers uint64     `json:"deletingLedgers"`
	EntryBytes      uint64     `json:"entryBytes"`
	Marked          *time.Time `json:"marked,omitempty"`
}

func (a *app) bookieDescribe() *cobra.Command {
	cmd := &cobra.Command{
		Use: "describe BOOKIE", Short: "Show what a bookie has, and what is being done to it", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.DescribeBookie(ctx, &brokerv1.DescribeBookieRequest{Bookie: args[0]})
				if err != nil {
					return err
				}
				d := bookieDetail{
					bookieSummary: bookieOf(response.GetBookie()), OpenLedgers: response.GetOpenLedgers(),
					DeletingLedgers: response.GetDeletingLedgers(), EntryBytes: response.GetEntryBytes(),
				}
				mark := "-"
				if response.GetMarked() != nil {
					at := response.GetMarked().AsTime()
					d.Marked = &at
					mark = strings.TrimSpace(fmt.Sprintf("%s since %s %s", d.Mark, at.Format(time.RFC3339), d.Operation))
				}
				v := view{
					kind: "Bookie", single: true,
					columns: []string{"BOOKIE", "STORAGE UUID", "STATE", "MARK", "LEDGERS", "ENTRIES", "DISK", "ADDRESS", "HTTP", "ZONE", "HOST", "SYNC", "VERSION"},
					rows: []row{{name: d.ID, data: d, cells: []string{
						d.ID, d.StorageUUID, d.State, mark,
						fmt.Sprintf("%d, %d of them open, %d being deleted", d.Ledgers, d.OpenLedgers, d.DeletingLedgers),
						bytesText(d.EntryBytes) + ", estimated", fmt.Sprintf("%s of %s free", bytesText(d.FreeBytes), bytesText(d.TotalBytes)),
						orNone(d.Address), orNone(d.HTTP), orNone(d.Zone), orNone(d.Host), orNone(d.Sync), orNone(d.Version),
					}}},
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) bookieDrain() *cobra.Command {
	cmd := &cobra.Command{
		Use: "drain BOOKIE", Short: "Place nothing new on a bookie, for maintenance", Args: exactArgs(1),
		Long: "Place nothing new on a bookie: owners take it out of the ledgers that they write, and what it has stays there and is read from there. " +
			"Stop it once penstock bookie describe says that no open ledger names it; --undo ends the maintenance.",
		RunE: func(cmd *cobra.Command, args []string) error {
			undo, err := cmd.Flags().GetBool("undo")
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.DrainBookie(ctx, &brokerv1.DrainBookieRequest{Bookie: args[0], Undo: undo})
				switch {
				case err != nil:
					return err
				case undo:
					a.progress("bookie %s takes new copies again", args[0])
				default:
					a.progress("bookie %s takes nothing new; %d open ledgers name it still: penstock bookie describe %s", args[0], response.GetOpenLedgers(), args[0])
				}
				return nil
			})
		},
	}
	cmd.Flags().Bool("undo", false, "end the maintenance")
	return cmd
}

func (a *app) bookieDecommission() *cobra.Command {
	cmd := a.emptying(brokerv1.OperationKind_OPERATION_KIND_DECOMMISSION)
	cmd.Use, cmd.Short = "decommission BOOKIE", "Empty a bookie while it lives, and retire its disk's identity for good"
	cmd.Long = "Empty a bookie while it lives: nothing new is placed on it, owners take it out of the ledgers that they write, its copies are made elsewhere, " +
		"and once nothing names its disk's identity that is retired for good, so that the process may be stopped and the disk wiped. It is an operation: it goes on " +
		"without this command, and until it is done it can be cancelled (penstock op)."
	return cmd
}

func (a *app) bookieRecover() *cobra.Command {
	cmd := a.emptying(brokerv1.OperationKind_OPERATION_KIND_RECOVER)
	cmd.Use, cmd.Short = "recover BOOKIE", "Declare a bookie's disk dead for good, and make its copies anew"
	cmd.Long = "Declare the disk of a bookie that is down dead for good: its copies are made anew from others at once, and once nothing names its identity that is " +
		"retired, so that the bookie may start on an empty disk. A disk that only needs a restart is not dead: start it. It is an operation (penstock op)."
	cmd.Flags().Bool("yes", false, "do not ask")
	return cmd
}

// emptying is the command that starts an operation of that kind.
func (a *app) emptying(kind brokerv1.OperationKind) *cobra.Command {
	var rate byteSize
	cmd := &cobra.Command{
		Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			request := &brokerv1.StartOperationRequest{Kind: kind, Bookie: args[0], Options: &brokerv1.OperationOptions{Rate: uint64(rate)}}
			if request.DryRun, err = cmd.Flags().GetBool("dry-run"); err != nil {
				return err
			}
			if request.Options.RelaxZones, err = cmd.Flags().GetBool("relax-zone"); err != nil {
				return err
			}
			p99, err := cmd.Flags().GetDuration("pause-above-p99")
			switch {
			case err != nil:
				return err
			case p99 < 0:
				return settings.Usagef("--pause-above-p99 is %v: want 0 or more", p99)
			case p99 > 0:
				request.Options.PauseAboveP99 = durationpb.New(p99)
			}
			detach, err := cmd.Flags().GetBool("detach")
			if err != nil {
				return err
			}
			if kind == brokerv1.OperationKind_OPERATION_KIND_RECOVER && !request.GetDryRun() {
				question := fmt.Sprintf("This gives up the disk of bookie %s for good.", args[0])
				if err := a.confirmTyped(cmd, question, "giving up the disk of bookie "+args[0], args[0]); err != nil {
					return err
				}
			}
			return a.connect(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				response, err := a.startOperation(ctx, c, request)
				switch {
				case err != nil:
					return err
				case request.GetDryRun():
					return a.printPlan(operationKinds[kind], response.GetPlan(), uint64(rate), format)
				}
				d := operationOf(response.GetOperation())
				if detach {
					return operationView(d).print(a.out, format)
				}
				a.progress("operation %s: %s bookie %s", d.ID, d.Kind, d.Bookie)
				return a.watch(ctx, c, d.ID, format)
			})
		},
	}
	cmd.Flags().Bool("dry-run", false, "print the plan and its checks, and do nothing; exit 7 if there is something to do")
	cmd.Flags().Var(&rate, "rate", "most bytes a second to copy, like 100MiB; 0 leaves it to the brokers' own bound")
	cmd.Flags().Duration("pause-above-p99", 0, "copy nothing while publishing's 99th percentile is above this; 0 never waits")
	cmd.Flags().Bool("relax-zone", false, "let copies go where a ledger's minimum of zones is not kept")
	cmd.Flags().Bool("detach", false, "start it, print it, and do not follow it")
	addOutputFlag(cmd)
	return cmd
}

func (a *app) startOperation(ctx context.Context, c *client.Client, request *brokerv1.StartOperationRequest) (*brokerv1.StartOperationResponse, error) {
	ctx, done := a.opening(ctx)
	defer done()
	return c.Admin().StartOperation(ctx, request)
}

type planCheck struct {
	Check  string `json:"check"`
	OK     bool   `json:"ok"`
	Advice string `json:"advice,omitempty"`
}

type planDetail struct {
	Kind        string      `json:"kind"`
	Bookie      string      `json:"bookie"`
	StorageUUID string      `json:"storageUUID"`
	Ledgers     uint64      `json:"ledgers"`
	Bytes       uint64      `json:"bytes"`
	Targets     []string    `json:"targets"`
	Zones       []string    `json:"zones"`
	Checks      []planCheck `json:"checks"`
}

// changesError says that a dry run found something to do, refusedError that a check does not hold.
type (
	changesError struct{ text string }
	refusedError struct{ text string }
)

func (e *changesError) Error() string { return e.text }

func (e *refusedError) Error() string { return e.text }

// printPlan prints what would be done. The error says what the exit code is to say.
func (a *app) printPlan(kind string, p *brokerv1.OperationPlan, rate uint64, format string) error {
	d := planDetail{
		Kind: kind, Bookie: p.GetBookie(), StorageUUID: p.GetStorageUuid(), Ledgers: p.GetLedgers(), Bytes: p.GetBytes(),
		Targets: append([]string{}, p.GetTargets()...), Zones: append([]string{}, p.GetZones()...), Checks: []planCheck{},
	}
	refused := 0
	for _, c := range p.GetChecks() {
		d.Checks = append(d.Checks, planCheck{c.GetText(), c.GetOk(), c.GetAdvice()})
		if !c.GetOk() {
			refused++
		}
	}
	var err error
	if format == "table" || format == "wide" {
		err = d.printTable(a.out, rate)
	} else {
		err = view{kind: "OperationPlan", single: true, rows: []row{{name: d.Bookie, data: d}}}.print(a.out, format)
	}
	switch {
	case err != nil:
		return err
	case refused > 0:
		return &refusedError{fmt.Sprintf("%s bookie %s: it would be refused: %d of %d checks do not hold", kind, d.Bookie, refused, len(d.Checks))}
	}
	return &changesError{fmt.Sprintf("%s bookie %s: nothing was changed; without --dry-run it begins", kind, d.Bookie)}
}

func (d planDetail) printTable(w io.Writer, rate uint64) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	to := orNone(strings.Join(d.Targets, ","))
	if len(d.Zones) > 0 {
		to += " (zones " + strings.Join(d.Zones, ",") + ")"
	}
	eta := ""
	if rate > 0 {
		eta = fmt.Sprintf("  ETA %s at %s/s", etaText(d.Bytes, rate), bytesText(rate))
	}
	fmt.Fprintf(tw, "PLAN\t%d ledgers, %s → %s%s\n", d.Ledgers, bytesText(d.Bytes), to, eta)
	for _, c := range d.Checks {
		result := "ok"
		if !c.OK {
			result = "NOT SO: " + c.Advice
		}
		fmt.Fprintf(tw, "CHECK\t%s\t%s\n", c.Check, result)
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print plan: %w", err)
	}
	return nil
}
