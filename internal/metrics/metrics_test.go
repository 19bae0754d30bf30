package metrics_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"imp.dev/imp/internal/metrics"
)

func TestMetricsAreServedUntilTheContextEnds(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- metrics.ServeOn(ctx, listener, metrics.NewRegistry("imp-test")) }()

	url := "http://" + listener.Addr().String() + "/metrics"
	answer, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`imp_build_info{component="imp-test",version="`, "go_goroutines", "process_start_time_seconds"} {
		if !strings.Contains(string(body), want) {
			t.Errorf("%s is missing in the answer", want)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("an ordinary end gave %v", err)
	}
}

func TestAnAddressInUseIsToldAtOnce(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	err = metrics.Serve(t.Context(), listener.Addr().String(), metrics.NewRegistry("imp-test"))
	if err == nil || !strings.Contains(err.Error(), "listening for metrics") {
		t.Errorf("got %v", err)
	}
}
