package meta_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"

	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

// A caller that gives up is no sign that etcd is away, and is not logged as one.
func TestGivingUpIsNotReportedAsAnOutage(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	defer silent.Close()
	cli, err := embedetcd.NewClient([]string{silent.Addr().String()})
	check(t, err)
	defer cli.Close()
	var lines bytes.Buffer
	s := meta.New(cli, "silent", slog.New(slog.NewTextHandler(&lines, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() {
		_, err := s.GetLedger(ctx, 1)
		asked <- err
	}()
	conn, err := silent.Accept() // the question is on its way
	check(t, err)
	defer conn.Close()
	cancel()
	if err := <-asked; !errors.Is(err, meta.ErrUnavailable) || lines.Len() > 0 {
		t.Fatalf("%v; logged %s", err, &lines)
	}
}
