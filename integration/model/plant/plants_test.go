package main

import (
	"path/filepath"
	"testing"
)

// Each bug can be planted still.
func TestPlantsApply(t *testing.T) {
	root := filepath.Join("..", "..", "..")
	names := map[string]bool{}
	for _, p := range plants {
		if _, _, err := p.bug().Apply(root); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
		if names[p.Name] {
			t.Errorf("two bugs are called %q", p.Name)
		}
		names[p.Name] = true
	}
}
