// Package overlay builds test programs with a bug laid over the source, by the go command's -overlay: for those who prove
// that tests find bugs.
//
//	root, err := overlay.Root(ctx)
//	program, err := overlay.Bug{Package: "pkg/quorum", Old: "…", New: "…"}.Build(ctx, root, dir, "./integration/sim")
package overlay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Bug is a text of a package's source, as it is, in one place, and as the bug has it. Package is its path from the module's
// root.
type Bug struct{ Package, Old, New string }

// Root returns the directory of the module that the process is in.
func Root(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Apply returns the file that is changed and what it is with the bug in it. It changes nothing.
func (b Bug) Apply(root string) (file, bad string, err error) {
	names, err := filepath.Glob(filepath.Join(root, b.Package, "*.go"))
	if err != nil {
		return "", "", fmt.Errorf("list %s: %w", b.Package, err)
	}
	found := 0
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		source, err := os.ReadFile(name)
		if err != nil {
			return "", "", fmt.Errorf("read what is to be changed: %w", err)
		}
		if n := strings.Count(string(source), b.Old); n > 0 {
			found += n
			file, bad = name, strings.Replace(string(source), b.Old, b.New, 1)
		}
	}
	if found != 1 {
		return "", "", fmt.Errorf("%s has the line %d times: %q", b.Package, found, b.Old)
	}
	return file, bad, nil
}

// Build builds the test program of the package target with the bug in it, in dir, which is the caller's, and returns its path.
func (b Bug) Build(ctx context.Context, root, dir, target string) (program string, err error) {
	at, bad, err := b.Apply(root)
	if err != nil {
		return "", err
	}
	file, replaced := filepath.Join(dir, "planted.go"), filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{at: file}})
	if err != nil {
		return "", fmt.Errorf("write what is replaced: %w", err)
	}
	if err := errors.Join(os.WriteFile(file, []byte(bad), 0o600), os.WriteFile(replaced, replace, 0o600)); err != nil {
		return "", fmt.Errorf("write the bug: %w", err)
	}
	program = filepath.Join(dir, "planted.test")
	return program, Build(ctx, root, program, target, "-overlay", replaced)
}

// Build builds the test program of the package target as it is, with more arguments for the go command.
func Build(ctx context.Context, root, program, target string, args ...string) error {
	args = append([]string{"test", "-c", "-vet=off", "-ldflags", "-s -w", "-o", program}, args...)
	build := exec.CommandContext(ctx, "go", append(args, target)...) //nolint:gosec // its arguments are the caller's
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}
