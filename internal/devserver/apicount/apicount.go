// Package apicount reads the API server's own count of the requests that write.
package apicount

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Writes reads the count, by "VERB resource/subresource", with " refused" behind it for requests that were not answered with success.
// It begins anew with each start of the API server. cfg must be an admin's.
func Writes(ctx context.Context, cfg *rest.Config) (map[string]float64, error) {
	clientset, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	page, err := clientset.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	counts := map[string]float64{}
	lines := bufio.NewScanner(bytes.NewReader(page))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		words, ok := strings.CutPrefix(lines.Text(), "apiserver_request_total{")
		if !ok {
			continue
		}
		labels, value, _ := strings.Cut(words, "} ")
		verb := label(labels, "verb")
		if verb != "POST" && verb != "PUT" && verb != "PATCH" && verb != "APPLY" && verb != "DELETE" {
			continue
		}
		resource := label(labels, "resource")
		if sub := label(labels, "subresource"); sub != "" {
			resource += "/" + sub
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(label(labels, "code"), "2") {
			counts[verb+" "+resource] += n
		} else {
			counts[verb+" "+resource+" refused"] += n
		}
	}
	return counts, lines.Err()
}

func label(labels, name string) string {
	_, rest, ok := strings.Cut(labels, name+`="`)
	if !ok {
		return ""
	}
	value, _, _ := strings.Cut(rest, `"`)
	return value
}
