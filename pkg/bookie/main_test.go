package bookie

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

// etcd is shared by all tests; each uses a cluster of its own.
var etcd *embedetcd.Server

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "bookie-test-")
		if err != nil {
			panic(err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		if etcd, err = embedetcd.Start(context.Background(), embedetcd.Config{Dir: dir, UnsafeNoFsync: true}); err != nil {
			panic(err)
		}
		code := m.Run()
		if err := etcd.Close(); err != nil {
			panic(err)
		}
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	}())
}

var clusters atomic.Int64

func uniqueCluster() string { return fmt.Sprintf("test-%d", clusters.Add(1)) }
