package bench

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// WriteTable writes the result for a person: what was run, a row for each kind of latency in each phase, one for each process,
// and what was verified.
func (r *Result) WriteTable(w io.Writer) error {
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s\n%s on %s\n\n", r.Scenario, r.Driver, r.Machine)
	writeRows(&out, [][]string{{"PHASE", "SECONDS", "OF", "MESSAGES/S", "MB/S", "P50 ms", "P90 ms", "P99 ms", "P99.9 ms", "MAX ms"}}, r.flowRows())
	out.WriteByte('\n')
	writeRows(&out, [][]string{{"PHASE", "PROCESS", "CPU µs/MESSAGE", "CORES", "RSS MiB", "WRITTEN MB", "WRITTEN/BYTE"}}, r.costRows())
	out.WriteByte('\n')
	for _, line := range r.Notes() {
		fmt.Fprintln(&out, line)
	}
	if _, err := w.Write(out.Bytes()); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

func writeRows(out *bytes.Buffer, parts ...[][]string) {
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, rows := range parts {
		for _, row := range rows {
			fmt.Fprintln(tw, strings.Join(row, "\t"))
		}
	}
	_ = tw.Flush() // to memory
}

// String says what load it is.
func (s Scenario) String() string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	each := func(n int, thing, of string) {
		text := plural(n, thing)
		if of != "" {
			text += " a " + of
		}
		parts = append(parts, text)
	}
	of := ""
	if s.Topics > 1 {
		of = "topic"
	}
	each(s.Topics, "topic", "")
	if s.Partitions > 1 {
		each(s.Partitions, "partition", of)
	}
	each(s.Producers, "producer", of)
	if s.Subscriptions > 0 {
		each(s.Subscriptions, "subscription", of)
	} else {
		add("no subscription")
	}
	if s.Consumers > 1 {
		each(s.Consumers, "consumer", "subscription")
	}
	add("%s bytes", grouped(uint64(s.Size)))
	switch {
	case s.InFlight == 1 && s.Rate == 0:
		add("one message in flight a producer")
	case s.Rate == 0:
		add("%s in flight a producer", grouped(uint64(s.InFlight)))
	default:
		add("%s messages/s", grouped(uint64(s.Rate)))
	}
	if s.Batching.Messages == 1 {
		add("no batching")
	}
	if s.Ack != "" {
		add("ack %s", s.Ack)
	}
	if s.Keys != KeysNone {
		add("%s keys %s", grouped(uint64(s.KeyCount)), s.Keys)
	}
	if s.Backlog > 0 {
		add("backlog of %s messages", grouped(uint64(s.Backlog)))
		if s.Live {
			parts[len(parts)-1] += ", consumed while publishing goes on"
		}
	}
	text := strings.Join(parts, ", ")
	if s.Name != "" {
		text = s.Name + ": " + text
	}
	return text
}

// String says which machine it was.
func (m Machine) String() string {
	return fmt.Sprintf("%s %s/%s, %s, load %.2f before", plural(m.CPUs, "CPU"), m.OS, m.Arch, m.Go, m.Load)
}

func (r *Result) flowRows() (rows [][]string) {
	row := func(phase, seconds, of string, f Flow, l *Latency) {
		cells := []string{phase, seconds, of, grouped(uint64(f.PerSecond + 0.5)), decimals(f.BytesPerSecond / 1e6)}
		if l == nil {
			l = &Latency{}
			rows = append(rows, append(cells, "–", "–", "–", "–", "–"))
			return
		}
		rows = append(rows, append(cells, decimals(l.P50Ms), decimals(l.P90Ms), decimals(l.P99Ms), decimals(l.P999Ms), decimals(l.MaxMs)))
	}
	for _, p := range r.Phases {
		name, seconds := p.Name, strconv.FormatFloat(p.Seconds, 'f', 1, 64)
		if p.Name != PhaseCatchUp || r.Scenario.Live {
			row(name, seconds, "publish", p.Published, p.Publish)
			name, seconds = "", ""
		}
		if p.Name != PhaseBuild && r.Scenario.Subscriptions > 0 {
			row(name, seconds, "end-to-end", p.Received, p.EndToEnd)
		}
		if l := p.DiskProbe; l != nil {
			row("", "", "4 KiB disk probe", Flow{
				Messages: uint64(l.Count), PerSecond: ratio(float64(l.Count), p.Seconds),
				BytesPerSecond: ratio(float64(l.Count), p.Seconds) * (4 << 10),
			}, l)
		}
	}
	return rows
}

func (r *Result) costRows() (rows [][]string) {
	for _, p := range r.Phases {
		name := p.Name
		for _, c := range p.Processes {
			rows = append(rows, append([]string{name}, c.cells(p)...))
			name = ""
		}
		if len(p.Processes) > 1 {
			rows = append(rows, append([]string{name}, p.Total().cells(p)...))
		}
	}
	return rows
}

// Total is the cost of all processes together, called "all". What one of them does not tell, it does not tell either.
func (p *Phase) Total() Cost {
	sum, written := Cost{Name: "all"}, int64(0)
	told := true
	for _, c := range p.Processes {
		sum.CPUSeconds += c.CPUSeconds
		sum.CPUPerMessageMicros += c.CPUPerMessageMicros
		sum.RSSBytes += c.RSSBytes
		sum.WrittenPerByte += c.WrittenPerByte
		sum.Gone = sum.Gone || c.Gone
		if told = told && c.WrittenBytes != nil; told {
			written += *c.WrittenBytes
		}
	}
	if told {
		sum.WrittenBytes = &written
	}
	return sum
}

func (c Cost) cells(p Phase) []string {
	if c.Gone {
		return []string{c.Name, "gone", "", "", "", ""}
	}
	written, perByte := "–", "–"
	if c.WrittenBytes != nil {
		written, perByte = decimals(float64(*c.WrittenBytes)/1e6), decimals(c.WrittenPerByte)
		if p.Published.Messages == 0 {
			perByte = "–"
		}
	}
	return []string{c.Name, decimals(c.CPUPerMessageMicros), decimals(ratio(c.CPUSeconds, p.Seconds)), decimals(float64(c.RSSBytes) / (1 << 20)), written, perByte}
}

// Notes are lines for a person: what was verified, and what else is to be known of the figures.
func (r *Result) Notes() (lines []string) {
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for _, p := range r.Phases {
		if p.Syncs != nil {
			each := ""
			if p.Published.Messages > 0 {
				each = fmt.Sprintf(", %s a message published", decimals(p.Syncs.PerMessage))
			}
			add("%s: %s syncs of bookies%s", p.Name, grouped(p.Syncs.Count), each)
		}
	}
	v := r.Verified
	verdict := "verified"
	if err := r.Err(); err != nil {
		add("WRONG: %v", err)
		verdict = "counted"
	} else if r.Interrupted != "" {
		verdict = "as far as it got"
	}
	add("%s: %s sent, %s acknowledged, %s failed; %s of %s received, %s missing, %s twice", verdict, grouped(v.Sent), grouped(v.Acknowledged),
		grouped(v.Failed), grouped(v.Received), grouped(v.Expected), grouped(v.Missing), grouped(v.Duplicates))
	for _, f := range r.Failures {
		add("failed %s times: %s", grouped(f.Count), f.Error)
	}
	if v.Unsent > 0 {
		add("the rate was not reached: %s messages that were due were not sent in time, and their delay is in no latency", grouped(v.Unsent))
	}
	for _, text := range r.Unobserved {
		add("not measured: %s", text)
	}
	if l := r.Lateness; l != nil {
		add("the engine woke late by %s ms (p50), %s ms (p99), %s ms (max): it is in the latencies", decimals(l.P50Ms), decimals(l.P99Ms), decimals(l.MaxMs))
	}
	if r.Interrupted != "" {
		add("interrupted: %s", r.Interrupted)
	}
	return lines
}

// grouped formats a number with a comma between thousands.
func grouped(n uint64) string {
	text := strconv.FormatUint(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// decimals formats a number with three digits or more, as it stands before the point.
func decimals(v float64) string {
	digits := 0
	switch {
	case v == 0:
	case v < 0.1:
		digits = 4
	case v < 1:
		digits = 3
	case v < 10:
		digits = 2
	case v < 100:
		digits = 1
	default:
		return grouped(uint64(v + 0.5))
	}
	return strconv.FormatFloat(v, 'f', digits, 64)
}
