package bench

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestUsageOfAProcess(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	dir := filepath.Join(proc, "42")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const stat = "42 (a) b (c)) S 1 42 42 0 -1 4194560 1 0 2 0 250 50 0 0 20 0 11 0 1234 99999 7 18446744073709551615 1 1 0\n"
	write("stat", stat)
	u, err := readUsage(proc, 42)
	if want := (usage{cpu: 3 * time.Second, rss: 7 * int64(os.Getpagesize()), written: -1}); err != nil || u != want {
		t.Fatalf("read %+v, %v; want %+v", u, err, want)
	}
	write("io", "rchar: 1\nwchar: 2\nread_bytes: 3\nwrite_bytes: 4096\ncancelled_write_bytes: 5\n")
	if u, err = readUsage(proc, 42); err != nil || u.written != 4096 {
		t.Fatalf("read %+v, %v", u, err)
	}
	for _, text := range []string{"", "42 (a) S 1", strings.Replace(stat, " 250 ", " x ", 1)} {
		write("stat", text)
		if _, err := readUsage(proc, 42); err == nil {
			t.Errorf("%q was read", text)
		}
	}
	// This process is real.
	own, err := readUsage("/proc", os.Getpid())
	if err != nil || own.rss < 1<<20 {
		t.Fatalf("read %+v, %v", own, err)
	}
}

func TestSyncsAreCounted(t *testing.T) {
	t.Parallel()
	pages := http.NewServeMux()
	serve := func(path, text string) {
		pages.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) })
	}
	serve("/two", "# HELP "+SyncMetric+" x\n"+SyncMetric+"{bookie=\"a b} \"} 3\n"+SyncMetric+"{bookie=\"c\"} 4e2 17\n"+SyncMetric+"_created 9\n")
	serve("/one", SyncMetric+" 5\n")
	serve("/none", "up 1\n")
	serve("/bad", SyncMetric+" x\n")
	server := httptest.NewServer(pages)
	defer server.Close()
	n, err := CountSyncs(t.Context(), []string{server.URL + "/two", server.URL + "/one"})
	if err != nil || n != 408 {
		t.Fatalf("counted %v, %v", n, err)
	}
	for path, want := range map[string]string{"/none": "there is no " + SyncMetric, "/bad": "x", "/missing": "404"} {
		if _, err := CountSyncs(t.Context(), []string{server.URL + path}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}
