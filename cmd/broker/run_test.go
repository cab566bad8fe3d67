package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/cmd/internal/daemon"
)

func runBroker(ctx context.Context, args ...string) (code int, out, errOut string) {
	var stdout, stderr bytes.Buffer
	code = run(ctx, args, &stdout, &stderr)
	return code, stdout.String(), stderr.String()
}

func TestBadSettingsAreOneLineAndExit2(t *testing.T) {
	t.Parallel()
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() }) // after the parallel subtests
	config := filepath.Join(t.TempDir(), "broker.yaml")
	if err := os.WriteFile(config, []byte("ensembel: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":      {[]string{"--ensembel", "3"}, "unknown flag"},
		"argument":          {[]string{"serve"}, `unexpected argument "serve"`},
		"quorum":            {[]string{"--write-quorum", "5"}, "ensemble 3 is below write quorum 5"},
		"lease":             {[]string{"--lease-ttl", "10ms"}, "want at least 1s"},
		"log level":         {[]string{"--log-level", "loud"}, "want debug, info, warn or error"},
		"memory":            {[]string{"--publish-mib", "0"}, "--publish-mib is 0"},
		"address":           {[]string{"--advertise", "a b"}, "want a host name or address"},
		"address's port":    {[]string{"--advertise", "broker:0"}, "want a port above 0"},
		"message":           {[]string{"--max-message-kib", "1000000"}, "at most"},
		"unknown setting":   {[]string{"--config", config}, `did you mean "ensemble"?`},
		"unreadable config": {[]string{"--config", "/nonexistent.yaml"}, "no such file"},
		"port in use":       {[]string{"--listen", taken.Addr().String(), "--http", ""}, "address already in use"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, _, errOut := runBroker(t.Context(), c.args...)
			if code != daemon.ExitUsage || !strings.Contains(errOut, c.want) || strings.Count(errOut, "\n") != 1 {
				t.Errorf("exit %d: %q, want %d and one line with %q", code, errOut, daemon.ExitUsage, c.want)
			}
		})
	}
}

func TestPrintedConfigurationStartsTheSame(t *testing.T) {
	t.Parallel()
	code, printed, errOut := runBroker(t.Context(), "--roll-mib", "7", "--print-config")
	if code != daemon.ExitOK || !strings.Contains(printed, "roll-mib: 7\n") {
		t.Fatalf("exit %d: %s%s", code, printed, errOut)
	}
	config := filepath.Join(t.TempDir(), "broker.yaml")
	if err := os.WriteFile(config, []byte(printed), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, again, errOut := runBroker(t.Context(), "--config", config, "--print-config"); code != daemon.ExitOK || again != printed {
		t.Fatalf("exit %d: %s\n%s\nwant:\n%s", code, errOut, again, printed)
	}
}

// A broker that is told to stop while it waits for etcd has not failed.
func TestStopsWhileEtcdIsAway(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	code, _, errOut := runBroker(ctx, "--etcd", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--http", "")
	if code != daemon.ExitOK {
		t.Fatalf("exit %d: %s", code, errOut)
	}
}

// A broker that waits for etcd lives and is not ready: whoever probes it must neither kill it nor send it clients.
func TestProbesAnswerWhileEtcdIsAway(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	logs, w := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		var out bytes.Buffer
		ended <- run(ctx, []string{"--etcd", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json"}, &out, w)
		w.Close()
	}()
	defer func() {
		cancel()
		go func() { _, _ = io.Copy(io.Discard, logs) }()
		if code := <-ended; code != daemon.ExitOK {
			t.Errorf("exit %d", code)
		}
	}()
	lines := bufio.NewScanner(logs)
	get := func(url string) (int, string) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	var said []string
	var url string
	for len(said) < 2 && lines.Scan() {
		var line struct{ Msg, HTTP string }
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		said = append(said, line.Msg)
		url = cmp.Or(url, line.HTTP)
	}
	if code, body := get(url + "/livez"); code != http.StatusOK {
		t.Errorf("livez: %d %s", code, body)
	}
	if code, body := get(url + "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "etcd") {
		t.Errorf("readyz: %d %s", code, body)
	}
	if len(said) < 2 || !strings.Contains(said[1], "etcd does not answer") {
		t.Errorf("logged %q, want that etcd does not answer", said)
	}
}
