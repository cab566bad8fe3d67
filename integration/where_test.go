package integration

import (
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

var (
	codeSpan   = regexp.MustCompile("`([^`]+)`")
	identifier = regexp.MustCompile(`^[A-Za-z]\w*$`)
)

// TestWhereIs follows every pointer of docs/architecture.md's table into the source: the file is there, and declares
// what stands in parentheses behind it. A file without a folder is in the folder of the one before.
func TestWhereIs(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "## Where is …")
	table, _, _ = strings.Cut(table, "\n## ")
	files := 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, " | ")
		if len(cells) != 2 {
			continue
		}
		var folder, source string
		for _, span := range codeSpan.FindAllStringSubmatch(cells[1], -1) {
			name := span[1]
			switch {
			case strings.HasSuffix(name, ".go"):
				if strings.Contains(name, "/") {
					folder = path.Dir(name)
					if !strings.HasPrefix(name, "cmd/") {
						folder = path.Join("pkg", folder)
					}
				}
				text, err := os.ReadFile(path.Join("..", folder, path.Base(name)))
				if err != nil {
					t.Errorf("%s: %v", strings.TrimSpace(line), err)
				}
				source = string(text)
				files++
			case source != "" && identifier.MatchString(name) && !regexp.MustCompile(`(?m)^(func (\([^)]*\) )?|type |\t)`+name+`\b`).MatchString(source):
				if _, err := os.Stat(path.Join("../pkg", name)); err != nil { // a package is fine too
					t.Errorf("%s: %s is not declared where it is said to be", strings.TrimSpace(line), name)
				}
			}
		}
	}
	if files < 50 {
		t.Fatalf("followed %d pointers: the table was not read", files)
	}
}
