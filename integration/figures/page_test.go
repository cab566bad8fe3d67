package figures

import (
	"os"
	"path/filepath"
	"testing"
)

// The commit is what the programs say, each of them.
func TestBuiltFrom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	say := func(name, version string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho "+name+" version "+version+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got := BuiltFrom(dir); got != "unknown" {
		t.Errorf("of nothing: %s", got)
	}
	say("broker", "v1-2-gabc")
	say("bookie", "v1-2-gabc")
	if got := BuiltFrom(dir); got != "v1-2-gabc" {
		t.Error(got)
	}
	say("bookie", "v1-3-gdef")
	if got := BuiltFrom(dir); got != "v1-2-gabc and v1-3-gdef" {
		t.Error(got)
	}
}
