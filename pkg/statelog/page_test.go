package statelog

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// TestFormatsPage holds the example of docs/formats.md to the code.
func TestFormatsPage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(page), "```hex statelog-entry\n")
	if !ok {
		t.Fatal("docs/formats.md has no block hex statelog-entry")
	}
	block, _, _ := strings.Cut(rest, "```")
	var got []byte
	for line := range strings.Lines(block) {
		line, _, _ = strings.Cut(line, "#")
		b, err := hex.DecodeString(strings.Join(strings.Fields(line), ""))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, b...)
	}
	if !bytes.Equal(got, sample()) {
		t.Fatalf("docs/formats.md has\n%x\nthe code writes\n%x", got, sample())
	}
}
