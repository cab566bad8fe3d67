package settings_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
)

func newFlags(t *testing.T, args ...string) *pflag.FlagSet {
	t.Helper()
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	settings.AddFlags(flags)
	flags.String("data-dir", "/default", "where data lies")
	flags.Int("bookies", 1, "how many")
	flags.Duration("lease-ttl", time.Second, "how long")
	flags.StringSlice("etcd", []string{"a:1"}, "endpoints")
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return flags
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFlagBeatsEnvironmentBeatsFileBeatsDefault(t *testing.T) {
	path := writeConfig(t, "data-dir: /file\nbookies: 7\netcd: [b:2, c:3]\n")
	t.Setenv("PENSTOCK_CONFIG", path)
	t.Setenv("PENSTOCK_BOOKIES", "5")
	t.Setenv("PENSTOCK_DATA_DIR", "/env")
	flags := newFlags(t, "--data-dir", "/flag")
	if err := settings.Load(flags); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"data-dir": "/flag", "bookies": "5", "etcd": "[b:2,c:3]", "lease-ttl": "1s",
	} {
		if got := flags.Lookup(name).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", name, got, want)
		}
	}
}

func TestBadConfigurationIsAUsageErrorThatHelps(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ file, want string }{
		"unknown key":  {"data-dri: /x\n", `line 1: unknown setting "data-dri"; did you mean "data-dir"?`},
		"twice":        {"bookies: 1\nbookies: 2\n", `line 2: setting "bookies" stands twice`},
		"wrong type":   {"bookies: many\n", `set --bookies to "many"`},
		"nested":       {"data-dir: {a: b}\n", "want a plain value"},
		"not a map":    {"- a\n", "name: value"},
		"not YAML":     {"a: [\n", "yaml"},
		"config in it": {"config: other.yaml\n", `unknown setting "config"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := settings.Load(newFlags(t, "--config", writeConfig(t, c.file)))
			var usage *settings.UsageError
			if !errors.As(err, &usage) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want a usage error with %q", err, c.want)
			}
		})
	}
	err := settings.Load(newFlags(t, "--config", "/nonexistent.yaml"))
	if !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("missing file: %v", err)
	}
}

func TestPrintedSettingsReadBack(t *testing.T) {
	t.Parallel()
	flags := newFlags(t, "--data-dir", "on", "--etcd", "x:1,y:2", "--lease-ttl", "3s")
	var out bytes.Buffer
	if err := settings.Print(&out, flags); err != nil {
		t.Fatal(err)
	}
	again := newFlags(t, "--config", writeConfig(t, out.String()))
	if err := settings.Load(again); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if got := again.Lookup(f.Name).Value.String(); f.Name != "config" && got != f.Value.String() {
			t.Errorf("--%s reads back as %q, want %q", f.Name, got, f.Value)
		}
	})
}

func TestNearest(t *testing.T) {
	t.Parallel()
	known := []string{"subscription", "topic", "bookie"}
	for name, want := range map[string]string{"topci": "topic", "bokie": "bookie", "zzzzzzz": "", "subscriptions": "subscription"} {
		if got := settings.Nearest(name, known); got != want {
			t.Errorf("nearest to %q is %q, want %q", name, got, want)
		}
	}
}

func FuzzLoadFile(f *testing.F) {
	f.Add("data-dir: x\n")
	f.Add("a: &a [*a]\n")
	f.Fuzz(func(t *testing.T, text string) {
		var usage *settings.UsageError
		if err := settings.Load(newFlags(t, "--config", writeConfig(t, text))); err != nil && !errors.As(err, &usage) {
			t.Fatalf("not a usage error: %v", err)
		}
	})
}
