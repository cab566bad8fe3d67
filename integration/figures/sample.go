package figures

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Sample is a number of measured times. The zero Sample is empty. It is not safe for concurrent use.
type Sample struct {
	values []time.Duration
	sorted bool
}

// Add takes one in.
func (s *Sample) Add(d time.Duration) {
	s.values = append(s.values, d)
	s.sorted = false
}

// Merge takes in all of another sample, which stays as it is.
func (s *Sample) Merge(other *Sample) {
	s.values = append(s.values, other.values...)
	s.sorted = false
}

// Count is how many there are.
func (s *Sample) Count() int { return len(s.values) }

// Percentile returns the smallest value that a share p of all, in [0, 1], does not exceed; 0 of an empty sample.
func (s *Sample) Percentile(p float64) time.Duration {
	if len(s.values) == 0 {
		return 0
	}
	if !s.sorted {
		slices.Sort(s.values)
		s.sorted = true
	}
	rank := int(math.Ceil(p*float64(len(s.values)) - 1e-9)) // 0.9 of 10 is the 9th, whatever floating point says
	return s.values[min(max(rank, 1), len(s.values))-1]
}

// Median is the 50th percentile.
func (s *Sample) Median() time.Duration { return s.Percentile(0.5) }

// Worst is the largest value.
func (s *Sample) Worst() time.Duration { return s.Percentile(1) }

// bounds are those of a histogram's bars, each excluded.
var bounds = []time.Duration{
	5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond,
	150 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second,
}

// Histogram is one line: how many values lie below 5 ms, from there to 10 ms, and so on; bars without any are left out.
func (s *Sample) Histogram() string {
	counts := make([]int, len(bounds)+1)
	for _, v := range s.values {
		i, exact := slices.BinarySearch(bounds, v)
		if exact {
			i++
		}
		counts[i]++
	}
	var bars []string
	for i, n := range counts {
		switch {
		case n == 0:
		case i == 0:
			bars = append(bars, fmt.Sprintf("<%s: %d", bound(0), n))
		case i == len(bounds):
			bars = append(bars, fmt.Sprintf("≥%s: %d", bound(i-1), n))
		default:
			bars = append(bars, fmt.Sprintf("%s–%s: %d", bound(i-1), bound(i), n))
		}
	}
	return strings.Join(bars, " · ") + " (ms)"
}

func bound(i int) string { return strconv.FormatInt(bounds[i].Milliseconds(), 10) }

// Milliseconds writes a time for a table: "0.84 ms", "12.3 ms", "143 ms".
func Milliseconds(d time.Duration) string {
	ms := float64(d) / float64(time.Millisecond)
	switch a := math.Abs(ms); {
	case a < 9.995:
		return fmt.Sprintf("%.2f ms", ms)
	case a < 99.95:
		return fmt.Sprintf("%.1f ms", ms)
	}
	return fmt.Sprintf("%.0f ms", ms)
}

// Seconds writes a longer time: "8.2 s".
func Seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// Bytes writes an amount of memory: "812 B", "3.9 KiB", "41 MiB".
func Bytes(n float64) string {
	for _, unit := range []string{"B", "KiB", "MiB"} {
		if math.Abs(n) < 1024 {
			if unit == "B" || math.Abs(n) >= 100 {
				return fmt.Sprintf("%.0f %s", n, unit)
			}
			return fmt.Sprintf("%.1f %s", n, unit)
		}
		n /= 1024
	}
	return fmt.Sprintf("%.2f GiB", n)
}
