package standalone_test

import (
	"errors"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/standalone"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A second process on the same directory is told so at once, and the first one is not disturbed.
func TestADirectoryInUseIsRefused(t *testing.T) {
	t.Parallel()
	cfg := standalone.Config{Dir: t.TempDir(), SegmentSize: 16 << 20, UnsafeNoFsync: true}
	first, err := standalone.Start(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := standalone.Start(t.Context(), cfg, nil); !errors.Is(err, vfs.ErrLocked) || !strings.Contains(err.Error(), cfg.Dir) {
		t.Fatalf("second start: %v", err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := standalone.Start(t.Context(), cfg, nil)
	if err != nil {
		t.Fatalf("start after the first one ended: %v", err)
	}
	if err := again.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}
