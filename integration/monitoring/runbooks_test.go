package monitoring

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// page is a page of docs/runbooks.
type page struct{ name, text string }

func pages(t *testing.T) (out []page) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", runbooksDir, "*.md"))
	check(t, err)
	for _, f := range files {
		out = append(out, page{strings.TrimSuffix(filepath.Base(f), ".md"), string(read(t, runbooksDir, filepath.Base(f)))})
	}
	return out
}

// blocks are the fenced blocks that are marked so.
func (p page) blocks(mark string) (out []string) {
	for _, m := range regexp.MustCompile("(?ms)^```([^\n]*)\n(.*?)^```$").FindAllStringSubmatch(p.text, -1) {
		if m[1] == mark {
			out = append(out, m[2])
		}
	}
	return out
}

// Each alert has a page, linked from it and from the first page, and each page an alert; each says what it means, how to see it and
// what to do.
func TestPages(t *testing.T) {
	t.Parallel()
	severity := map[string]string{}
	for _, r := range slices.Concat(rules(t), chartRules(t)) {
		severity[r.Alert] = r.Labels["severity"]
		if !strings.HasSuffix(r.Annotations["runbook_url"], "/blob/main/"+runbooksDir+"/"+r.Alert+".md") {
			t.Errorf("%s links to %q", r.Alert, r.Annotations["runbook_url"])
		}
	}
	first := string(read(t, runbooksDir, "README.md"))
	for _, p := range pages(t) {
		if p.name == "README" {
			continue
		}
		if !strings.Contains(first, "| ["+p.name+"]("+p.name+".md) | "+severity[p.name]+" |") || severity[p.name] == "" {
			t.Errorf("%s is no alert, or not in the table of the first page, or not as %q", p.name, severity[p.name])
		}
		delete(severity, p.name)
		for _, want := range []string{"# " + p.name + "\n", "**What it means.**", "**How to see it.**", "**What to do.**"} {
			if strings.Count(p.text, want) != 1 {
				t.Errorf("%s has not one %q", p.name, want)
			}
		}
	}
	for name := range severity {
		t.Errorf("%s has no page", name)
	}
}

// Pages and panels refer to what there is.
func TestLinks(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)#]+)(?:#([^)]+))?\)`).FindAllStringSubmatch(p.text, -1) {
			text, err := os.ReadFile(filepath.Join("..", "..", runbooksDir, m[1]))
			if err != nil {
				t.Errorf("%s links to %s: %v", p.name, m[1], err)
			} else if m[2] != "" && !slices.Contains(anchors(string(text)), m[2]) {
				t.Errorf("%s links to %s#%s, which there is not", p.name, m[1], m[2])
			}
		}
	}
	for _, d := range dashboards(t) {
		for _, p := range d.Panels {
			if p.Type != "row" && p.Description == "" {
				t.Errorf("%s: %s does not say what it shows", d.Title, p.Title)
			}
			for _, name := range regexp.MustCompile(`docs/[\w/]+\.md`).FindAllString(p.Description, -1) {
				read(t, name)
			}
		}
	}
}

// anchors are those that headings have.
func anchors(text string) (out []string) {
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(m[1]), "")
		out = append(out, strings.ReplaceAll(name, " ", "-"))
	}
	return out
}

// Every command of penstock that a page names is one, with these flags, also where it cannot be run.
func TestCommands(t *testing.T) {
	t.Parallel()
	program := filepath.Join(bin(t), "penstock")
	help := map[string]string{}
	n := 0
	for _, p := range pages(t) {
		for _, m := range regexp.MustCompile("(?m)(?:^|`)penstock ([a-z][^`\n…]*)").FindAllStringSubmatch(p.text, -1) {
			n++
			var words, flags []string
			for _, w := range strings.Fields(m[1]) {
				switch {
				case strings.HasPrefix(w, "-"):
					flag, _, _ := strings.Cut(w, "=")
					flags = append(flags, flag)
				case len(flags) == 0 && regexp.MustCompile(`^[a-z-]+$`).MatchString(w):
					words = append(words, w)
				}
			}
			command := strings.Join(words, " ")
			if help[command] == "" {
				out, err := exec.CommandContext(t.Context(), program, append(words, "--help")...).CombinedOutput()
				if err != nil || !strings.Contains(string(out), "penstock "+command) {
					t.Errorf("%s names penstock %s, which there is not: %v\n%s", p.name, command, err, out)
				}
				help[command] = string(out)
			}
			for _, f := range flags {
				if !regexp.MustCompile(`(?m)^ +.*` + f + `\b`).MatchString(help[command]) {
					t.Errorf("%s names %s of penstock %s, which there is not", p.name, f, command)
				}
			}
		}
	}
	if n < 20 {
		t.Errorf("the pages have %d commands", n)
	}
}
