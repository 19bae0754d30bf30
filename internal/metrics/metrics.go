// Package metrics holds what all programs' metrics have in common: how they are served and what every registry has in it.
// It knows nothing of Kubernetes, so that the runtime may use it.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"imp.dev/imp/internal/version"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Namespace is the prefix of every metric of Imp's own: imp_….
const Namespace = "imp"

// NewRegistry makes a registry with the Go runtime's and the process's metrics and imp_build_info in it. component is the
// program's name.
func NewRegistry(component string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		BuildInfo(component),
	)
	return r
}

// BuildInfo is imp_build_info{component,version}, always 1.
func BuildInfo(component string) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: Namespace, Name: "build_info", Help: "Always 1; the labels tell the program and its version.",
		ConstLabels: prometheus.Labels{"component": component, "version": version.String()},
	})
	g.Set(1)
	return g
}

// LatencyBuckets, in seconds, reach from 10 ms to 10 min: a placement takes milliseconds, a boot seconds, a pull minutes.
func LatencyBuckets() []float64 {
	return []float64{0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
}

// Handler serves what g gathers. A collector that fails leaves its own metrics out and not those of the others.
func Handler(g prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// Serve answers GET /metrics on addr until ctx ends; then it gives nil. An addr of "" or "0" serves nothing and waits for ctx.
func Serve(ctx context.Context, addr string, g prometheus.Gatherer) error {
	if addr == "" || addr == "0" {
		<-ctx.Done()
		return nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("listening for metrics: %w", err)
	}
	return ServeOn(ctx, listener, g)
}

// ServeOn is Serve on a listener that is open already, which it closes.
func ServeOn(ctx context.Context, listener net.Listener, g prometheus.Gatherer) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", Handler(g))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stopped := context.AfterFunc(ctx, func() {
		// A scrape under way is let end, but it does not hold up the program's end.
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close()
		}
	})
	defer stopped()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics: %w", err)
	}
	return nil
}
