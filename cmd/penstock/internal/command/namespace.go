package command

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

type policies struct {
	Ensemble                  *uint32 `json:"ensemble,omitempty"`
	WriteQuorum               *uint32 `json:"writeQuorum,omitempty"`
	AckQuorum                 *uint32 `json:"ackQuorum,omitempty"`
	MinZones                  *uint32 `json:"minZones,omitempty"`
	RetentionTime             string  `json:"retentionTime,omitempty"`
	RetentionBytes            *uint64 `json:"retentionBytes,omitempty"`
	MessageTTL                string  `json:"messageTTL,omitempty"`
	BacklogBytes              *uint64 `json:"backlogBytes,omitempty"`
	BacklogAction             string  `json:"backlogAction,omitempty"`
	AutoCreateTopics          *bool   `json:"autoCreateTopics,omitempty"`
	MaxUnackedPerSubscription *uint32 `json:"maxUnackedPerSubscription,omitempty"`
	MaxUnackedPerConsumer     *uint32 `json:"maxUnackedPerConsumer,omitempty"`
}

type bundleDetail struct {
	ID        string `json:"id"`
	FirstHash uint32 `json:"firstHash"`
	LastHash  uint32 `json:"lastHash"`
	Broker    string `json:"broker"`
	Epoch     uint64 `json:"epoch"`
}

type namespaceDetail struct {
	Namespace string         `json:"namespace"`
	Policies  policies       `json:"policies"`
	Bundles   []bundleDetail `json:"bundles"`
}

func (a *app) namespaceCommand() *cobra.Command {
	cmd := group("namespace", "Namespaces: policies and bundles of topics")
	cmd.AddCommand(a.namespaceCreate(), a.namespaceList(), a.namespaceGet(), a.namespaceUpdate(), a.namespaceDelete())
	return cmd
}

func (a *app) namespaceCreate() *cobra.Command {
	cmd := &cobra.Command{
		Use: "create TENANT/NAMESPACE", Short: "Create a namespace", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			bundles, err := cmd.Flags().GetUint32("bundles")
			if err != nil {
				return err
			}
			p := &brokerv1.Policies{}
			if err := setPolicies(cmd, p); err != nil {
				return err
			}
			force, err := cmd.Flags().GetBool("force")
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.CreateNamespace(ctx, &brokerv1.CreateNamespaceRequest{Namespace: args[0], Bundles: bundles, Policies: p, Force: force})
				return err
			})
		},
	}
	cmd.Flags().Uint32("bundles", 0, "number of bundles, the unit of ownership; 0 is the default of 16")
	addPolicyFlags(cmd)
	return cmd
}

func (a *app) namespaceList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list [TENANT]", Short: "List namespaces, of one tenant or all", Args: maxArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			request := &brokerv1.ListNamespacesRequest{Tenant: strings.Join(args, "")}
			return a.printNames(cmd, "NamespaceList", "NAMESPACE", func(ctx context.Context, c brokerv1.AdminClient) ([]string, error) {
				response, err := c.ListNamespaces(ctx, request)
				if err != nil || len(response.GetNamespaces()) > 0 || len(args) == 0 {
					return response.GetNamespaces(), err
				}
				tenants, err := c.ListTenants(ctx, &brokerv1.ListTenantsRequest{}) // there may be no such tenant
				if err == nil && !slices.Contains(tenants.GetTenants(), args[0]) {
					err = &missingError{fmt.Sprintf("there is no tenant %q%s (penstock tenant list shows them)", args[0], didYouMean(args[0], tenants.GetTenants()))}
				}
				return nil, err
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) namespaceGet() *cobra.Command {
	cmd := &cobra.Command{
		Use: "get TENANT/NAMESPACE", Short: "Show a namespace's policies and bundles", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				n, err := c.GetNamespace(ctx, &brokerv1.GetNamespaceRequest{Namespace: args[0]})
				if err != nil {
					return err
				}
				return namespaceView(n).print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func namespaceView(n *brokerv1.GetNamespaceResponse) view {
	d := namespaceDetail{Namespace: n.GetNamespace(), Policies: policiesOf(n.GetPolicies()), Bundles: []bundleDetail{}}
	var bundles []string
	for _, b := range n.GetBundles() {
		d.Bundles = append(d.Bundles, bundleDetail{b.GetId(), b.GetFirstHash(), b.GetLastHash(), b.GetBrokerUrl(), b.GetEpoch()})
		bundles = append(bundles, fmt.Sprintf("%s  [%08x, %08x]  epoch %d  %s", b.GetId(), b.GetFirstHash(), b.GetLastHash(), b.GetEpoch(), orNone(b.GetBrokerUrl())))
	}
	return view{
		kind: "Namespace", single: true, columns: []string{"NAMESPACE", "POLICIES", "BUNDLES"},
		rows: []row{{name: d.Namespace, data: d, cells: []string{d.Namespace, d.Policies.text(), strings.Join(bundles, "\n")}}},
	}
}

func policiesOf(p *brokerv1.Policies) policies {
	d := policies{AutoCreateTopics: p.AutoCreateTopics, RetentionBytes: p.RetentionBytes, BacklogBytes: p.BacklogBytes}
	d.Ensemble, d.WriteQuorum, d.AckQuorum, d.MinZones = p.Ensemble, p.WriteQuorum, p.AckQuorum, p.MinZones
	d.MaxUnackedPerSubscription, d.MaxUnackedPerConsumer = p.MaxUnackedPerSubscription, p.MaxUnackedPerConsumer
	if p.GetRetentionTime() != nil {
		d.RetentionTime = p.GetRetentionTime().AsDuration().String()
	}
	if p.GetMessageTtl() != nil {
		d.MessageTTL = p.GetMessageTtl().AsDuration().String()
	}
	if p.GetBacklogAction() != brokerv1.BacklogAction_BACKLOG_ACTION_UNSPECIFIED {
		d.BacklogAction = strings.ToLower(strings.TrimPrefix(p.GetBacklogAction().String(), "BACKLOG_ACTION_"))
	}
	return d
}

// text lists what is set, in the words of the flags.
func (p policies) text() string {
	var lines []string
	number := func(flag string, v *uint32) {
		if v != nil {
			lines = append(lines, flag+"="+strconv.FormatUint(uint64(*v), 10))
		}
	}
	size := func(flag string, v *uint64) {
		if v != nil {
			lines = append(lines, flag+"="+strconv.FormatUint(*v, 10))
		}
	}
	word := func(flag, v string) {
		if v != "" {
			lines = append(lines, flag+"="+v)
		}
	}
	number("ensemble", p.Ensemble)
	number("write-quorum", p.WriteQuorum)
	number("ack-quorum", p.AckQuorum)
	number("min-zones", p.MinZones)
	word("retention-time", p.RetentionTime)
	size("retention-bytes", p.RetentionBytes)
	word("message-ttl", p.MessageTTL)
	size("backlog-bytes", p.BacklogBytes)
	word("backlog-action", p.BacklogAction)
	if p.AutoCreateTopics != nil {
		word("auto-create-topics", strconv.FormatBool(*p.AutoCreateTopics))
	}
	number("max-unacked-per-subscription", p.MaxUnackedPerSubscription)
	number("max-unacked-per-consumer", p.MaxUnackedPerConsumer)
	if len(lines) == 0 {
		return "the cluster's defaults"
	}
	return strings.Join(lines, "\n")
}

func (a *app) namespaceUpdate() *cobra.Command {
	cmd := &cobra.Command{
		Use: "update TENANT/NAMESPACE", Short: "Change policies; those not named stay", Args: exactArgs(1),
		Example: "  penstock namespace update public/default --retention-time 24h\n  penstock namespace update public/default --unset retention-time,message-ttl",
		RunE: func(cmd *cobra.Command, args []string) error {
			unset, err := cmd.Flags().GetStringSlice("unset")
			if err != nil {
				return err
			}
			if err := checkUpdate(cmd, unset); err != nil {
				return err
			}
			force, err := cmd.Flags().GetBool("force")
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				n, err := c.GetNamespace(ctx, &brokerv1.GetNamespaceRequest{Namespace: args[0]})
				if err != nil {
					return err
				}
				p := n.GetPolicies()
				if p == nil {
					p = &brokerv1.Policies{}
				}
				if err := setPolicies(cmd, p); err != nil {
					return err
				}
				for _, name := range unset {
					unsetPolicy(p, name)
				}
				_, err = c.UpdateNamespace(ctx, &brokerv1.UpdateNamespaceRequest{Namespace: args[0], Policies: p, Force: force})
				return err
			})
		},
	}
	addPolicyFlags(cmd)
	cmd.Flags().StringSlice("unset", nil, "policies, named like their flags, that go back to the cluster's default")
	registerFlagCompletion(cmd, "unset", policyNames)
	return cmd
}

// policyNames are the flags of addPolicyFlags: the fields of Policies.
var policyNames = func() (names []string) {
	fields := (&brokerv1.Policies{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		names = append(names, strings.ReplaceAll(string(fields.Get(i).Name()), "_", "-"))
	}
	return names
}()

// checkUpdate finds out whether the command line names a change, and one that can be made.
func checkUpdate(cmd *cobra.Command, unset []string) error {
	changes := len(unset) > 0
	for _, name := range policyNames {
		changes = changes || cmd.Flags().Changed(name)
	}
	if !changes {
		return settings.Usagef("nothing to change: name a policy (see %s --help)", cmd.CommandPath())
	}
	for _, name := range unset {
		switch {
		case !slices.Contains(policyNames, name):
			return settings.Usagef("--unset: there is no policy %q%s", name, didYouMean(name, policyNames))
		case cmd.Flags().Changed(name):
			return settings.Usagef("--%s and --unset %s exclude each other", name, name)
		}
	}
	return nil
}

func unsetPolicy(p *brokerv1.Policies, name string) {
	m := p.ProtoReflect()
	m.Clear(m.Descriptor().Fields().ByName(protoreflect.Name(strings.ReplaceAll(name, "-", "_"))))
}

func (a *app) namespaceDelete() *cobra.Command {
	cmd := &cobra.Command{
		Use: "delete TENANT/NAMESPACE", Short: "Delete a namespace that has no topics", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.confirm(cmd, "namespace", args[0]); err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.DeleteNamespace(ctx, &brokerv1.DeleteNamespaceRequest{Namespace: args[0]})
				return err
			})
		},
	}
	addYesFlag(cmd)
	return cmd
}

func addPolicyFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Uint32("ensemble", 0, "bookies that a ledger is spread over")
	f.Uint32("write-quorum", 0, "copies of each entry")
	f.Uint32("ack-quorum", 0, "copies that must be on disk before an entry counts")
	f.Uint32("min-zones", 0, "zones that the ack quorum must span")
	f.Duration("retention-time", 0, "acknowledged messages are kept at least this long")
	f.Uint64("retention-bytes", 0, "acknowledged messages are kept while a topic holds at most so many bytes")
	f.Duration("message-ttl", 0, "older messages are acknowledged unread")
	f.Uint64("backlog-bytes", 0, "most bytes a subscription's backlog may have")
	f.String("backlog-action", "", "what happens beyond that: refuse (publishing) or evict (the oldest messages)")
	f.Bool("auto-create-topics", true, "whether naming a topic creates it")
	f.Uint32("max-unacked-per-subscription", 0, "delivered, unacknowledged messages before delivery pauses")
	f.Uint32("max-unacked-per-consumer", 0, "the same for one consumer")
	f.Bool("force", false, "also if the bookies there are now cannot hold so many copies")
	registerFlagCompletion(cmd, "backlog-action", []string{"refuse", "evict"})
}

// setPolicies sets in p what the command line names.
func setPolicies(cmd *cobra.Command, p *brokerv1.Policies) error {
	number := func(flag string, to **uint32) error {
		v, err := cmd.Flags().GetUint32(flag)
		if err == nil && cmd.Flags().Changed(flag) {
			*to = &v
		}
		return err
	}
	size := func(flag string, to **uint64) error {
		v, err := cmd.Flags().GetUint64(flag)
		if err == nil && cmd.Flags().Changed(flag) {
			*to = &v
		}
		return err
	}
	span := func(flag string, to **durationpb.Duration) error {
		v, err := cmd.Flags().GetDuration(flag)
		if err == nil && cmd.Flags().Changed(flag) {
			if v < 0 {
				return settings.Usagef("--%s: %v is below 0", flag, time.Duration(v))
			}
			*to = durationpb.New(v)
		}
		return err
	}
	for _, err := range []error{
		number("ensemble", &p.Ensemble), number("write-quorum", &p.WriteQuorum), number("ack-quorum", &p.AckQuorum),
		number("min-zones", &p.MinZones), span("retention-time", &p.RetentionTime), size("retention-bytes", &p.RetentionBytes),
		span("message-ttl", &p.MessageTtl), size("backlog-bytes", &p.BacklogBytes),
		number("max-unacked-per-subscription", &p.MaxUnackedPerSubscription), number("max-unacked-per-consumer", &p.MaxUnackedPerConsumer),
	} {
		if err != nil {
			return err
		}
	}
	if cmd.Flags().Changed("auto-create-topics") {
		v, err := cmd.Flags().GetBool("auto-create-topics")
		if err != nil {
			return err
		}
		p.AutoCreateTopics = &v
	}
	if cmd.Flags().Changed("backlog-action") {
		v, err := cmd.Flags().GetString("backlog-action")
		if err != nil {
			return err
		}
		action, ok := brokerv1.BacklogAction_value["BACKLOG_ACTION_"+strings.ToUpper(v)]
		if !ok || action == 0 {
			return settings.Usagef("--backlog-action: %q is neither refuse nor evict", v)
		}
		p.BacklogAction = brokerv1.BacklogAction(action)
	}
	return nil
}

// printNames lists things that have nothing but a name.
func (a *app) printNames(cmd *cobra.Command, kind, column string, fetch func(context.Context, brokerv1.AdminClient) ([]string, error)) error {
	format, err := outputFormat(cmd)
	if err != nil {
		return err
	}
	return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
		names, err := fetch(ctx, c)
		if err != nil {
			return err
		}
		v := view{kind: kind, columns: []string{column}}
		for _, n := range names {
			v.rows = append(v.rows, row{name: n, cells: []string{n}, data: struct {
				Name string `json:"name"`
			}{n}})
		}
		return v.print(a.out, format)
	})
}
