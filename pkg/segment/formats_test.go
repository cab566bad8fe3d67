package segment

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

var update = flag.Bool("update", false, "write the examples of docs/formats.md anew")

const formatsPage = "../../docs/formats.md"

// field is a line of an example: so many bytes, and what they are.
type field struct {
	bytes int
	label string
}

func headerFields() []field {
	return []field{
		{8, "magic"},
		{2, "version"},
		{2, "state: in use"},
		{4, "generation"},
		{8, "sequence"},
		{16, "segment UUID"},
		{16, "cluster UUID"},
		{16, "storage UUID"},
		{8, "size"},
		{4, "CRC"},
	}
}

func recordFields(name string, body int) []field {
	out := []field{
		{1, name + ": kind"},
		{3, "0"},
		{4, "length of the body"},
		{8, "ledger"},
		{8, "entry"},
		{8, "LAC"},
		{8, "term"},
		{8, "nonce"},
		{4, "entry checksum"},
		{4, "CRC"},
	}
	if body > 0 {
		out = append(out, field{body, "body"})
	}
	return out
}

func batchFields() []field {
	head := []field{
		{4, "magic"},
		{4, "generation"},
		{8, "number"},
		{4, "length of the records"},
		{4, "records"},
		{8, "durableUpto"},
		{8, "prevDurable"},
		{4, "CRC of the records"},
		{4, "CRC of this header"},
	}
	return append(append(head, recordFields("entry", 8)...), recordFields("fence", 0)...)
}

func footerFields() []field {
	ledger := func(n string) []field {
		return []field{
			{8, "ledger " + n},
			{8, "nonce"},
			{8, "term"},
			{8, "LAC"},
			{8, "first entry"},
			{8, "last entry"},
			{8, "bytes"},
			{4, "first index row"},
			{4, "index rows"},
		}
	}
	out := []field{
		{4, "index: entry less the first"},
		{4, "offset"},
		{4, "length"},
		{4, "CRC of the page"},
	}
	out = append(append(out, ledger("5")...), ledger("6")...)
	out = append(
		out,
		field{4, "CRC of the page"},
		field{1, "control: kind"},
		field{3, "0"},
		field{4, "length"},
		field{8, "ledger"},
		field{8, "entry"},
		field{8, "LAC"},
		field{8, "term"},
		field{8, "nonce"},
		field{8, "offset"},
		field{4, "CRC of the page"},
		field{4, "trailer: magic"},
		field{2, "version"},
		field{2, "flags"},
		field{4, "generation"},
		field{4, "batches"},
		field{16, "segment UUID"},
		field{8, "sequence"},
		field{8, "dataEnd"},
		field{8, "prevDurable"},
		field{4, "index rows"},
		field{4, "ledger rows"},
		field{4, "control rows"},
		field{4, "gap rows"},
		field{4, "CRC"},
	)
	return out
}

// exampleHeader and exampleRecords are what docs/formats.md shows.
func exampleHeader() Header {
	uuid := func(first byte) (u entry.UUID) {
		for i := range u {
			u[i] = first + byte(i)
		}
		return u
	}
	return Header{SegmentUUID: uuid(0x10), Sequence: 7, Generation: 3, Cluster: uuid(0x40), Storage: uuid(0x80)}
}

func exampleRecords() []Record {
	body := []byte("penstock")
	return []Record{
		{Kind: KindEntry, Ledger: 5, Entry: 9, LAC: 8, Nonce: 0x1122334455667788, Checksum: entry.Checksum(5, 9, body), Body: body},
		{Kind: KindFence, Ledger: 6, Entry: entry.NoEntry, LAC: entry.NoEntry, Term: 2},
	}
}

// exampleFile writes the segment of the page.
func exampleFile(t *testing.T) []byte {
	t.Helper()
	fs := vfs.NewMem()
	w, err := Create(fs, "example", exampleHeader(), 1<<20, false)
	must(t, err)
	_, err = w.AppendBatch(exampleRecords(), headerBlockSize)
	must(t, err)
	must(t, w.Seal())
	must(t, w.Close())
	return fileBytes(t, fs, "example")
}

// TestFormatsPageExamples holds the examples of docs/formats.md against the encoder.
func TestFormatsPageExamples(t *testing.T) {
	t.Parallel()
	file := exampleFile(t)
	dataEnd := headerBlockSize + batchHeaderSize + 2*recordHeaderSize + 8
	page, err := os.ReadFile(formatsPage)
	must(t, err)
	for _, example := range []struct {
		name   string
		bytes  []byte
		fields []field
	}{
		{"segment-header", file[:headerSize], headerFields()},
		{"segment-batch", file[headerBlockSize:dataEnd], batchFields()},
		{"segment-footer", file[dataEnd:], footerFields()},
	} {
		block := regexp.MustCompile("(?s)(```hex " + example.name + "\n)(.*?)```")
		found := block.FindSubmatch(page)
		if found == nil {
			t.Fatalf("%s has no block %q", formatsPage, example.name)
		}
		if *update {
			page = block.ReplaceAll(page, []byte("${1}"+format(t, example.bytes, example.fields)+"```"))
			continue
		}
		if got := parseHex(t, string(found[2])); !bytes.Equal(got, example.bytes) {
			t.Errorf("%s says of %s\n%x\nthe code writes\n%x", formatsPage, example.name, got, example.bytes)
		}
	}
	if *update {
		must(t, os.WriteFile(formatsPage, page, 0o600))
	}
}

// TestFormatsPageIsReadable decodes the bytes of the page, so that it is the reader too that it describes.
func TestFormatsPageIsReadable(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(formatsPage)
	must(t, err)
	blocks := make(map[string][]byte)
	for _, m := range regexp.MustCompile("(?s)```hex (segment-[a-z]+)\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		blocks[m[1]] = parseHex(t, m[2])
	}
	file := make([]byte, headerBlockSize)
	copy(file, blocks["segment-header"])
	file = append(append(file, blocks["segment-batch"]...), blocks["segment-footer"]...)
	fs := vfs.NewMem()
	putFile(t, fs, "page", file)
	r, err := Open(fs, "page")
	must(t, err)
	defer closeAll(t, r)
	loc, ok, err := r.Find(5, 9)
	if err != nil || !ok {
		t.Fatalf("find 5:9: %v, %v", ok, err)
	}
	rec, err := r.ReadAt(loc)
	must(t, err)
	if string(rec.Body) != "penstock" || rec.LAC != 8 {
		t.Errorf("got %+v", rec)
	}
	controls, err := r.Controls()
	must(t, err)
	if len(controls) != 1 || controls[0].Kind != KindFence || controls[0].Term != 2 {
		t.Errorf("got controls %+v", controls)
	}
}

func format(t *testing.T, b []byte, fields []field) string {
	t.Helper()
	var out strings.Builder
	for _, f := range fields {
		fmt.Fprintf(&out, "%-48s # %s\n", spaced(b[:f.bytes]), f.label)
		b = b[f.bytes:]
	}
	if len(b) != 0 {
		t.Fatalf("%d bytes are not described", len(b))
	}
	return out.String()
}

func spaced(b []byte) string { return fmt.Sprintf("% x", b) }

func parseHex(t *testing.T, block string) []byte {
	t.Helper()
	var out []byte
	for line := range strings.Lines(block) {
		line, _, _ = strings.Cut(line, "#")
		b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(line), " ", ""))
		must(t, err)
		out = append(out, b...)
	}
	return out
}
