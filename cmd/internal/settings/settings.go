// Package settings fills a program's flags from the environment and a YAML file.
//
// A setting has one name everywhere: the flag --data-dir is PENSTOCK_DATA_DIR in the environment and data-dir
// in the file. A flag on the command line wins over the environment, the environment over the file, the file
// over the default. The file is strict: a key that is no flag is an error that names the nearest one. The
// loop of a program's main:
//
//	settings.AddFlags(cmd.Flags())                 // --config, --print-config
//	if err := settings.Load(cmd.Flags()); err != nil {
//		return err                             // a *UsageError: exit 2
//	}
//	if settings.PrintWanted(cmd.Flags()) {
//		return settings.Print(os.Stdout, cmd.Flags())
//	}
package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

const (
	configFlag = "config"
	printFlag  = "print-config"
	envPrefix  = "PENSTOCK_"
)

// maxFileSize bounds what is read of a configuration file.
const maxFileSize = 1 << 20

// UsageError says that a setting is wrong. Programs exit with 2 on it.
type UsageError struct{ Err error }

// Error returns the text of the wrapped error.
func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e *UsageError) Unwrap() error { return e.Err }

// Usagef makes a *UsageError with a formatted text.
func Usagef(format string, args ...any) error { return &UsageError{Err: fmt.Errorf(format, args...)} }

// AddFlags adds --config and --print-config.
func AddFlags(flags *pflag.FlagSet) {
	flags.String(configFlag, "", "YAML file with settings named like the flags")
	flags.Bool(printFlag, false, "print the settings in force, as a file for --config, and exit")
}

// FlagError makes a *UsageError of what cobra says about a command line, and names the nearest flag. It is a
// FlagErrorFunc.
func FlagError(cmd *cobra.Command, err error) error {
	hint := ""
	if name, ok := strings.CutPrefix(err.Error(), "unknown flag: --"); ok {
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		cmd.InheritedFlags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		if near := Nearest(name, known); near != "" {
			hint = "; did you mean --" + near + "?"
		}
	}
	return Usagef("%w%s (see %s --help)", err, hint, cmd.CommandPath())
}

// PrintWanted reports whether --print-config was given.
func PrintWanted(flags *pflag.FlagSet) bool {
	f := flags.Lookup(printFlag)
	return f != nil && f.Value.String() == "true"
}

// Load sets every flag that the command line left alone from the environment, or else from the file that
// --config (or PENSTOCK_CONFIG) names. All errors are *UsageError.
func Load(flags *pflag.FlagSet) error {
	if f := flags.Lookup(configFlag); f != nil && !f.Changed {
		if path, ok := os.LookupEnv(envName(configFlag)); ok {
			if err := flags.Set(configFlag, path); err != nil {
				return Usagef("set --%s from %s: %w", configFlag, envName(configFlag), err)
			}
		}
	}
	file, err := readFile(flags)
	if err != nil {
		return &UsageError{Err: err}
	}
	var failed error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed || failed != nil || !isSetting(f.Name) {
			return
		}
		value, source := "", ""
		if v, ok := os.LookupEnv(envName(f.Name)); ok {
			value, source = v, envName(f.Name)
		} else if v, ok := file[f.Name]; ok {
			value, source = v, flags.Lookup(configFlag).Value.String()
		} else {
			return
		}
		if err := flags.Set(f.Name, value); err != nil {
			failed = Usagef("set --%s to %q from %s: %w", f.Name, value, source, err)
		}
	})
	return failed
}

func isSetting(name string) bool {
	return name != configFlag && name != printFlag && name != "help" && name != "version"
}

func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func readFile(flags *pflag.FlagSet) (map[string]string, error) {
	f := flags.Lookup(configFlag)
	if f == nil || f.Value.String() == "" {
		return map[string]string{}, nil
	}
	path := f.Value.String()
	in, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	defer in.Close()
	text, err := io.ReadAll(io.LimitReader(in, maxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if len(text) > maxFileSize {
		return nil, fmt.Errorf("read configuration %s: more than %d bytes", path, maxFileSize)
	}
	values, err := decode(text, flags)
	if err != nil {
		return nil, fmt.Errorf("read configuration %s: %w", path, err)
	}
	return values, nil
}

// decode reads a flat YAML mapping whose keys are names of flags.
func decode(text []byte, flags *pflag.FlagSet) (map[string]string, error) {
	var doc yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return map[string]string{}, nil
	} else if err != nil {
		return nil, err
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("want lines of the form `name: value`")
	}
	pairs := doc.Content[0].Content
	values := make(map[string]string, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		key, value := pairs[i], pairs[i+1]
		if flags.Lookup(key.Value) == nil || !isSetting(key.Value) {
			return nil, fmt.Errorf("line %d: unknown setting %q%s", key.Line, key.Value, suggest(key.Value, flags))
		}
		if _, twice := values[key.Value]; twice {
			return nil, fmt.Errorf("line %d: setting %q stands twice", key.Line, key.Value)
		}
		text, err := scalar(value)
		if err != nil {
			return nil, fmt.Errorf("line %d: setting %q: %w", value.Line, key.Value, err)
		}
		values[key.Value] = text
	}
	return values, nil
}

func scalar(n *yaml.Node) (string, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value, nil
	case yaml.SequenceNode:
		items := make([]string, len(n.Content))
		for i, item := range n.Content {
			if item.Kind != yaml.ScalarNode {
				return "", errors.New("want a list of plain values")
			}
			items[i] = item.Value
		}
		return strings.Join(items, ","), nil
	default:
		return "", errors.New("want a plain value or a list of them")
	}
}

func suggest(name string, flags *pflag.FlagSet) string {
	var known []string
	flags.VisitAll(func(f *pflag.Flag) {
		if isSetting(f.Name) {
			known = append(known, f.Name)
		}
	})
	if near := Nearest(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}

// Print writes the settings in force as YAML that --config reads back.
func Print(w io.Writer, flags *pflag.FlagSet) error {
	doc := yaml.Node{Kind: yaml.MappingNode}
	flags.VisitAll(func(f *pflag.Flag) {
		if !isSetting(f.Name) || f.Hidden {
			return
		}
		key := yaml.Node{Kind: yaml.ScalarNode, Value: f.Name, HeadComment: f.Usage}
		value := yaml.Node{Kind: yaml.ScalarNode, Value: f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			value = yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
			for _, item := range list.GetSlice() {
				value.Content = append(value.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: item})
			}
		} else if f.Value.Type() == "string" {
			value.Tag = "!!str"
		}
		doc.Content = append(doc.Content, &key, &value)
	})
	enc := yaml.NewEncoder(w)
	if err := enc.Encode(&doc); err != nil {
		return fmt.Errorf("print settings: %w", err)
	}
	return enc.Close()
}

// Nearest returns the name of known with the smallest edit distance to name, if it is near enough to be meant;
// otherwise "". Of several, it is the one of the most similar length: letters that are swapped are more common than letters too many.
func Nearest(name string, known []string) string {
	limit := max(2, len(name)/3)
	if len(name) < 4 {
		limit = 1 // two changes make any short word of any other
	}
	best, bestDistance := "", limit+1
	for _, k := range slices.Sorted(slices.Values(known)) {
		d := editDistance(name, k)
		if d < bestDistance || d == bestDistance && best != "" && longer(name, k) < longer(name, best) {
			best, bestDistance = k, d
		}
	}
	return best
}

// longer is by how many bytes one of them is longer than the other.
func longer(a, b string) int { return max(len(a)-len(b), len(b)-len(a)) }

// editDistance is the Levenshtein distance in bytes.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
