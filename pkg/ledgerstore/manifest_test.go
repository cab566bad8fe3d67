package ledgerstore

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
)

func TestSegmentNames(t *testing.T) {
	t.Parallel()
	for _, seq := range []uint64{0, 1, 0xabc, 1<<63 + 5, 1<<64 - 1} {
		for _, rewrite := range []uint32{0, 1, 0xffff, 0x10000, 0xabcdef, 1<<32 - 1} {
			gotSeq, gotRewrite, ok := parseSegmentName(segmentName(seq, rewrite))
			if !ok || gotSeq != seq || gotRewrite != rewrite {
				t.Errorf("%s: %x %x %v", segmentName(seq, rewrite), gotSeq, gotRewrite, ok)
			}
		}
	}
	for _, name := range []string{
		"", "-.seg", ".seg", "0000000000000001-0001", "0000000000000001-0001.seg.lost", "0000000000000001-001.seg", "1-0001.seg",
		"0000000000000001-00001.seg", "0000000000000001-100000000.seg", "00000000000000AB-0001.seg", "spare-1.seg",
		"+000000000000001-0001.seg", "0000000000000001-0001.seg.seg", "0000000000000001-0001-0001.seg",
	} {
		if seq, rewrite, ok := parseSegmentName(name); ok {
			t.Errorf("%q is taken for segment %x-%x", name, seq, rewrite)
		}
	}
}

func exampleManifest() *manifest {
	u := func(b byte) (u entry.UUID) {
		for i := range u {
			u[i] = b
		}
		return u
	}
	return &manifest{
		edition: 7, next: 13, cluster: u(0x11), storage: u(0x22),
		segments: []manifestSegment{{sequence: 9, rewrite: 1, uuid: u(0x33)}, {sequence: 12, uuid: u(0x44)}},
	}
}

func TestManifestFormat(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/formats.md")
	must(t, err)
	block := regexp.MustCompile("(?s)```hex manifest\n(.*?)```").FindSubmatch(page)
	if block == nil {
		t.Fatal("docs/formats.md has no example of a manifest")
	}
	var text strings.Builder
	for line := range strings.Lines(string(block[1])) {
		bytes, _, _ := strings.Cut(line, "#")
		text.WriteString(strings.Join(strings.Fields(bytes), ""))
	}
	documented, err := hex.DecodeString(text.String())
	must(t, err)
	if written := exampleManifest().encode(); !bytes.Equal(written, documented) {
		t.Errorf("written    %x\ndocumented %x", written, documented)
	}
	read, err := decodeManifest(documented)
	must(t, err)
	if !reflect.DeepEqual(read, exampleManifest()) {
		t.Errorf("read %+v", read)
	}
}

func TestManifestDamage(t *testing.T) {
	t.Parallel()
	good := exampleManifest().encode()
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		if _, err := decodeManifest(bad); !errors.Is(err, errManifest) {
			t.Errorf("byte %d changed: %v", i, err)
		}
		if _, err := decodeManifest(good[:i]); !errors.Is(err, errManifest) {
			t.Errorf("cut to %d bytes: %v", i, err)
		}
	}
}

func FuzzDecodeManifest(f *testing.F) {
	f.Add(exampleManifest().encode())
	f.Add((&manifest{next: 1}).encode())
	f.Add([]byte(manifestMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		// With the right checksum more than the first check is reached.
		if len(b) > 4 {
			fixed := bytes.Clone(b)
			sum := entry.CRC32C(fixed[:len(fixed)-4])
			for i := range 4 {
				fixed[len(fixed)-1-i] = byte(sum >> (8 * i))
			}
			if m, err := decodeManifest(fixed); err == nil && !bytes.Equal(m.encode()[:manifestHeaderSize], fixed[:manifestHeaderSize]) {
				t.Fatalf("%x is read as %+v", fixed, m)
			}
		}
		m, err := decodeManifest(b)
		if err != nil {
			return
		}
		again, err := decodeManifest(m.encode())
		if err != nil || !reflect.DeepEqual(again, m) {
			t.Fatalf("read %+v, written and read again %+v, %v", m, again, err)
		}
	})
}
