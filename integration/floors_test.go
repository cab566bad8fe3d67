// Package integration tests Penstock from outside: the shape of the source, and real processes under faults.
package integration

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/penstock-mq/penstock"

// floors is the house, lowest first. A package may import packages of lower floors only; so there are no
// cycles, and a reader always knows in which direction to look. docs/architecture.md draws it.
var floors = [][]string{
	{"pkg/entry", "pkg/vfs", "pkg/budget", "pkg/hash", "pkg/topicname", "pkg/ops"},
	{"pkg/frame", "pkg/bookiewire", "pkg/segment", "pkg/quorum", "pkg/meta", "pkg/lease"},
	{"pkg/ledger", "pkg/cursor", "pkg/bookieclient", "pkg/ledgerstore", "pkg/client", "pkg/ownership"},
	{"pkg/chain", "pkg/dispatch", "pkg/bookie"},
	{"pkg/topic", "pkg/statelog", "pkg/chain/chaintest"},
	{"pkg/broker"},
	{"pkg/standalone/embedetcd", "pkg/workload/process"},
	{"pkg/standalone", "pkg/workload"},
	{"pkg/brokertest"},
}

// etcdServerImporters are the only packages whose programs may carry etcd's server.
var etcdServerImporters = []string{"pkg/standalone/embedetcd"}

// clientForbids are imports that would make the SDK heavy, or tie it to the server.
var clientForbids = []string{"go.etcd.io/", "github.com/prometheus/", module + "/pkg/meta", module + "/pkg/broker"}

// forbiddenNames are package names that gather whatever has no home.
var forbiddenNames = []string{"util", "utils", "common", "types", "config", "metrics", "helpers", "misc"}

type goPackage struct {
	ImportPath string
	Imports    []string
}

func listPackages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	var packages []goPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return packages
		}
		if err != nil {
			t.Fatalf("decode package list: %v", err)
		}
		packages = append(packages, p)
	}
}

func floorOf(importPath string) (int, bool) {
	rel, ok := strings.CutPrefix(importPath, module+"/")
	if !ok {
		return 0, false
	}
	if strings.HasPrefix(rel, "api/") {
		return 0, true
	}
	for i, names := range floors {
		if slices.Contains(names, rel) {
			return i, true
		}
	}
	if strings.HasPrefix(rel, "cmd/") || rel == "integration" || strings.HasPrefix(rel, "integration/") {
		return len(floors), true
	}
	return 0, false
}

// TestFloors proves that imports only go down. Imports of test files are exempt.
func TestFloors(t *testing.T) {
	t.Parallel()
	for _, p := range listPackages(t) {
		floor, ok := floorOf(p.ImportPath)
		if !ok {
			t.Errorf("%s stands on no floor: add it to the table in floors_test.go and to docs/architecture.md", p.ImportPath)
			continue
		}
		if slices.Contains(forbiddenNames, path.Base(p.ImportPath)) {
			t.Errorf("%s: a package is named after what it owns, not %q", p.ImportPath, path.Base(p.ImportPath))
		}
		roof := floor == len(floors)
		for _, imported := range p.Imports {
			below, ours := floorOf(imported)
			if ours && !roof && below >= floor {
				t.Errorf("%s (floor %d) imports %s (floor %d)", p.ImportPath, floor, imported, below)
			}
			if strings.HasPrefix(imported, "go.etcd.io/etcd/server/") &&
				!slices.Contains(etcdServerImporters, strings.TrimPrefix(p.ImportPath, module+"/")) {
				t.Errorf("%s imports etcd's server", p.ImportPath)
			}
			if p.ImportPath == module+"/pkg/client" && slices.ContainsFunc(clientForbids, func(f string) bool {
				return strings.HasPrefix(imported, f)
			}) {
				t.Errorf("the SDK imports %s", imported)
			}
		}
	}
}
