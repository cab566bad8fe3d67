package figures

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Page is a page of Markdown that is being written.
type Page struct{ text strings.Builder }

// Say adds a paragraph.
func (p *Page) Say(format string, args ...any) {
	if p.text.Len() > 0 {
		p.text.WriteByte('\n')
	}
	fmt.Fprintf(&p.text, format, args...)
	p.text.WriteByte('\n')
}

// Head begins a table.
func (p *Page) Head(columns ...string) {
	p.text.WriteByte('\n')
	p.Row(columns...)
	p.text.WriteString("|" + strings.Repeat("-|", len(columns)) + "\n")
}

// Row adds a row to the table. Cells may hold anything.
func (p *Page) Row(cells ...string) {
	for i := range cells {
		cells[i] = strings.ReplaceAll(strings.ReplaceAll(cells[i], "\n", " "), "|", "/")
	}
	p.text.WriteString("| " + strings.Join(cells, " | ") + " |\n")
}

// Block adds lines that are shown as they are.
func (p *Page) Block(lines []string) {
	p.text.WriteString("\n```\n" + strings.Join(lines, "\n") + "\n```\n")
}

// String is the page so far.
func (p *Page) String() string { return p.text.String() }

// Write puts the page into a file, whose directory it makes.
func (p *Page) Write(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.WriteFile(path, []byte(p.text.String()), 0o644); err != nil { //nolint:gosec // a page of the documentation
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// Met is the verdict in a table.
func Met(ok bool) string {
	if ok {
		return "met"
	}
	return "NOT MET"
}

// BuiltFrom is what the programs in a directory say they were built from.
func BuiltFrom(programs string) string {
	var found []string
	for _, name := range []string{"broker", "bookie"} {
		out, err := exec.Command(filepath.Join(programs, name), "--version").Output() //nolint:noctx,gosec // short
		words := strings.Fields(string(out))
		if err != nil || len(words) == 0 {
			return "unknown"
		}
		if v := words[len(words)-1]; !slices.Contains(found, v) {
			found = append(found, v)
		}
	}
	return strings.Join(found, " and ")
}

// Machine describes this one in a line: processors and their model.
func Machine() string {
	model := runtime.GOARCH
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%d processors, %s", runtime.NumCPU(), model)
}
