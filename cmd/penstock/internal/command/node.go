package command

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	bookiev1 "github.com/penstock-mq/penstock/api/penstock/bookie/v1"
	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

type brokerSummary struct {
	ID      string    `json:"id"`
	URL     string    `json:"url"`
	HTTP    string    `json:"http"`
	Version string    `json:"version"`
	Bundles uint32    `json:"bundles"`
	Started time.Time `json:"started"`
}

type bookieSummary struct {
	ID          string `json:"id"`
	StorageUUID string `json:"storageUUID"`
	State       string `json:"state"`
	Address     string `json:"address"`
	HTTP        string `json:"http"`
	Zone        string `json:"zone"`
	Host        string `json:"host"`
	FreeBytes   uint64 `json:"freeBytes"`
	TotalBytes  uint64 `json:"totalBytes"`
	Ledgers     uint64 `json:"ledgers"`
	Sync        string `json:"sync"`
	Version     string `json:"version"`
	Mark        string `json:"mark"`
	Operation   string `json:"operation"`
}

func bookieOf(b *brokerv1.BookieInfo) bookieSummary {
	return bookieSummary{
		b.GetId(), b.GetStorageUuid(), b.GetState(), b.GetAddress(), b.GetHttp(), b.GetZone(), b.GetHost(),
		b.GetFreeBytes(), b.GetTotalBytes(), b.GetLedgers(), b.GetSync(), b.GetVersion(), b.GetMark(), b.GetOperation(),
	}
}

// stateText is the state, and what the bookie is marked for.
func (d bookieSummary) stateText() string {
	if d.Mark == "" {
		return d.State
	}
	return d.State + ", " + d.Mark
}

func (a *app) brokerCommand() *cobra.Command {
	cmd := group("broker", "Brokers: processes that serve topics")
	cmd.AddCommand(a.brokerList())
	return cmd
}

func (a *app) brokerList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List live brokers", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.ListBrokers(ctx, &brokerv1.ListBrokersRequest{})
				if err != nil {
					return err
				}
				v := view{kind: "BrokerList", wide: 2, columns: []string{"BROKER", "URL", "BUNDLES", "UP", "HTTP", "VERSION"}}
				for _, b := range response.GetBrokers() {
					d := brokerSummary{b.GetId(), b.GetUrl(), b.GetHttp(), b.GetVersion(), b.GetBundles(), b.GetStarted().AsTime()}
					v.rows = append(v.rows, row{name: d.ID, data: d, cells: []string{
						d.ID, d.URL, strconv.FormatUint(uint64(d.Bundles), 10), time.Since(d.Started).Round(time.Second).String(), orNone(d.HTTP), d.Version,
					}})
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) bookieCommand() *cobra.Command {
	cmd := group("bookie", "Bookies: processes that store entries")
	cmd.AddCommand(a.bookieList(), a.bookieDescribe(), a.bookieDrain(), a.bookieDecommission(), a.bookieRecover(), a.bookieEndLimbo())
	return cmd
}

func (a *app) bookieList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List every bookie the cluster knows, live or not", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				response, err := c.ListBookies(ctx, &brokerv1.ListBookiesRequest{})
				if err != nil {
					return err
				}
				v := view{
					kind: "BookieList", wide: 5,
					columns: []string{"BOOKIE", "STATE", "ADDRESS", "ZONE", "FREE", "LEDGERS", "HOST", "STORAGE UUID", "SYNC", "HTTP", "VERSION"},
				}
				for _, b := range response.GetBookies() {
					d := bookieOf(b)
					v.rows = append(v.rows, row{name: d.ID, data: d, cells: []string{
						d.ID, d.stateText(), orNone(d.Address), orNone(d.Zone), fmt.Sprintf("%s of %s", bytesText(d.FreeBytes), bytesText(d.TotalBytes)),
						decimal(d.Ledgers), orNone(d.Host), d.StorageUUID, orNone(d.Sync), orNone(d.HTTP), orNone(d.Version),
					}})
				}
				return v.print(a.out, format)
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) bookieEndLimbo() *cobra.Command {
	var request bookiev1.EndLimboRequest
	cmd := &cobra.Command{
		Use: "end-limbo CONTROL-ADDRESS", Short: "Give up entries that a bookie may have lost", Args: exactArgs(1),
		Long: "End the limbo of ledgers on one bookie, named by the host:port of its control calls (--grpc-listen). A ledger in limbo may have lost " +
			"acknowledged entries there, so that the bookie answers \"unknown\" for what it does not find, and the ledger cannot be closed unless other " +
			"bookies know. Afterwards it answers \"absent\", and what is on no other disk is given up for good.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if request.GetAll() == (len(request.GetLedgers()) > 0) {
				return settings.Usagef("name ledgers with --ledger, or give --all")
			}
			conn, err := grpc.NewClient(args[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return settings.Usagef("control address: %v", err)
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
			defer cancel()
			reply, err := bookiev1.NewBookieClient(conn).EndLimbo(ctx, &request)
			if err != nil {
				return fmt.Errorf("end limbo: %w", err)
			}
			for _, l := range reply.GetLedgers() {
				if _, err := fmt.Fprintln(a.out, l); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().Func("ledger", "ledger to end the limbo of; may be repeated", func(text string) error {
		id, err := strconv.ParseUint(text, 10, 63)
		request.Ledgers = append(request.Ledgers, id)
		return err
	})
	cmd.Flags().BoolVar(&request.All, "all", false, "all ledgers that are in limbo there")
	return cmd
}
