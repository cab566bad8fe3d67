// Package ops is the HTTP port of a process: probes, metrics and profiles, for the people and machines that run it.
//
//	server := ops.New(ops.Probes{Live: node.Live, Ready: node.Ready}, registry)
//	go server.Serve(listener)
//	…
//	server.Shutdown(ctx)
package ops

import (
	"fmt"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Probes answer what an orchestrator asks; each returns nil, or an error that says what is wrong. They must not block.
type Probes struct {
	// Live fails only if nothing but a restart helps.
	Live func() error
	// Ready fails while the process cannot do its work.
	Ready func() error
}

// Page is one more page, to be read with GET.
type Page struct {
	Path  string
	Serve http.HandlerFunc
}

// New returns a server of /livez, /readyz, /metrics (gatherer may be nil: none), /debug/pprof and further pages, with limits on what
// a client may send.
func New(p Probes, gatherer prometheus.Gatherer, pages ...Page) *http.Server {
	mux := http.NewServeMux()
	probe := func(ask func() error) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if err := ask(); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				_, _ = fmt.Fprintln(w, err)
				return
			}
			_, _ = fmt.Fprintln(w, "ok")
		}
	}
	mux.HandleFunc("GET /livez", probe(p.Live))
	mux.HandleFunc("GET /readyz", probe(p.Ready))
	if gatherer != nil {
		mux.Handle("GET /metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	}
	for _, p := range pages {
		mux.HandleFunc("GET "+p.Path, p.Serve)
	}
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return &http.Server{
		Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10,
	}
}
