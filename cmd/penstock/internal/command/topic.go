package command

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

type topicSummary struct {
	Topic      string `json:"topic"`
	Partitions uint32 `json:"partitions"`
}

type ledgerRun struct {
	Ledger      uint64 `json:"ledger"`
	State       string `json:"state"`
	FirstOffset uint64 `json:"firstOffset"`
	EndOffset   uint64 `json:"endOffset"`
	Bytes       uint64 `json:"bytes"`
}

type topicDetail struct {
	Topic          string      `json:"topic"`
	Partitions     uint32      `json:"partitions"`
	Broker         string      `json:"broker"`
	Bundle         string      `json:"bundle"`
	Epoch          uint64      `json:"epoch"`
	EarliestOffset uint64      `json:"earliestOffset"`
	NextOffset     uint64      `json:"nextOffset"`
	Bytes          uint64      `json:"bytes"`
	Ledgers        []ledgerRun `json:"ledgers"`
	Producers      []string    `json:"producers"`
	Subscriptions  []string    `json:"subscriptions"`
	Consumers      uint32      `json:"consumers"`
	// What the last takeover of the topic wrote again, from the tail of the ledger that was open.
	RecoveredTailBytes uint64 `json:"recoveredTailBytes"`
}

// partitionedDetail is a topic with partitions: what there is to tell, its partitions tell.
type partitionedDetail struct {
	topicSummary
	Details []topicDetail `json:"partitionDetails"`
}

func (a *app) topicCommand() *cobra.Command {
	cmd := group("topic", "Create, inspect and delete topics")
	cmd.AddCommand(a.topicCreate(), a.topicList(), a.topicDescribe(), a.topicDelete(), a.topicUnload())
	return cmd
}

func (a *app) topicCreate() *cobra.Command {
	cmd := &cobra.Command{
		Use: "create TOPIC", Short: "Create a topic, partitioned or not", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			partitions, err := cmd.Flags().GetUint32("partitions")
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.CreateTopic(ctx, &brokerv1.CreateTopicRequest{Topic: args[0], Partitions: partitions})
				return err
			})
		},
	}
	cmd.Flags().Uint32("partitions", 0, "number of partitions; 0 is a topic without partitions")
	return cmd
}

func (a *app) topicList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list [NAMESPACE]", Short: "List a namespace's topics; public/default if none is named", Args: maxArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			request := &brokerv1.ListTopicsRequest{}
			if len(args) == 1 {
				request.Namespace = args[0]
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.ListTopics(ctx, request)
				if err != nil {
					return err
				}
				if len(response.GetTopics()) == 0 && len(args) == 1 { // there may be no such namespace
					if _, err := c.GetNamespace(ctx, &brokerv1.GetNamespaceRequest{Namespace: args[0]}); err != nil {
						return err
					}
				}
				v := view{kind: "TopicList", columns: []string{"TOPIC", "PARTITIONS"}}
				for _, t := range response.GetTopics() {
					v.rows = append(v.rows, row{
						name:  t.GetTopic(),
						cells: []string{t.GetTopic(), strconv.FormatUint(uint64(t.GetPartitions()), 10)},
						data:  topicSummary{t.GetTopic(), t.GetPartitions()},
					})
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) topicDescribe() *cobra.Command {
	cmd := &cobra.Command{
		Use: "describe TOPIC", Short: "Tell what a topic or partition holds, and who serves it", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				t, err := c.DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: args[0]})
				if err != nil {
					return err
				}
				if t.GetPartitions() == 0 {
					return topicView(detailOf(t)).print(a.out, format)
				}
				d := partitionedDetail{topicSummary: topicSummary{t.GetTopic(), t.GetPartitions()}}
				for i := range t.GetPartitions() {
					p, err := c.DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: fmt.Sprintf("%s-partition-%d", t.GetTopic(), i)})
					if err != nil {
						return err
					}
					d.Details = append(d.Details, detailOf(p))
				}
				return partitionedView(d).print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func detailOf(t *brokerv1.DescribeTopicResponse) topicDetail {
	d := topicDetail{
		Topic: t.GetTopic(), Partitions: t.GetPartitions(), Broker: t.GetBrokerUrl(), Bundle: t.GetBundle(), Epoch: t.GetEpoch(),
		EarliestOffset: t.GetEarliestOffset(), NextOffset: t.GetNextOffset(), Bytes: t.GetBytes(),
		Ledgers: []ledgerRun{}, Producers: list(t.GetProducers()), Subscriptions: list(t.GetSubscriptions()),
		Consumers: t.GetConsumers(), RecoveredTailBytes: t.GetRecoveredTailBytes(),
	}
	for _, l := range t.GetLedgers() {
		d.Ledgers = append(d.Ledgers, ledgerRun{l.GetLedger(), l.GetState(), l.GetFirstOffset(), l.GetEndOffset(), l.GetBytes()})
	}
	return d
}

func (d topicDetail) offsets() string { return fmt.Sprintf("[%d, %d)", d.EarliestOffset, d.NextOffset) }

func topicView(d topicDetail) view {
	var ledgers []string
	for _, l := range d.Ledgers {
		end := "…"
		if l.EndOffset > 0 {
			end = decimal(l.EndOffset)
		}
		ledgers = append(ledgers, fmt.Sprintf("%d  %s  offsets [%d, %s)  %s", l.Ledger, l.State, l.FirstOffset, end, bytesText(l.Bytes)))
	}
	return view{
		kind: "Topic", single: true,
		columns: []string{"TOPIC", "PARTITIONS", "BROKER", "BUNDLE", "EPOCH", "OFFSETS", "BYTES", "LEDGERS", "PRODUCERS", "SUBSCRIPTIONS", "LAST TAKEOVER"},
		rows: []row{{
			name: d.Topic, data: d,
			cells: []string{
				d.Topic, strconv.FormatUint(uint64(d.Partitions), 10), orNone(d.Broker), orNone(d.Bundle), decimal(d.Epoch),
				d.offsets(), bytesText(d.Bytes), orNone(strings.Join(ledgers, "\n")),
				orNone(strings.Join(d.Producers, ", ")), orNone(strings.Join(d.Subscriptions, ", ")),
				bytesText(d.RecoveredTailBytes) + " of the open ledger's tail written again",
			},
		}},
	}
}

// partitionedView shows a line a partition.
func partitionedView(d partitionedDetail) view {
	partitions := make([]string, len(d.Details))
	for i, p := range d.Details {
		partitions[i] = fmt.Sprintf("%d  offsets %s  %s  %s  subscriptions: %s", i, p.offsets(), bytesText(p.Bytes), orNone(p.Broker), orNone(strings.Join(p.Subscriptions, ", ")))
	}
	return view{
		kind: "PartitionedTopic", single: true, columns: []string{"TOPIC", "PARTITIONS"},
		rows: []row{{name: d.Topic, data: d, cells: []string{d.Topic, strings.Join(partitions, "\n")}}},
	}
}

func (a *app) topicDelete() *cobra.Command {
	cmd := &cobra.Command{
		Use: "delete TOPIC", Short: "Delete a topic with its messages and subscriptions", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			force, err := cmd.Flags().GetBool("force")
			if err != nil {
				return err
			}
			if err := a.confirm(cmd, "topic", args[0]); err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.DeleteTopic(ctx, &brokerv1.DeleteTopicRequest{Topic: args[0], Force: force})
				return err
			})
		},
	}
	cmd.Flags().Bool("force", false, "delete even if producers or consumers are connected")
	addYesFlag(cmd)
	return cmd
}

func (a *app) topicUnload() *cobra.Command {
	return &cobra.Command{
		Use: "unload TOPIC", Short: "Close a topic or partition on its broker; its next use opens it again", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.UnloadTopic(ctx, &brokerv1.UnloadTopicRequest{Topic: args[0]})
				return err
			})
		},
	}
}

// list makes JSON print [] rather than null.
func list(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func addYesFlag(cmd *cobra.Command) {
	cmd.Flags().Bool("yes", false, "do not ask")
}

// confirm asks for the name of what is to be destroyed. Without a terminal it refuses rather than wait for an answer.
func (a *app) confirm(cmd *cobra.Command, kind, name string) error {
	return a.confirmTyped(cmd, fmt.Sprintf("This deletes %s %s for good.", kind, name), fmt.Sprintf("deleting %s %s", kind, name), name)
}

// confirmTyped says what is about to be done for good, and asks for the name of what it is done to.
func (a *app) confirmTyped(cmd *cobra.Command, statement, doing, name string) error {
	yes, err := cmd.Flags().GetBool("yes")
	if err != nil || yes {
		return err
	}
	if !isTerminal(a.in) {
		return settings.Usagef("%s needs --yes when there is no terminal to ask on", doing)
	}
	fmt.Fprintf(a.err, "%s Type its name to go on: ", statement)
	var typed string
	if _, err := fmt.Fscanln(&interruptible{ctx: cmd.Context(), in: a.in}, &typed); cmd.Context().Err() != nil {
		return context.Cause(cmd.Context()) //nolint:wrapcheck // the person knows what was asked
	} else if err != nil || typed != name {
		return settings.Usagef("nothing was done: %q is not %q", typed, name)
	}
	return nil
}
