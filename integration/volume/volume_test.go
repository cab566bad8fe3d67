//go:build linux && !noroot

package volume

import (
	"os"
	"path/filepath"
	"testing"
)

// What was synced survives a cut, what was not is gone, and what comes after it fails.
func TestCut(t *testing.T) {
	t.Parallel()
	for _, kind := range Kinds() {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			v, err := New(kind, t.TempDir(), 320<<20)
			must(t, err)
			defer func() { must(t, v.Close()) }()
			for _, how := range []How{DropLog, KeepLog} {
				dir := filepath.Join(v.Dir(), "data")
				must(t, os.MkdirAll(dir, 0o700))
				synced, err := os.Create(filepath.Join(dir, "synced"))
				must(t, err)
				lost, err := os.Create(filepath.Join(dir, "lost"))
				must(t, err)
				_, err = synced.WriteString("here")
				must(t, err)
				must(t, synced.Sync())
				must(t, syncDir(dir))
				must(t, syncDir(v.Dir()))
				_, err = lost.WriteString("gone")
				must(t, err)
				must(t, v.Cut(how))
				if _, err := synced.WriteString("more"); err == nil && synced.Sync() == nil {
					t.Errorf("%v: a write was synced without power", how)
				}
				_ = synced.Close()
				_ = lost.Close()
				must(t, v.Remount())
				if b, err := os.ReadFile(filepath.Join(dir, "synced")); err != nil || string(b) != "here" {
					t.Errorf("%v: %q, %v", how, b, err)
				}
				if b, err := os.ReadFile(filepath.Join(dir, "lost")); err == nil && string(b) == "gone" {
					t.Errorf("%v: what was not synced is there", how)
				}
				must(t, os.RemoveAll(dir))
			}
		})
	}
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
