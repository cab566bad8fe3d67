package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// What is committed is what this program writes, and nothing else lies there.
func TestGenerated(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	all, err := files()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range all {
		is, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil || !bytes.Equal(is, want) {
			t.Errorf("%s is not what tools/dashboards makes of its tables: run `make dashboards` and commit (%v)", name, err)
		}
	}
	for _, dir := range generatedDirs {
		err := filepath.WalkDir(filepath.Join(root, filepath.FromSlash(dir)), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if _, ok := all[filepath.ToSlash(name)]; !ok {
				t.Errorf("%s is not generated any more: remove it", name)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
