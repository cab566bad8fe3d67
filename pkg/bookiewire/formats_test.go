package bookiewire

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// hexBlock reads the block "hex name" of docs/formats.md.
func hexBlock(t *testing.T, name string) []byte {
	t.Helper()
	page, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "```hex "+name+"\n")
	if !found {
		t.Fatalf("docs/formats.md has no block hex %s", name)
	}
	block, _, _ := strings.Cut(rest, "```")
	var digits strings.Builder
	for line := range strings.Lines(block) {
		code, _, _ := strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(code), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatalf("block hex %s: %v", name, err)
	}
	return b
}

func TestDocumentedBytes(t *testing.T) {
	t.Parallel()
	cluster, _ := entry.ParseUUID("11111111-2222-3333-4444-555555555555")
	storage, _ := entry.ParseUUID("aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
	hello, err := AppendHello(nil, Hello{MinVersion: 1, MaxVersion: 1, Use: UseAdds, Cluster: cluster, Storage: storage, BookieID: "b1"})
	if err != nil {
		t.Fatal(err)
	}
	welcome, err := AppendWelcome(nil, Welcome{Version: 1, Cluster: cluster, Storage: storage, MaxBody: MaxBody, BookieID: "b1"})
	if err != nil {
		t.Fatal(err)
	}
	a := &Add{Ledger: 7, Entry: 3, Nonce: 0x1234, LAC: 2, Body: []byte("hello")}
	a.Checksum = entry.Checksum(a.Ledger, a.Entry, a.Body)
	u := *a
	u.Urgent = true
	for name, want := range map[string][]byte{
		"bookie-hello":      hello,
		"bookie-welcome":    welcome,
		"bookie-add":        encoded(t, func(e *Encoder) { e.Add(41, a) }),
		"bookie-add-urgent": encoded(t, func(e *Encoder) { e.Add(41, &u) }),
		"bookie-add-ack":    encoded(t, func(e *Encoder) { e.AddAck(41, 44) }),
		"bookie-failed":     encoded(t, func(e *Encoder) { e.Failed(45, &Error{Code: Fenced, Term: 2, Detail: "newer"}) }),
		"bookie-read": encoded(t, func(e *Encoder) {
			e.Read(1, Read{Ledger: 7, First: 3, Stride: 1, MaxEntries: 1, MaxBytes: 65536, Recovery: true, Term: 2})
		}),
		"bookie-read-reply": encoded(t, func(e *Encoder) {
			e.ReadReply(1, ReadReply{LAC: 2, Entries: []ReadEntry{{Entry: 3, Checksum: a.Checksum, Body: a.Body}}})
		}),
		"bookie-fence":     encoded(t, func(e *Encoder) { e.Fence(2, Fence{Ledger: 7, Term: 2}) }),
		"bookie-lac-reply": encoded(t, func(e *Encoder) { e.FenceReply(2, FenceReply{LAC: entry.NoEntry}) }),
		"bookie-write-lac": encoded(t, func(e *Encoder) { e.WriteLAC(3, WriteLAC{Ledger: 7, Nonce: 0x1234, LAC: 3}) }),
		"bookie-wait-lac":  encoded(t, func(e *Encoder) { e.WaitLAC(4, WaitLAC{Ledger: 7, After: 3, Timeout: 30 * time.Second}) }),
		"bookie-ping":      encoded(t, func(e *Encoder) { e.Ping(5) }),
	} {
		if got := hexBlock(t, name); !bytes.Equal(got, want) {
			t.Errorf("docs/formats.md, hex %s:\n page %x\n code %x", name, got, want)
		}
	}
}
