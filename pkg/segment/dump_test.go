package segment

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func dump(t *testing.T, fs vfs.FS, name string) string {
	t.Helper()
	var out strings.Builder
	must(t, Dump(&out, fs, name))
	agree(t, fs, name, out.String())
	return out.String()
}

// agree finds out whether a description says what was printed.
func agree(t *testing.T, fs vfs.FS, name, printed string) {
	t.Helper()
	d, err := Describe(fs, name)
	must(t, err)
	records := 0
	for _, b := range d.Batches {
		records += len(b.Records)
	}
	want := []string{"state      " + d.State, fmt.Sprintf("size       %d", d.Size)}
	if d.Verdict != "" {
		want = append(want, "segment    "+d.Segment, "verdict    "+d.Verdict, fmt.Sprintf("batches end at %d", d.End))
	}
	for _, g := range d.Gaps {
		want = append(want, fmt.Sprintf("%d: unreadable up to %d\n", g.Offset, g.End))
	}
	if d.Footer != nil {
		for _, text := range d.Footer.Damage {
			want = append(want, "damaged: "+text)
		}
	}
	for _, part := range want {
		if !strings.Contains(printed, part) {
			t.Errorf("described %q, printed\n%s", part, printed)
		}
	}
	if n := strings.Count(printed, ": batch "); n != len(d.Batches) {
		t.Errorf("%d batches printed, %d described", n, len(d.Batches))
	}
	if n := len(regexp.MustCompile(`(?m)^  \d+: `).FindAllString(printed, -1)); n != records {
		t.Errorf("%d records printed, %d described", n, records)
	}
}

func TestDumpSealed(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	w, err := Create(fs, "s", exampleHeader(), 1<<20, false)
	must(t, err)
	appendBatch(t, w, headerBlockSize, exampleRecords()...)
	must(t, w.Seal())
	closeAll(t, w)
	const want = `state      sealed
segment    10111213-1415-1617-1819-1a1b1c1d1e1f
sequence   7
generation 3
cluster    40414243-4445-4647-4849-4a4b4c4d4e4f
storage    80818283-8485-8687-8889-8a8b8c8d8e8f
size       4548, reserved 1048576
4096: batch 0, 2 records, 168 bytes, durable up to 4096, previous segment up to 0
  4144: entry 5:9 lac 8 nonce 1122334455667788 body 8 checksum 55424a34
  4208: fence 6 term 2
verdict    whole: batches end at 4264
footer     1 batches, 1 entries, 2 ledger rows, 1 controls, 0 gaps, previous segment durable up to 0
  ledger 5: 1 entries from 9 to 9, lac 8, term 0, nonce 1122334455667788, 64 bytes
  ledger 6: 0 entries from -1 to -1, lac -1, term 2, nonce 0000000000000000, 56 bytes
  control at 4208: fence 6 term 2
`
	if got := dump(t, fs, "s"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	flip(t, fs, "s", 4264)
	if got := dump(t, fs, "s"); !strings.Contains(got, "damaged: corrupt footer at offset 4264 of s") {
		t.Errorf("damaged footer:\n%s", got)
	}
	must(t, Retire(fs, "s", "s"))
	if got := dump(t, fs, "s"); got != "state      retired, kept for reuse\ngeneration 3\nsize       4548\n" {
		t.Errorf("retired:\n%s", got)
	}
}

func TestDumpVerdicts(t *testing.T) {
	t.Parallel()
	for want, damage := range map[string]func(*vfs.Mem, []batchAt){
		"verdict    torn tail: batches end at 5128, and what follows was never acknowledged": func(m *vfs.Mem, b []batchAt) {
			flip(t, m, "s", b[2].end-1)
		},
		"verdict    corrupt: ledgers [2] have lost records; batches end at 5644": func(m *vfs.Mem, b []batchAt) {
			flip(t, m, "s", b[0].locs[1].Offset+recordHeaderSize)
		},
		"verdict    corrupt: any ledger may have lost records; batches end at 5644": func(m *vfs.Mem, b []batchAt) {
			flip(t, m, "s", b[1].off)
		},
		"4612: unreadable up to 5128": func(m *vfs.Mem, b []batchAt) { flip(t, m, "s", b[1].off) },
		"state      unsealed":         func(*vfs.Mem, []batchAt) {},
	} {
		m := vfs.NewMem()
		damage(m, batches(t, m, "s", 0, 0, 2))
		if got := dump(t, m, "s"); !strings.Contains(got, want+"\n") {
			t.Errorf("want %q in\n%s", want, got)
		}
	}
	m := vfs.NewMem()
	putFile(t, m, "blank", make([]byte, 100))
	if err := Dump(discard{}, m, "blank"); err == nil {
		t.Error("dumped a blank file")
	}
}

// TestDumpWhileWriting dumps a segment that is being written, and changes nothing.
func TestDumpWhileWriting(t *testing.T) {
	t.Parallel()
	m := vfs.NewMem()
	w := create(t, m, "s", header(1))
	appendBatch(t, w, 0, add(1, 0, 10))
	changes := m.Changes()
	if got := dump(t, m, "s"); !strings.Contains(got, "entry 1:0 lac -1") {
		t.Errorf("got\n%s", got)
	}
	if m.Changes() != changes {
		t.Error("the dump changed something")
	}
	appendBatch(t, w, 0, add(1, entry.EntryID(1), 10))
	closeAll(t, w)
}
