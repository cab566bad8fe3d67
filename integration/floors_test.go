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
	{"pkg/entry", "pkg/vfs", "pkg/sched", "pkg/budget", "pkg/hash", "pkg/topicname", "pkg/ops", "pkg/measure"},
	{"pkg/frame", "pkg/bookiewire", "pkg/segment", "pkg/quorum", "pkg/meta", "pkg/lease", "pkg/bench/rawdisk"},
	{"pkg/ledger", "pkg/cursor", "pkg/bookieclient", "pkg/ledgerstore", "pkg/client", "pkg/ownership", "pkg/operation"},
	{"pkg/chain", "pkg/dispatch", "pkg/bookie"},
	{"pkg/topic", "pkg/statelog", "pkg/chain/chaintest"},
	{"pkg/subscription", "pkg/repair"},
	{"pkg/broker"},
	{"pkg/standalone/embedetcd", "pkg/workload/process"},
	{"pkg/standalone", "pkg/workload", "pkg/bench"},
	{"pkg/brokertest", "pkg/bench/jetstreamdriver", "pkg/bench/penstockdriver"},
}

// etcdServerImporters are the only packages whose programs may carry etcd's server.
var etcdServerImporters = []string{"pkg/standalone/embedetcd"}

// clientImports are the packages of ours that the SDK may carry: none of a server's.
var clientImports = []string{"pkg/budget", "pkg/entry", "pkg/frame", "pkg/hash", "pkg/topicname", "pkg/sched"}

// clientForbids are imports that would make the SDK heavy.
var clientForbids = []string{"go.etcd.io/", "github.com/prometheus/"}

// etcdClientImporters speak to etcd, or hand a connection to those who do: servers' construction and their tests.
var etcdClientImporters = []string{
	"pkg/meta", "pkg/lease",
	"pkg/standalone", "pkg/standalone/embedetcd", "pkg/chain/chaintest", "cmd/internal/daemon",
}

// strangers are packages that must not know each other although their floors would allow it, and why.
var strangers = []struct{ importer, imported, why string }{
	{"pkg/topic", "pkg/cursor", "retention takes a predicate over offsets"},
	{"pkg/bookie", "pkg/ledger", "a bookie knows nothing of writers"},
}

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

func heavyForClient(imported string) bool {
	if ours, ok := strings.CutPrefix(imported, module+"/"); ok {
		return !strings.HasPrefix(ours, "api/") && !slices.Contains(clientImports, ours)
	}
	return slices.ContainsFunc(clientForbids, func(f string) bool { return strings.HasPrefix(imported, f) })
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
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, imported := range p.Imports {
			below, ours := floorOf(imported)
			if ours && !roof && below >= floor {
				t.Errorf("%s (floor %d) imports %s (floor %d)", p.ImportPath, floor, imported, below)
			}
			if strings.HasPrefix(imported, "go.etcd.io/etcd/server/") &&
				!slices.Contains(etcdServerImporters, name) {
				t.Errorf("%s imports etcd's server", p.ImportPath)
			}
			if name == "pkg/client" && heavyForClient(imported) {
				t.Errorf("the SDK imports %s", imported)
			}
			if strings.HasPrefix(imported, "go.etcd.io/etcd/client/") && !slices.Contains(etcdClientImporters, name) &&
				!strings.HasPrefix(name, "integration") {
				t.Errorf("%s speaks to etcd: only pkg/meta and pkg/lease do", name)
			}
			for _, s := range strangers {
				if name == s.importer && imported == module+"/"+s.imported {
					t.Errorf("%s imports %s: %s", s.importer, s.imported, s.why)
				}
			}
		}
	}
}
