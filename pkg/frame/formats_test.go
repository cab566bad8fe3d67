package frame

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"testing"
)

// hexBlock returns the bytes of a block ```hex NAME of docs/formats.md. What follows a # on a line is a remark.
func hexBlock(t *testing.T, name string) []byte {
	t.Helper()
	doc, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(doc), "```hex "+name+"\n")
	if !ok {
		return nil
	}
	block, _, _ := strings.Cut(rest, "```")
	var out []byte
	for line := range strings.Lines(block) {
		line, _, _ = strings.Cut(line, "#")
		b, err := hex.DecodeString(strings.Join(strings.Fields(line), ""))
		if err != nil {
			t.Fatalf("block %s: %v", name, err)
		}
		out = append(out, b...)
	}
	return out
}

// TestFormatsPage holds the examples of docs/formats.md to the code, both ways.
func TestFormatsPage(t *testing.T) {
	t.Parallel()
	single := Append(nil, &Header{
		Producer: "p1", Sequence: 5, PublishTime: 1700000000000,
		Single: &Message{Key: []byte("k"), Properties: []Property{{"a", "b"}}},
	}, []byte("hello"))
	batch := Append(nil, &Header{Producer: "p1", Sequence: 6, PublishTime: 1700000000000, Count: 2},
		AppendMessage(AppendMessage(nil, &Message{Sequence: 6, Value: []byte("one")}), &Message{Sequence: 7, Key: []byte("k"), Value: []byte("two")}))
	parsed, err := Parse(batch, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	env := EnvelopeOf(&parsed)
	env.Base, env.BrokerTime, env.ProducerEpoch = 41, 1700000000002, 3
	envelope := AppendEnvelope(nil, &env)
	for _, c := range []struct {
		name string
		want []byte
	}{{"frame-single", single}, {"frame-batch", batch}, {"envelope", envelope}} {
		if got := hexBlock(t, c.name); !bytes.Equal(got, c.want) {
			t.Errorf("docs/formats.md block %s has\n%x\nthe code writes\n%s", c.name, got, dump(c.want))
		}
	}
	if _, err := Parse(hexBlock(t, "frame-single"), Limits{}); err != nil {
		t.Error(err)
	}
	if _, _, err := ParseEnvelope(hexBlock(t, "envelope")); err != nil {
		t.Error(err)
	}
}

func dump(b []byte) string {
	var s strings.Builder
	for len(b) > 16 {
		fmt.Fprintf(&s, "% x\n", b[:16])
		b = b[16:]
	}
	fmt.Fprintf(&s, "% x", b)
	return s.String()
}
