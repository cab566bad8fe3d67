package ops_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-mq/penstock/pkg/ops"
)

func TestProbesAndMetrics(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_ops_test_total", Help: "Counts."})
	registry.MustRegister(counter)
	server := ops.New(ops.Probes{
		Live:  func() error { return nil },
		Ready: func() error { return errors.New("etcd does not answer") },
	}, registry)
	for path, want := range map[string]struct {
		status int
		text   string
	}{
		"/livez":               {http.StatusOK, "ok"},
		"/readyz":              {http.StatusServiceUnavailable, "etcd does not answer"},
		"/metrics":             {http.StatusOK, "penstock_ops_test_total 0"},
		"/debug/pprof/cmdline": {http.StatusOK, "ops.test"},
		"/nothing":             {http.StatusNotFound, ""},
	} {
		w := httptest.NewRecorder()
		server.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != want.status || !strings.Contains(w.Body.String(), want.text) {
			t.Errorf("GET %s: %d %q, want %d with %q", path, w.Code, w.Body.String(), want.status, want.text)
		}
	}
}
