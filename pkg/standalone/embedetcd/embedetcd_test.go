package embedetcd_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What was written before a stop is there after the next start on the same directory.
func TestRestartKeepsData(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := time.Now()
	first, err := embedetcd.Start(t.Context(), embedetcd.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("ready after %v", time.Since(start))
	if _, err := first.Client().Put(t.Context(), "/k", "v"); err != nil {
		t.Fatal(err)
	}
	t.Logf("first put after %v", time.Since(start))
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := embedetcd.Start(t.Context(), embedetcd.Config{Dir: dir, UnsafeNoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	got, err := second.Client().Get(t.Context(), "/k")
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "v" {
		t.Fatalf("got %v, want the value put before the restart", got.Kvs)
	}
}

// A directory is required, and a port in use is an error that names the directory, not a hang.
func TestRefusals(t *testing.T) {
	t.Parallel()
	if _, err := embedetcd.Start(t.Context(), embedetcd.Config{}); err == nil {
		t.Fatal("started without a directory")
	}
	first, err := embedetcd.Start(t.Context(), embedetcd.Config{Dir: t.TempDir(), UnsafeNoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	second, err := embedetcd.Start(t.Context(), embedetcd.Config{Dir: t.TempDir(), Listen: first.Endpoints()[0]})
	if err == nil {
		_ = second.Close()
		t.Fatal("two servers on one port")
	}
}
