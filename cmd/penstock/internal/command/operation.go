package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
)

const (
	watchEvery    = time.Second      // how often an operation is asked for
	watchLine     = 10 * time.Second // a line that often where nobody looks at a terminal
	watchPatience = 5 * time.Minute  // without an answer
	stalledAfter  = 30 * time.Second // since the record was written last
)

type operationBlock struct {
	Ledger uint64 `json:"ledger"`
	Owner  string `json:"owner"`
	Reason string `json:"reason"`
}

type operationDetail struct {
	ID          string           `json:"id"`
	Kind        string           `json:"kind"`
	State       string           `json:"state"`
	Bookie      string           `json:"bookie"`
	StorageUUID string           `json:"storageUUID"`
	Paused      bool             `json:"paused"`
	Held        string           `json:"held,omitempty"`
	Rate        uint64           `json:"rateBytesPerSecond,omitempty"`
	PauseAbove  string           `json:"pauseAboveP99,omitempty"`
	RelaxZones  bool             `json:"relaxZones,omitempty"`
	Ledgers     uint64           `json:"ledgers"`
	LedgersLeft uint64           `json:"ledgersLeft"`
	OpenLeft    uint64           `json:"openLedgersLeft"`
	Bytes       uint64           `json:"bytes"`
	BytesLeft   uint64           `json:"bytesLeft"`
	Speed       uint64           `json:"bytesPerSecond"`
	Blocked     uint64           `json:"blocked"`
	Blocks      []operationBlock `json:"blocks"`
	Runner      string           `json:"runner,omitempty"`
	Error       string           `json:"error,omitempty"`
	Created     time.Time        `json:"created"`
	Updated     time.Time        `json:"updated"`
	Ended       *time.Time       `json:"ended,omitempty"`
}

var operationKinds = map[brokerv1.OperationKind]string{
	brokerv1.OperationKind_OPERATION_KIND_DECOMMISSION: "decommission",
	brokerv1.OperationKind_OPERATION_KIND_RECOVER:      "recover",
}

func operationOf(o *brokerv1.Operation) operationDetail {
	d := operationDetail{
		ID: o.GetId(), Kind: operationKinds[o.GetKind()], State: o.GetState(), Bookie: o.GetBookie(), StorageUUID: o.GetStorageUuid(),
		Paused: o.GetPaused(), Held: o.GetHeld(), Rate: o.GetOptions().GetRate(), RelaxZones: o.GetOptions().GetRelaxZones(),
		Ledgers: o.GetLedgers(), LedgersLeft: o.GetLedgersLeft(), OpenLeft: o.GetOpenLeft(), Bytes: o.GetBytes(), BytesLeft: o.GetBytesLeft(),
		Speed: o.GetSpeed(), Blocked: o.GetBlocked(), Blocks: []operationBlock{}, Runner: o.GetRunner(), Error: o.GetError(),
		Created: o.GetCreated().AsTime(), Updated: o.GetUpdated().AsTime(),
	}
	if p := o.GetOptions().GetPauseAboveP99(); p != nil {
		d.PauseAbove = p.AsDuration().String()
	}
	for _, b := range o.GetBlocks() {
		d.Blocks = append(d.Blocks, operationBlock{b.GetLedger(), b.GetOwner(), b.GetReason()})
	}
	if o.GetEnded() != nil {
		at := o.GetEnded().AsTime()
		d.Ended = &at
	}
	return d
}

func (d operationDetail) over() bool { return d.Ended != nil }

// stateText is the state, and what keeps it from going on.
func (d operationDetail) stateText() string {
	switch {
	case d.over():
		return d.State
	case d.Paused:
		return d.State + ", PAUSED"
	case d.Held != "":
		return d.State + ", HELD"
	}
	return d.State
}

// percent is how much is done, by bytes where there are some.
func (d operationDetail) percent() uint64 {
	switch {
	case d.State == "DONE":
		return 100
	case d.Bytes > 0:
		return 100 * (d.Bytes - min(d.BytesLeft, d.Bytes)) / d.Bytes
	case d.Ledgers > 0:
		return 100 * (d.Ledgers - min(d.LedgersLeft, d.Ledgers)) / d.Ledgers
	}
	return 0
}

func (d operationDetail) eta() string {
	if d.Speed == 0 || d.BytesLeft == 0 || d.over() {
		return "-"
	}
	return etaText(d.BytesLeft, d.Speed)
}

func etaText(bytes, speed uint64) string {
	return time.Duration(float64(bytes) / float64(speed) * float64(time.Second)).Round(time.Second).String()
}

// line tells in one line how far it is.
func (d operationDetail) line() string {
	text := fmt.Sprintf("%s  %d %%  %s of %s", d.stateText(), d.percent(), bytesText(d.Bytes-min(d.BytesLeft, d.Bytes)), bytesText(d.Bytes))
	if d.Speed > 0 {
		text += fmt.Sprintf("  %s/s  ETA %s", bytesText(d.Speed), d.eta())
	}
	text += fmt.Sprintf("  left %d ledgers, %d of them open, %d blocked", d.LedgersLeft, d.OpenLeft, d.Blocked)
	if d.Held != "" {
		text += "  " + d.Held
	}
	return text
}

func (d operationDetail) blocks() []string {
	var out []string
	for _, b := range d.Blocks {
		out = append(out, fmt.Sprintf("ledger %d (%s): %s", b.Ledger, b.Owner, b.Reason))
	}
	if more := d.Blocked - min(d.Blocked, uint64(len(d.Blocks))); more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return out
}

func operationView(d operationDetail) view {
	options := []string{}
	if d.Rate > 0 {
		options = append(options, "at most "+bytesText(d.Rate)+"/s")
	}
	if d.PauseAbove != "" {
		options = append(options, "pauses above a p99 of "+d.PauseAbove)
	}
	if d.RelaxZones {
		options = append(options, "zones relaxed")
	}
	ended := "-"
	if d.Ended != nil {
		ended = d.Ended.Format(time.RFC3339)
	}
	return view{
		kind: "Operation", single: true,
		columns: []string{"OPERATION", "KIND", "BOOKIE", "STORAGE UUID", "STATE", "DONE", "LEDGERS LEFT", "BYTES LEFT", "SPEED", "ETA", "BLOCKED", "OPTIONS", "RUNNER", "CREATED", "UPDATED", "ENDED", "ERROR"},
		rows: []row{{name: d.ID, data: d, cells: []string{
			d.ID, d.Kind, d.Bookie, d.StorageUUID, d.stateText(), fmt.Sprintf("%d %%", d.percent()),
			fmt.Sprintf("%d of %d, %d of them open", d.LedgersLeft, d.Ledgers, d.OpenLeft),
			fmt.Sprintf("%s of %s", bytesText(d.BytesLeft), bytesText(d.Bytes)), bytesText(d.Speed) + "/s", d.eta(),
			orNone(strings.Join(d.blocks(), "\n")), orNone(strings.Join(options, ", ")), orNone(d.Runner),
			d.Created.Format(time.RFC3339), d.Updated.Format(time.RFC3339), ended, orNone(d.Error),
		}}},
	}
}

func (a *app) operationCommand() *cobra.Command {
	cmd := group("op", "Operations: long work that goes on without the tool that began it")
	cmd.AddCommand(a.operationList(), a.operationGet(), a.operationWatch(),
		a.operationChange("pause", "Copy nothing until it is resumed", brokerv1.OperationChange_OPERATION_CHANGE_PAUSE),
		a.operationChange("resume", "Go on", brokerv1.OperationChange_OPERATION_CHANGE_RESUME),
		a.operationChange("cancel", "Give it up: the bookie takes new copies again, and what was copied stays copied", brokerv1.OperationChange_OPERATION_CHANGE_CANCEL))
	return cmd
}

func (a *app) operationList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List operations, oldest first, with those that are over", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.ListOperations(ctx, &brokerv1.ListOperationsRequest{})
				if err != nil {
					return err
				}
				v := view{kind: "OperationList", wide: 2, columns: []string{"OPERATION", "KIND", "BOOKIE", "STATE", "DONE", "LEFT", "SPEED", "ETA", "BLOCKED", "CREATED", "RUNNER"}}
				for _, o := range response.GetOperations() {
					d := operationOf(o)
					v.rows = append(v.rows, row{name: d.ID, data: d, cells: []string{
						d.ID, d.Kind, d.Bookie, d.stateText(), fmt.Sprintf("%d %%", d.percent()), fmt.Sprintf("%d ledgers, %s", d.LedgersLeft, bytesText(d.BytesLeft)),
						bytesText(d.Speed) + "/s", d.eta(), decimal(d.Blocked), d.Created.Format(time.RFC3339), orNone(d.Runner),
					}})
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) operationGet() *cobra.Command {
	cmd := &cobra.Command{
		Use: "get OPERATION", Short: "Show an operation, and why its ledgers are stuck", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.GetOperation(ctx, &brokerv1.GetOperationRequest{Id: args[0]})
				if err != nil {
					return err
				}
				return operationView(operationOf(response.GetOperation())).print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) operationChange(verb, short string, change brokerv1.OperationChange) *cobra.Command {
	cmd := &cobra.Command{
		Use: verb + " OPERATION", Short: short, Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.ChangeOperation(ctx, &brokerv1.ChangeOperationRequest{Id: args[0], Change: change})
				if err != nil {
					return err
				}
				return operationView(operationOf(response.GetOperation())).print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) operationWatch() *cobra.Command {
	cmd := &cobra.Command{
		Use: "watch OPERATION", Short: "Follow an operation until it is over; interrupt to leave it alone", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.connect(cmd.Context(), func(ctx context.Context, c *client.Client) error { return a.watch(ctx, c, args[0], format) })
		},
	}
	addOutputFlag(cmd)
	return cmd
}

// notDoneError says that an operation ended otherwise than done.
type notDoneError struct{ text string }

func (e *notDoneError) Error() string { return e.text }

// watch prints how far an operation is until it is over, and then what became of it. When ctx ends before, it says how to come
// back. The cluster may be away for a while.
func (a *app) watch(ctx context.Context, c *client.Client, id, format string) error {
	shown := &progressLine{a: a}
	answered := time.Now()
	for {
		d, err := a.askOperation(ctx, c, id)
		var failed *client.Error
		switch {
		case ctx.Err() != nil:
			shown.end()
			a.progress("operation %s goes on by itself: penstock op watch %s", id, id)
			return nil //nolint:nilerr // that is no failure: the person left
		case err != nil && errors.As(err, &failed) && exitCodeOf(failed) == exitUnreachable && time.Since(answered) < watchPatience:
			shown.show("no answer: " + err.Error())
		case err != nil:
			shown.end()
			return err
		case d.over():
			shown.end()
			if err := operationView(d).print(a.out, format); err != nil || d.State == "DONE" {
				return err
			}
			return &notDoneError{strings.TrimSuffix(fmt.Sprintf("operation %s is %s: %s", id, d.State, d.Error), ": ")}
		default:
			answered = time.Now()
			text := d.line()
			if age := time.Since(d.Updated); age > stalledAfter {
				text += fmt.Sprintf("  (as of %s ago: no broker runs it)", age.Round(time.Second))
			}
			shown.show(text, d.blocks()...)
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchEvery):
		}
	}
}

func (a *app) askOperation(ctx context.Context, c *client.Client, id string) (operationDetail, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	response, err := c.Admin().GetOperation(ctx, &brokerv1.GetOperationRequest{Id: id})
	if err != nil {
		return operationDetail{}, err
	}
	return operationOf(response.GetOperation()), nil
}

// progressLine shows how far something is: in one line of a terminal, or else as a line once in a while and whenever the first
// word changes. What blocks it is said once.
type progressLine struct {
	a     *app
	tty   bool
	asked bool
	open  bool // the terminal's line is not ended
	word  string
	last  time.Time
	said  map[string]bool
}

func (p *progressLine) show(text string, blocks ...string) {
	if !p.asked {
		p.asked, p.tty, p.said = true, writesToTerminal(p.a.err), map[string]bool{}
	}
	for _, b := range blocks {
		if !p.said[b] && len(p.said) < 1000 {
			p.said[b] = true
			p.end()
			p.a.progress("BLOCKED  %s", b)
		}
	}
	word, _, _ := strings.Cut(text, "  ")
	switch {
	case p.tty:
		fmt.Fprintf(p.a.err, "\r\x1b[K%s", text)
		p.open = true
	case word != p.word || time.Since(p.last) >= watchLine:
		p.a.progress("%s", text)
		p.last = time.Now()
	}
	p.word = word
}

// end leaves the line as it is.
func (p *progressLine) end() {
	if p.open {
		fmt.Fprintln(p.a.err)
		p.open = false
	}
}
