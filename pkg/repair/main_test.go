package repair_test

import (
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
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

var clusters atomic.Int64

func uniqueCluster() string { return fmt.Sprintf("test-%d", clusters.Add(1)) }
