package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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

// A run's table takes the place of the one before, and nothing else of the page changes.
func TestTableIsSpliced(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "testing.md"))
	if err != nil {
		t.Fatal(err)
	}
	once, err := splice(string(page), "| first |\n")
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(page), beginMark)
	_, after, _ := strings.Cut(rest, endMark)
	if want := before + beginMark + "\n| first |\n\n" + endMark + after; once != want {
		t.Errorf("the page becomes\n%s", once)
	}
	if twice, err := splice(once, "| first |\n"); twice != once || err != nil {
		t.Errorf("the second time it becomes\n%s, %v", twice, err)
	}
	for _, bad := range []string{"", beginMark, endMark + beginMark} {
		if _, err := splice(bad, ""); !errors.Is(err, errMarks) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestSummary(t *testing.T) {
	f := &field{seeds: 1000, clean: 67, turns: make(chan struct{}, 2), rows: []*row{
		{plant: plant{Name: "one", Package: "pkg/cursor"}, tried: 67, found: finding{67, "I7"}},
		{plant: plant{Name: "two", Package: "pkg/topic"}, tried: 1000, err: errMissed},
	}}
	want := "| bug | where | seeds | invariant |\n|---|---|---|---|\n| one | `cursor` | 67 | I7 |\n| two | `topic` | not in 1000 |  |\n"
	if got := f.table(); got != want {
		t.Errorf("table\n%s", got)
	}
	if got := f.summary("abc", 61*time.Second); got != "1 of 2 are found, each by one of the first 67 seeds. Without any bug, 67 seeds were run, all of which pass. Version `abc`, 1m1s, 2 at a time." {
		t.Error(got)
	}
	f.bad = []finding{{4, "I1"}, {9, "I2"}}
	if got := f.summary("abc", time.Second); !strings.Contains(got, "of which these fail, and do not count: 4, 9.") {
		t.Error(got)
	}
	if got := f.failures(); len(got) != 3 {
		t.Error(got)
	}
}
