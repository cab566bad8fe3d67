package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	root := flag.String("root", filepath.Join("..", ".."), "the repository")
	flag.Parse()
	if err := write(*root); err != nil {
		fmt.Fprintf(os.Stderr, "dashboards: %v\n", err)
		os.Exit(1)
	}
}

// write writes every generated file below the root of the repository.
func write(root string) error {
	all, err := files()
	if err != nil {
		return err
	}
	for name, text := range all {
		to := filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(to), 0o750); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
		if err := os.WriteFile(to, text, 0o644); err != nil { //nolint:gosec // files of the repository
			return fmt.Errorf("write generated file: %w", err)
		}
	}
	return nil
}
