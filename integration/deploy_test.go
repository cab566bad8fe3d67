package integration

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every flag that a unit file passes exists in the program it starts.
func TestUnitFilesFitThePrograms(t *testing.T) {
	t.Parallel()
	units, err := filepath.Glob("../deploy/systemd/*.service")
	if err != nil || len(units) == 0 {
		t.Fatalf("unit files: %v, %v", units, err)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		command := regexp.MustCompile(`(?m)^ExecStart=/usr/bin/(\w+) (.*)$`).FindSubmatch(text)
		if command == nil {
			t.Fatalf("%s starts nothing", unit)
		}
		program := filepath.Join("..", "bin", string(command[1]))
		help, err := exec.CommandContext(t.Context(), program, "--help").Output()
		if err != nil {
			t.Fatalf("run %s --help: %v (make build)", program, err)
		}
		for _, word := range strings.Fields(string(command[2])) {
			if strings.HasPrefix(word, "--") && !bytes.Contains(help, []byte(word+" ")) {
				t.Errorf("%s passes %s, which %s does not have", unit, word, program)
			}
		}
	}
}
