package process

import (
	"bufio"
	"io"
	"strconv"
	"strings"
)

// SumMetric adds up the series of one metric in the text format, and reports whether there are any.
func SumMetric(r io.Reader, name string) (sum float64, found bool, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		fields := strings.Fields(rest[strings.LastIndexByte(rest, '}')+1:])
		if len(fields) == 0 {
			continue
		}
		v, err := strconv.ParseFloat(fields[0], 64)
		if err != nil {
			return 0, false, err
		}
		sum += v
		found = true
	}
	return sum, found, lines.Err()
}
