//go:build linux && !noroot

package integration

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-mq/penstock/integration/volume"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/standalone"
)

// A developer's disk is nearly full of other things for years, and has room for a cluster all the same.
func TestStandaloneOnACrowdedDisk(t *testing.T) {
	t.Parallel()
	v := newVolume(t, volume.Ext4, 8<<10)
	var now unix.Statfs_t
	if err := unix.Statfs(v.Dir(), &now); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(v.Dir(), "others"))
	if err != nil {
		t.Fatal(err)
	}
	const left = 4 // percent
	all, free := int64(now.Blocks)*now.Bsize, int64(now.Bavail)*now.Bsize
	if err := unix.Fallocate(int(f.Fd()), 0, 0, free-all*left/100); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := standalone.Start(t.Context(), standalone.Config{Dir: filepath.Join(v.Dir(), "data"), UnsafeNoFsync: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	k, err := client.Connect(t.Context(), c.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close(t.Context()) }()
	p, err := k.Producer(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(t.Context(), &client.Message{Value: []byte("x")}); err != nil {
		t.Fatal(err)
	}
}
