package entry_test

import (
	"math"
	"slices"
	"testing"

	"github.com/penstock-mq/penstock/pkg/entry"
)

func TestLedgerIDsOfALaterGenerationAreHigher(t *testing.T) {
	t.Parallel()
	old := entry.MakeLedgerID(1, 1<<entry.LedgerSequenceBits-1)
	restored := entry.MakeLedgerID(2, 1)
	if restored <= old || restored.Generation() != 2 || old.Generation() != 1 {
		t.Fatalf("generation 2 gives %d, generation 1 %d", restored, old)
	}
	if highest := entry.MakeLedgerID(0x7fff, 1<<entry.LedgerSequenceBits-1); highest > math.MaxInt64 {
		t.Fatalf("ledger id %d has its high bit set", highest)
	}
}

func TestPositionsAreOrdered(t *testing.T) {
	t.Parallel()
	want := []entry.Position{
		{Ledger: 1, Entry: -1},
		{Ledger: 1, Entry: 0, Batch: 9},
		{Ledger: 1, Entry: 1},
		{Ledger: 1, Entry: 1, Batch: 1},
		{Ledger: 2, Entry: 0},
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, entry.Position.Compare)
	if !slices.Equal(got, want) {
		t.Fatalf("sorted %v, want %v", got, want)
	}
}

func TestChecksumCoversIdentityAndBody(t *testing.T) {
	t.Parallel()
	body := []byte("body")
	sum := entry.Checksum(1, 2, body)
	for name, other := range map[string]uint32{
		"another ledger": entry.Checksum(2, 2, body),
		"another entry":  entry.Checksum(1, 1, body),
		"another body":   entry.Checksum(1, 2, []byte("bodY")),
	} {
		if other == sum {
			t.Errorf("%s has the same checksum", name)
		}
	}
	// As specified: CRC32C over the ids, big endian, and the body.
	ids := []byte{0, 0, 0, 0, 0, 0, 1, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe}
	if got, want := entry.Checksum(0x102, -2, body), entry.UpdateCRC32C(entry.CRC32C(ids), body); got != want {
		t.Errorf("checksum is %#x, want %#x", got, want)
	}
	// CRC32C check value of "123456789", from RFC 3720 and the catalogue of parametrised CRCs.
	if got := entry.CRC32C([]byte("123456789")); got != 0xe3069283 {
		t.Errorf("CRC32C is %#x, want 0xe3069283", got)
	}
}

// It is computed for every entry, several times.
func TestChecksumAllocatesNothing(t *testing.T) { //nolint:paralleltest // AllocsPerRun counts for the process
	body := []byte("body")
	if n := testing.AllocsPerRun(10, func() { entry.Checksum(1, 2, body) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzParsePosition(f *testing.F) {
	for _, s := range []string{"1:2", "1:2:3", "0:-1", "", "1:2:3:4", "9223372036854775808:0", "1:-2", "1:2:-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := entry.ParsePosition(s)
		if err != nil {
			return
		}
		again, err := entry.ParsePosition(p.String())
		if err != nil || again != p {
			t.Fatalf("%q parses to %v, which prints as %q and parses to %v, %v", s, p, p, again, err)
		}
	})
}

func FuzzParseUUID(f *testing.F) {
	f.Add("00112233-4455-6677-8899-aabbccddeeff")
	f.Add("short")
	f.Fuzz(func(t *testing.T, s string) {
		u, err := entry.ParseUUID(s)
		if err != nil {
			return
		}
		again, err := entry.ParseUUID(u.String())
		if err != nil || again != u {
			t.Fatalf("%q parses to %v, which parses to %v, %v", s, u, again, err)
		}
	})
}
