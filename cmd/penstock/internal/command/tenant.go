package command

import (
	"context"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

func (a *app) tenantCommand() *cobra.Command {
	cmd := group("tenant", "Tenants: owners of namespaces")
	cmd.AddCommand(a.tenantCreate(), a.tenantList(), a.tenantDelete())
	return cmd
}

func (a *app) tenantCreate() *cobra.Command {
	return &cobra.Command{
		Use: "create TENANT", Short: "Create a tenant", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.CreateTenant(ctx, &brokerv1.CreateTenantRequest{Tenant: args[0]})
				return err
			})
		},
	}
}

func (a *app) tenantList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List tenants", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.printNames(cmd, "TenantList", "TENANT", func(ctx context.Context, c brokerv1.AdminClient) ([]string, error) {
				response, err := c.ListTenants(ctx, &brokerv1.ListTenantsRequest{})
				return response.GetTenants(), err
			})
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) tenantDelete() *cobra.Command {
	cmd := &cobra.Command{
		Use: "delete TENANT", Short: "Delete a tenant that has no namespaces", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.confirm(cmd, "tenant", args[0]); err != nil {
				return err
			}
			return a.admin(cmd.Context(), func(ctx context.Context, c brokerv1.AdminClient) error {
				_, err := c.DeleteTenant(ctx, &brokerv1.DeleteTenantRequest{Tenant: args[0]})
				return err
			})
		},
	}
	addYesFlag(cmd)
	return cmd
}
