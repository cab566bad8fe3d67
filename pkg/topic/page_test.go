package topic

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// TestFormatsPage holds the examples of docs/formats.md to the code.
func TestFormatsPage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	d := newDedup()
	d.get("orders-7").confirm(3, sequenceOf(41, 0, 0), 1_700_000_000_000)
	records := d.snapshot(1000)
	fresh := producerState{epoch: 3<<ownerShift | 1<<GenerationShift, lastTime: 1_700_000_000_000}
	for name, want := range map[string][]byte{
		"dedup-producer-key": records[0].Key, "dedup-producer": records[0].Value, "dedup-header": records[1].Value,
		"dedup-producer-new": fresh.encode(),
	} {
		_, rest, ok := strings.Cut(string(page), "```hex "+name+"\n")
		if !ok {
			t.Fatalf("docs/formats.md has no block hex %s", name)
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
		if !bytes.Equal(got, want) {
			t.Errorf("docs/formats.md, %s has\n%x\nthe code writes\n%x", name, got, want)
		}
	}
}
