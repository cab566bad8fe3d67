package command

import (
	"context"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
)

// admin runs calls of the admin API within --timeout.
func (a *app) admin(ctx context.Context, f func(context.Context, brokerv1.AdminClient) error) error {
	return a.connect(ctx, func(ctx context.Context, c *client.Client) error {
		ctx, done := a.opening(ctx)
		err := f(ctx, c.Admin())
		done()
		return err
	})
}
