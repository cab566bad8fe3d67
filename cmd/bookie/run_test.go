package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/cmd/internal/daemon"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/standalone/embedetcd"
)

var (
	etcd  *embedetcd.Server
	lives atomic.Int64 // counts the clusters that bookies have joined
)

func TestMain(m *testing.M) {
	os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
}

// try runs the program to its end.
func try(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(t.Context(), args, &o, &e)
	return code, o.String(), e.String()
}

func localFlags(cluster, dir string) []string {
	return []string{
		"--etcd", strings.Join(etcd.Endpoints(), ","), "--cluster", cluster, "--bookie-id", "b1", "--data-dir", dir,
		"--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "error", "--segment-mib", "1",
	}
}

func TestBadInputIsOneLineAndExit2(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("data-dri: /x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":      {[]string{"--data-dri", "/x"}, "data-dri"},
		"argument":          {[]string{"start"}, "start"},
		"not a number":      {[]string{"--segment-mib", "big"}, "segment-mib"},
		"zero":              {[]string{"--segment-mib", "0"}, "segment-mib"},
		"watermarks":        {[]string{"--low-watermark", "0.99"}, "low-watermark"},
		"sync messages":     {[]string{"--sync-messages", "5"}, "sync-interval"},
		"cluster":           {[]string{"--cluster", "a/b"}, "cluster"},
		"level":             {[]string{"--log-level", "loud"}, "log-level"},
		"no such config":    {[]string{"--config", "/no/such/file"}, "/no/such/file"},
		"unknown key":       {[]string{"--config", bad}, "data-dir"},
		"bookie id":         {append(localFlags("busy", t.TempDir()), "--bookie-id", "a/b"), "a/b"},
		"port in use":       {append(localFlags("busy", t.TempDir()), "--listen", taken.Addr().String()), "address already in use"},
		"impossible listen": {append(localFlags("busy", t.TempDir()), "--http", "nowhere"), "nowhere"},
	} {
		code, out, errOut := try(t, c.args...)
		if code != daemon.ExitUsage || out != "" || strings.Count(errOut, "\n") != 1 || !strings.Contains(errOut, c.want) {
			t.Errorf("%s: exit %d, stdout %q, stderr %q", name, code, out, errOut)
		}
	}
}

func TestPrintConfigReadsBack(t *testing.T) {
	t.Parallel()
	code, out, _ := try(t, "--print-config", "--zone", "z9", "--gc-grace", "7m")
	if code != daemon.ExitOK || !strings.Contains(out, "zone: z9") {
		t.Fatalf("exit %d: %s", code, out)
	}
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
		t.Fatal(err)
	}
	code, again, errOut := try(t, "--print-config", "--config", file)
	if code != daemon.ExitOK || again != out {
		t.Fatalf("exit %d: %s%s", code, again, errOut)
	}
}

// It serves, stops when told to, and refuses a disk that lost its data.
func TestServeStopAndRefuse(t *testing.T) {
	t.Parallel()
	cluster := fmt.Sprintf("life-%d", lives.Add(1)) // a run of its own each time
	flags := localFlags(cluster, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var errOut bytes.Buffer
	done := make(chan int, 1)
	go func() { done <- run(ctx, flags, &bytes.Buffer{}, &errOut) }()

	store := meta.New(etcd.Client(), cluster, nil)
	cache := meta.NewCache(t.Context(), store)
	defer cache.Close()
	for {
		changed := cache.Changed(meta.KindBookies)
		if len(cache.Bookies()) == 1 {
			break
		}
		select {
		case <-changed:
		case code := <-done:
			t.Fatalf("exit %d: %s", code, errOut.String())
		}
	}
	cancel()
	if code := <-done; code != daemon.ExitOK || errOut.Len() > 0 {
		t.Fatalf("exit %d: %s", code, errOut.String())
	}
	code, _, text := try(t, localFlags(cluster, t.TempDir())...)
	if code != exitRefused || strings.Count(text, "\n") != 1 || !strings.Contains(text, "--bookie-id") {
		t.Fatalf("wiped disk: exit %d: %s", code, text)
	}
}

// Without etcd it waits, and still stops when told to.
func TestStopsWhileWaitingForEtcd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	var errOut bytes.Buffer
	flags := append(localFlags("dead", t.TempDir()), "--etcd", "127.0.0.1:1")
	flags[1] = "127.0.0.1:1"
	if code := run(ctx, flags, &bytes.Buffer{}, &errOut); code != daemon.ExitOK || errOut.Len() > 0 {
		t.Fatalf("exit %d: %s", code, errOut.String())
	}
}
