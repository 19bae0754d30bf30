package operator_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/operator"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// process is a whole operator, as in its pod but for the process.
type process struct {
	stop            func()
	health, metrics string
	writes          *writes
}

func startOperator(t *testing.T, cp *controlplane.ForTesting, instance string) *process {
	t.Helper()
	p := &process{health: freeAddress(t), metrics: freeAddress(t), writes: &writes{}}
	cfg := cp.OperatorConfig()
	cfg.Wrap(p.writes.wrap)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- operator.Run(ctx, operator.Options{
			Config: cfg, MetricsAddr: p.metrics, HealthAddr: p.health, LeaderElect: true, LeaseDuration: 3 * time.Second,
			Concurrency: 4, Instance: instance, Clock: clock.RealClock{},
			Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
	}()
	stopped := false
	p.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%s ended with %v", instance, err)
		}
	}
	t.Cleanup(p.stop)
	return p
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func ask(t *testing.T, url string) (status int, body string) {
	t.Helper()
	answer, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	must(t, err)
	return answer.StatusCode, string(content)
}

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline, ticker := time.After(time.Minute), time.NewTicker(20*time.Millisecond)
	defer ticker.Stop()
	for !done() {
		select {
		case <-deadline:
			t.Fatalf("waited a minute for %s", what)
		case <-ticker.C:
		}
	}
}

func TestOperatorsPlaceFollowAndReplaceEachOther(t *testing.T) {
	cp := controlplane.StartForTest(t)
	r := newRigOn(t, cp) // its writers by hand are not used here
	a, b := r.node("a"), r.node("b")
	r.keepBeating(a, b)
	first := startOperator(t, cp, "first")
	await(t, "the first operator to be ready", func() bool { status, _ := ask(t, "http://"+first.health+"/readyz"); return status == 200 })
	r.vm("early")
	await(t, "InvalidSpec", func() bool {
		return strings.HasPrefix(told(r.get("early"), v1alpha1.ConditionReady), "False InvalidSpec")
	})
	r.class("small")
	bound := func(name string) bool { vm := r.get(name); return vm != nil && vm.Status.NodeName != "" }
	await(t, "the VM to be repaired by its class", func() bool { return bound("early") })

	second := startOperator(t, cp, "second")
	await(t, "the standby to be ready", func() bool { status, _ := ask(t, "http://"+second.health+"/readyz"); return status == 200 })
	if status, _ := ask(t, "http://"+second.health+"/healthz"); status != 200 {
		t.Errorf("/healthz answers %d", status)
	}
	first.writes.take()
	// There is room for eight in all.
	for i := range 5 {
		r.vm(fmt.Sprintf("half-%d", i))
	}
	await(t, "the first half to be placed", func() bool {
		for i := range 5 {
			if !bound(fmt.Sprintf("half-%d", i)) {
				return false
			}
		}
		return true
	})
	if got := len(first.writes.take()); got != 10 {
		t.Errorf("%d writes for 5 VMs, want 2 for each", got)
	}
	if got := second.writes.take(); len(got) > 0 {
		t.Errorf("the standby wrote %q", got)
	}
	status, metrics := ask(t, "http://"+first.metrics+"/metrics")
	for _, want := range []string{
		`imp_vm_phase{namespace="` + r.ns + `",phase="Starting"} 6`, "imp_vm_scheduling_latency_seconds_count 6",
		"imp_vm_oldest_unplaced_seconds 0", `controller_runtime_reconcile_total{controller="place"`, "workqueue_depth", "imp_build_info",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics (%d) lacks %s", status, want)
		}
	}

	for i := range 10 { // the end of the first comes in the midst of these
		r.vm(fmt.Sprintf("rest-%d", i))
		if i == 4 {
			go first.stop()
		}
	}
	first.stop()
	await(t, "the other operator to see to the rest", func() bool {
		for i := range 10 {
			if told(r.get(fmt.Sprintf("rest-%d", i)), v1alpha1.ConditionScheduled) == "absent" {
				return false
			}
		}
		return true
	})
	on := map[string]int{}
	vms := &v1alpha1.ImpVMList{}
	must(t, r.admin.List(t.Context(), vms, client.InNamespace(r.ns)))
	for _, vm := range vms.Items {
		on[vm.Status.NodeName]++
	}
	if on[a] != 4 || on[b] != 4 || on[""] != 8 {
		t.Errorf("VMs by node: %v", on)
	}

	// One that goes makes room for one that waits.
	must(t, r.admin.Delete(t.Context(), r.get("early")))
	await(t, "the order to release it", func() bool { return r.get("early").Status.Release != nil })
	r.report("early", func(s *v1alpha1.ImpVMStatus) { s.ReleasedAssignment = 1 })
	await(t, "the deleted VM to go", func() bool { return r.get("early") == nil })
	await(t, "one that waits to take its place", func() bool {
		must(t, r.admin.List(t.Context(), vms, client.InNamespace(r.ns)))
		n := 0
		for _, vm := range vms.Items {
			if vm.Status.NodeName != "" {
				n++
			}
		}
		return n == 8
	})
	r.awaitEvents(t)
}

// keepBeating renews Leases as an agent does, by the real clock.
func (r *rig) keepBeating(nodes ...string) {
	ctx := r.t.Context()
	var beating sync.WaitGroup
	r.t.Cleanup(beating.Wait)
	beating.Go(func() {
		ticker := time.NewTicker(5 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			for _, node := range nodes {
				patch := fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, time.Now().UTC().Format("2006-01-02T15:04:05.000000Z07:00"))
				lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
					Namespace: v1alpha1.SystemNamespace, Name: v1alpha1.LeasePrefix + node,
				}}
				if err := r.admin.Patch(ctx, lease, client.RawPatch(types.MergePatchType, patch)); err != nil && ctx.Err() == nil {
					r.t.Errorf("renewing the Lease of %s: %v", node, err)
				}
			}
		}
	})
}

func (r *rig) awaitEvents(t *testing.T) {
	t.Helper()
	await(t, "the events", func() bool {
		events := &corev1.EventList{}
		must(t, r.admin.List(t.Context(), events, client.InNamespace(r.ns)))
		reasons := map[string]bool{}
		for _, e := range events.Items {
			reasons[e.Reason] = true
			if e.ReportingController != "imp-operator" || e.LastTimestamp.IsZero() || e.EventTime.IsZero() {
				t.Fatalf("event %+v", e)
			}
		}
		return reasons["Placed"] && reasons["NoNodeFits"] && reasons["InvalidSpec"]
	})
}
