package brokertest_test

import (
	"errors"

	"github.com/penstock-mq/penstock/pkg/client"
)

func asClient(err error, e **client.Error) bool { return errors.As(err, e) }
