package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

// apiVersion stands in all JSON and YAML output. Fields are only added within a version.
const apiVersion = "penstock/v1"

var outputFormats = []string{"table", "wide", "json", "jsonl", "yaml", "name"}

// view is what a command prints, in any format.
type view struct {
	kind    string   // names the JSON document: "TopicList"
	columns []string // header of the table
	wide    int      // so many of the last columns appear only in wide output
	rows    []row
	single  bool // describes one thing: the table is written as "name: value" lines, JSON without a list
	lines   bool // describes several things, each as "name: value" lines
	plain   bool // the table is a line of "cell: cell" a row, without a header
}

// row is one thing listed.
type row struct {
	name  string   // what -o name prints
	cells []string // as many as columns
	data  any      // what JSON and YAML print; a struct with json tags
}

func addOutputFlag(cmd *cobra.Command) {
	cmd.Flags().StringP("output", "o", "table", "output format: "+strings.Join(outputFormats, "|"))
	registerFlagCompletion(cmd, "output", outputFormats)
}

func registerFlagCompletion(cmd *cobra.Command, flag string, values []string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(fmt.Sprintf("complete --%s: %v", flag, err)) // the flag was added just before
	}
}

// outputFormat checks the flag before any work is done.
func outputFormat(cmd *cobra.Command) (string, error) {
	format, err := cmd.Flags().GetString("output")
	if err != nil {
		return "", err
	}
	if !slices.Contains(outputFormats, format) {
		return "", settings.Usagef("unknown output format %q: want one of %s", format, strings.Join(outputFormats, ", "))
	}
	return format, nil
}

func (v view) print(w io.Writer, format string) error {
	switch format {
	case "json":
		return v.printJSON(w)
	case "jsonl":
		enc := json.NewEncoder(w)
		for _, r := range v.rows {
			if err := enc.Encode(r.data); err != nil {
				return fmt.Errorf("print %s: %w", v.kind, err)
			}
		}
		return nil
	case "yaml":
		return v.printYAML(w)
	case "name":
		for _, r := range v.rows {
			fmt.Fprintln(w, r.name)
		}
		return nil
	}
	switch {
	case v.plain:
		for _, r := range v.rows {
			fmt.Fprintln(w, strings.Join(r.cells, ": "))
		}
		return nil
	case v.single, v.lines:
		for i := range v.rows {
			if i > 0 {
				fmt.Fprintln(w)
			}
			if err := v.printLines(w, v.rows[i]); err != nil {
				return err
			}
		}
		return nil
	}
	return v.printTable(w, format == "wide")
}

func (v view) document() any {
	type header struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	h := header{APIVersion: apiVersion, Kind: v.kind}
	if v.single {
		return struct {
			header
			Item any `json:"item"`
		}{h, v.rows[0].data}
	}
	items := make([]any, len(v.rows))
	for i, r := range v.rows {
		items[i] = r.data
	}
	return struct {
		header
		Items []any `json:"items"`
	}{h, items}
}

func (v view) printJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v.document()); err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	return nil
}

// printYAML writes the JSON document as YAML: JSON is YAML, so only the style changes and names and order stay.
func (v view) printYAML(w io.Writer) error {
	text, err := json.Marshal(v.document())
	if err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	blockStyle(&doc)
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(&doc); err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	if _, err := w.Write(out.Bytes()); err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	return nil
}

func blockStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		blockStyle(c)
	}
}

func (v view) printTable(w io.Writer, wide bool) error {
	n := len(v.columns)
	if !wide {
		n -= v.wide
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, strings.Join(v.columns[:n], "\t"))
	for _, r := range v.rows {
		fmt.Fprintln(tw, strings.Join(r.cells[:n], "\t"))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	return nil
}

func (v view) printLines(w io.Writer, r row) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i, c := range v.columns {
		value := r.cells[i]
		for j, line := range strings.Split(value, "\n") {
			label := strings.ToLower(c) + ":"
			if j > 0 {
				label = ""
			}
			fmt.Fprintf(tw, "%s\t%s\n", label, line)
		}
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("print %s: %w", v.kind, err)
	}
	return nil
}

// bytesText formats a number of bytes with a binary unit and three digits.
func bytesText(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, exponent := float64(n)/unit, 0
	for value >= unit && exponent < 4 {
		value /= unit
		exponent++
	}
	return fmt.Sprintf("%.3g %ciB", value, "KMGTP"[exponent])
}
