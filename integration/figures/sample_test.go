package figures

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func sampleOf(ms ...int) *Sample {
	s := &Sample{}
	for _, v := range ms {
		s.Add(time.Duration(v) * time.Millisecond)
	}
	return s
}

// A percentile is a value that was measured, by the nearest rank from above.
func TestPercentile(t *testing.T) {
	t.Parallel()
	ten := sampleOf(10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
	for p, want := range map[float64]int{0: 1, 0.1: 1, 0.11: 2, 0.5: 5, 0.9: 9, 0.99: 10, 1: 10} {
		if got := ten.Percentile(p); got != time.Duration(want)*time.Millisecond {
			t.Errorf("percentile %v is %v, want %d ms", p, got, want)
		}
	}
	ten.Add(100 * time.Millisecond) // after it was sorted
	if ten.Worst() != 100*time.Millisecond || ten.Median() != 6*time.Millisecond || ten.Count() != 11 {
		t.Errorf("worst %v, median %v of %d", ten.Worst(), ten.Median(), ten.Count())
	}
	if empty := (&Sample{}); empty.Worst() != 0 || empty.Median() != 0 {
		t.Error("an empty sample has values")
	}
	both := sampleOf(1)
	both.Merge(sampleOf(3, 2))
	if both.Count() != 3 || both.Worst() != 3*time.Millisecond {
		t.Errorf("%d merged, worst %v", both.Count(), both.Worst())
	}
}

func TestHistogram(t *testing.T) {
	t.Parallel()
	if got := sampleOf(0, 4, 5, 9, 10, 700, 5000, 9000).Histogram(); got != "<5: 2 · 5–10: 2 · 10–20: 1 · 500–1000: 1 · ≥5000: 2 (ms)" {
		t.Error(got)
	}
}

func TestUnits(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"0.84 ms": Milliseconds(840 * time.Microsecond), "12.3 ms": Milliseconds(12340 * time.Microsecond),
		"143 ms": Milliseconds(142_800 * time.Microsecond), "10.0 ms": Milliseconds(9_999 * time.Microsecond),
		"812 B": Bytes(812), "3.9 KiB": Bytes(4000), "-3.9 KiB": Bytes(-4000), "41.0 MiB": Bytes(41 << 20), "1.50 GiB": Bytes(3 << 29),
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestPage(t *testing.T) {
	t.Parallel()
	var p Page
	p.Say("# %s", "Title")
	p.Head("a", "b")
	p.Row("1|2", "two\nlines")
	p.Block([]string{"x", "y"})
	const want = "# Title\n\n| a | b |\n|-|-|\n| 1/2 | two lines |\n\n```\nx\ny\n```\n"
	if p.String() != want {
		t.Errorf("%q", p.String())
	}
	path := filepath.Join(t.TempDir(), "results", "page.md")
	if err := p.Write(path); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != want {
		t.Fatalf("%q, %v", text, err)
	}
}
