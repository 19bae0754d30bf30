package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/fabric"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// bulkMiB is what one transfer between guests carries: seconds of an emulated guest, and little enough to stay in its page cache.
const bulkMiB = 64

// bulkServer serves a file of zeros; bulkClient fetches it whenever it is asked to, and answers in hundredths of a second.
const (
	bulkServer = `mkdir -p /srv && dd if=/dev/zero of=/srv/bulk bs=1M count=64 2>/dev/null && exec httpd -f -p 8080 -h /srv`
	bulkClient = `mkdir -p /srv/cgi-bin && cat >/srv/cgi-bin/fetch <<'END' && chmod 755 /srv/cgi-bin/fetch && exec httpd -f -p 8080 -h /srv
#!/bin/sh
read began rest </proc/uptime
wget -q -O /dev/null "http://$QUERY_STRING:8080/bulk" || { printf 'Status: 500\r\n\r\n'; exit 0; }
read ended rest </proc/uptime
printf 'Content-Type: text/plain\r\n\r\n%s %s\n' "$began" "$ended"
END`
)

// overlay compares what two guests on two nodes pass between them with what two on one node do.
func (b *bench) overlay(ctx context.Context) error {
	n := &v1alpha1.ImpNetwork{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "bench"},
		Spec:       v1alpha1.ImpNetworkSpec{Subnet: "10.80.0.0/24"},
	}
	if err := b.client.Create(ctx, n); err != nil {
		return err
	}
	if err := poll(ctx, func() (bool, error) {
		err := b.client.Get(ctx, client.ObjectKeyFromObject(n), n)
		return meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionReady), err
	}); err != nil {
		return fmt.Errorf("waiting for a network: %w (%+v)", err, n.Status)
	}
	nodes := b.server.NodeNames()
	vms := map[string]*v1alpha1.ImpVM{}
	for _, guest := range []struct{ name, node, script string }{
		{"server", nodes[0], bulkServer}, {"near", nodes[0], bulkClient}, {"far", nodes[1], bulkClient},
	} {
		vm := b.vm(guest.name, guest.script)
		vm.Spec.NodeName, vm.Spec.NetworkRef = guest.node, &v1alpha1.NetworkReference{Name: n.Name}
		if err := b.client.Create(ctx, vm); err != nil {
			return err
		}
		now, err := b.await(ctx, vm, started)
		if err != nil {
			return fmt.Errorf("waiting for guest %s: %w", guest.name, err)
		}
		vms[guest.name] = now
	}
	took := map[string][]time.Duration{}
	for round := range b.rounds + 1 {
		for _, who := range []string{"near", "far"} {
			vm := vms[who]
			d, err := fetch(ctx, b.server.NetworkNamespace(vm.Status.NodeName, string(n.UID)), vm.Status.IP, vms["server"].Status.IP)
			if err != nil {
				return fmt.Errorf("having %s fetch from server: %w", who, err)
			}
			if round > 0 { // the first warms caches
				took[who] = append(took[who], d)
			}
		}
	}
	fmt.Fprintf(b.out, "\n%d MiB by HTTP from one guest to another, MTU %d, %d rounds in turn\n", bulkMiB, n.Status.MTU, b.rounds)
	for _, line := range []struct{ who, words string }{{"near", "on one node "}, {"far", "on two nodes"}} {
		fmt.Fprintf(b.out, "  %s  %s: %.0f MiB/s\n", line.words, spread(took[line.who]), bulkMiB/median(took[line.who]).Seconds())
	}
	fmt.Fprintf(b.out, "  throughput over the overlay against one node: %.2f\n", median(took["near"]).Seconds()/median(took["far"]).Seconds())
	for _, vm := range vms {
		if err := b.remove(ctx, vm); err != nil {
			return err
		}
	}
	return b.client.Delete(ctx, n)
}

// fetch has a guest fetch the file, and gives the time that it took there. The guest is asked from inside its network.
func fetch(ctx context.Context, inside fabric.Namespace, guest, server string) (took time.Duration, err error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return inside.Dial(ctx, network, address)
	}}
	err = poll(ctx, func() (bool, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(guest, "8080")+"/cgi-bin/fetch?"+server, nil)
		if err != nil {
			return false, err
		}
		answer, err := (&http.Client{Transport: transport}).Do(request)
		if err != nil {
			return false, ctx.Err() // it does not listen yet
		}
		defer answer.Body.Close()
		page, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK {
			return false, err // the server does not listen yet
		}
		var at [2]float64
		words := strings.Fields(string(page))
		if len(words) != len(at) {
			return false, fmt.Errorf("reading %q", page)
		}
		for i, word := range words {
			if at[i], err = strconv.ParseFloat(word, 64); err != nil {
				return false, err
			}
		}
		took = time.Duration((at[1] - at[0]) * float64(time.Second))
		return true, nil
	})
	return took, err
}
