package command

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

type subscriptionSummary struct {
	Name       string   `json:"name"`
	Type       string   `json:"type"`
	AckFloor   uint64   `json:"ackFloor"`
	Backlog    uint64   `json:"backlog"`
	Unacked    uint64   `json:"unacked"`
	AckHoles   uint64   `json:"ackHoles"`
	LagSeconds float64  `json:"lagSeconds"`
	Consumers  []string `json:"consumers"`
	Partition  string   `json:"partition,omitempty"` // of a topic with partitions
}

type consumerState struct {
	Name       string `json:"name"`
	Active     bool   `json:"active"`
	Permits    int64  `json:"permits"`
	Unacked    uint64 `json:"unacked"`
	ClientInfo string `json:"clientInfo"`
}

type subscriptionDetail struct {
	subscriptionSummary
	NextOffset    uint64          `json:"nextOffset"`
	WaitingReason string          `json:"waitingReason"`
	WaitingDetail string          `json:"waitingDetail"`
	States        []consumerState `json:"consumerStates"`
}

func (a *app) subscriptionCommand() *cobra.Command {
	cmd := group("subscription", "Inspect, move and delete subscriptions")
	cmd.AddCommand(a.subscriptionCreate(), a.subscriptionList(), a.subscriptionDescribe(), a.subscriptionWhy(), a.subscriptionSeek(), a.subscriptionDelete())
	return cmd
}

func typeText(t brokerv1.SubscriptionType) string {
	if t == brokerv1.SubscriptionType_SUBSCRIPTION_TYPE_UNSPECIFIED {
		return "-"
	}
	return strings.ToLower(strings.TrimPrefix(t.String(), "SUBSCRIPTION_TYPE_"))
}

func summaryOf(s *brokerv1.Subscription) subscriptionSummary {
	return subscriptionSummary{
		Name: s.GetName(), Type: typeText(s.GetType()), AckFloor: s.GetAckFloor(), Backlog: s.GetBacklog(), Unacked: s.GetUnacked(),
		AckHoles: s.GetAckHoles(), LagSeconds: s.GetLagSeconds(), Consumers: list(s.GetConsumers()),
	}
}

func (a *app) subscriptionCreate() *cobra.Command {
	cmd := &cobra.Command{
		Use: "create TOPIC SUBSCRIPTION", Short: "Create a subscription before any consumer comes", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			start, err := startFlag(cmd, "from")
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				p, err := eachPartition(ctx, c, args[0], func(topic string) error {
					_, err := c.CreateSubscription(ctx, &brokerv1.CreateSubscriptionRequest{Topic: topic, Subscription: args[1], Start: start})
					return err
				})
				return a.tellParts("created", p, err)
			})
		},
	}
	addStartFlag(cmd, "from", "latest", "where it starts")
	return cmd
}

func (a *app) subscriptionList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list TOPIC", Short: "List a topic's subscriptions", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				v := view{
					kind: "SubscriptionList", wide: 2,
					columns: []string{"SUBSCRIPTION", "TYPE", "BACKLOG", "UNACKED", "LAG", "CONSUMERS", "ACK FLOOR", "ACK HOLES"},
				}
				var from []string // the partition of each row
				p, err := eachPartition(ctx, c, args[0], func(topic string) error {
					response, err := c.ListSubscriptions(ctx, &brokerv1.ListSubscriptionsRequest{Topic: topic})
					for _, s := range response.GetSubscriptions() {
						d := summaryOf(s)
						from = append(from, topic)
						v.rows = append(v.rows, row{name: d.Name, data: d, cells: []string{
							d.Name, d.Type, decimal(d.Backlog), decimal(d.Unacked), fmt.Sprintf("%.1f s", d.LagSeconds),
							strconv.Itoa(len(d.Consumers)), decimal(d.AckFloor), decimal(d.AckHoles),
						}})
					}
					return err
				})
				if err != nil {
					return err
				}
				if p.partitioned {
					v.columns = slices.Insert(v.columns, 0, "PARTITION")
					for i, topic := range from {
						d, _ := v.rows[i].data.(subscriptionSummary)
						d.Partition = topic
						v.rows[i].data, v.rows[i].cells = d, slices.Insert(v.rows[i].cells, 0, topic)
					}
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// describeSubscription shows a subscription, or what it is in each partition, by the row that of makes of one.
func (a *app) describeSubscription(cmd *cobra.Command, args []string, v view, of func(r *brokerv1.DescribeSubscriptionResponse, partition string) row) error {
	format, err := outputFormat(cmd)
	if err != nil {
		return err
	}
	return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
		var found []*brokerv1.DescribeSubscriptionResponse
		var from []string
		p, err := eachPartition(ctx, c, args[0], func(topic string) error {
			response, err := c.DescribeSubscription(ctx, &brokerv1.DescribeSubscriptionRequest{Topic: topic, Subscription: args[1]})
			if err == nil {
				found, from = append(found, response), append(from, topic)
			}
			return err
		})
		if err != nil {
			return err
		}
		for i, r := range found {
			v.rows = append(v.rows, of(r, p.partitionOf(from[i])))
		}
		v.single = !p.partitioned
		if p.partitioned {
			v.kind = "Partitioned" + v.kind
			v.columns = slices.Insert(slices.Clone(v.columns), 0, "PARTITION")
		}
		return v.print(a.out, format)
	})
}

func (a *app) subscriptionDescribe() *cobra.Command {
	cmd := &cobra.Command{
		Use: "describe TOPIC SUBSCRIPTION", Short: "Tell where a subscription stands and who consumes it", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.describeSubscription(cmd, args, view{kind: "Subscription", lines: true, columns: []string{
				"SUBSCRIPTION", "TYPE", "BACKLOG", "UNACKED", "ACK FLOOR", "ACK HOLES", "NEXT OFFSET", "LAG", "WAITS FOR", "CONSUMERS",
			}}, subscriptionRow)
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func subscriptionRow(r *brokerv1.DescribeSubscriptionResponse, partition string) row {
	d := subscriptionDetail{
		subscriptionSummary: summaryOf(r.GetSubscription()), NextOffset: r.GetNextOffset(),
		WaitingReason: r.GetWaitingReason(), WaitingDetail: r.GetWaitingDetail(), States: []consumerState{},
	}
	d.Partition = partition
	var consumers []string
	for _, c := range r.GetConsumers() {
		d.States = append(d.States, consumerState{c.GetName(), c.GetActive(), c.GetPermits(), c.GetUnacked(), c.GetClientInfo()})
		role := "standby"
		if c.GetActive() {
			role = "active"
		}
		consumers = append(consumers, fmt.Sprintf("%s  %s  %d permits  %d unacked", c.GetName(), role, c.GetPermits(), c.GetUnacked()))
	}
	return row{name: d.Name, data: d, cells: withPartition(
		partition, d.Name, d.Type, decimal(d.Backlog), decimal(d.Unacked), decimal(d.AckFloor), decimal(d.AckHoles), decimal(d.NextOffset),
		fmt.Sprintf("%.1f s", d.LagSeconds), d.WaitingReason+": "+d.WaitingDetail, orNone(strings.Join(consumers, "\n")),
	)}
}

// withPartition puts the partition in front of a row's cells, if there is one.
func withPartition(partition string, cells ...string) []string {
	if partition == "" {
		return cells
	}
	return append([]string{partition}, cells...)
}

// subscriptionWait is what a subscription waits for.
type subscriptionWait struct {
	Subscription string `json:"subscription"`
	Reason       string `json:"reason"`
	Detail       string `json:"detail"`
	Partition    string `json:"partition,omitempty"` // of a topic with partitions
}

func (a *app) subscriptionWhy() *cobra.Command {
	cmd := &cobra.Command{
		Use: "why TOPIC SUBSCRIPTION", Short: "Tell why the next message is not being delivered", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			v := view{kind: "SubscriptionWait", plain: true, columns: []string{"REASON", "DETAIL"}}
			return a.describeSubscription(cmd, args, v, func(r *brokerv1.DescribeSubscriptionResponse, partition string) row {
				d := subscriptionWait{r.GetSubscription().GetName(), r.GetWaitingReason(), r.GetWaitingDetail(), partition}
				return row{name: d.Subscription, data: d, cells: withPartition(partition, d.Reason, d.Detail)}
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) subscriptionSeek() *cobra.Command {
	cmd := &cobra.Command{
		Use: "seek TOPIC SUBSCRIPTION --to WHERE", Short: "Move a subscription; its consumers reconnect", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !cmd.Flags().Changed("to") {
				return settings.Usagef("where to is missing: --to %s", startForms)
			}
			to, err := startFlag(cmd, "to")
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				p, err := eachPartition(ctx, c, args[0], func(topic string) error {
					response, err := c.SeekSubscription(ctx, &brokerv1.SeekSubscriptionRequest{Topic: topic, Subscription: args[1], To: to})
					if err == nil {
						a.progress("%s of %s delivers offset %d next", args[1], topic, response.GetOffset())
					}
					return err
				})
				return a.tellParts("moved", p, err)
			})
		},
	}
	addStartFlag(cmd, "to", "", "where to")
	return cmd
}

func (a *app) subscriptionDelete() *cobra.Command {
	cmd := &cobra.Command{
		Use: "delete TOPIC SUBSCRIPTION", Short: "Forget a subscription and what it acknowledged", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			force, err := cmd.Flags().GetBool("force")
			if err != nil {
				return err
			}
			if err := a.confirm(cmd, "subscription", args[1]); err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				p, err := eachPartition(ctx, c, args[0], func(topic string) error {
					_, err := c.DeleteSubscription(ctx, &brokerv1.DeleteSubscriptionRequest{Topic: topic, Subscription: args[1], Force: force})
					return err
				})
				return a.tellParts("deleted", p, err)
			})
		},
	}
	cmd.Flags().Bool("force", false, "delete even if consumers are connected")
	addYesFlag(cmd)
	return cmd
}

// tellParts says in how many partitions something was done.
func (a *app) tellParts(what string, p parts, err error) error {
	if err == nil && p.partitioned {
		a.progress("%s in %d of %d partitions", what, p.done, p.asked)
	}
	return err
}
