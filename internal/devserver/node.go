package devserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver/child"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
)

// Programs of a server.
const (
	operatorProgram = "imp-operator"
	agentProgram    = "imp-agent"
	runtimeProgram  = "imp-runtime"
)

// Program names one of Imp's programs for Start and Kill.
type Program string

// The programs. The operator belongs to no node: its node is "".
const (
	Operator Program = operatorProgram
	Agent    Program = agentProgram
	Runtime  Program = runtimeProgram
)

type programKey struct {
	program Program
	node    string
}

func (k programKey) String() string {
	if k.node == "" {
		return string(k.program)
	}
	return string(k.program) + "-" + k.node
}

// NodeNames are the nodes of the server.
func (s *Server) NodeNames() []string {
	names := make([]string, s.opts.Nodes)
	for i := range names {
		names[i] = "node-" + strconv.Itoa(i+1)
	}
	return names
}

// Start starts a program that Kill has ended. It does not wait for it to be ready.
func (s *Server) Start(program Program, node string) error {
	key := programKey{program: program, node: node}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.running[key]; p != nil && p.Running() {
		return fmt.Errorf("starting %s: it runs", key)
	}
	if s.metrics[key] == "" {
		address, err := freeAddress()
		if err != nil {
			return err
		}
		s.metrics[key] = address
	}
	p, err := s.launch(key)
	if err != nil {
		return err
	}
	s.running[key] = p
	s.watch(p)
	return nil
}

// Kill ends a program with SIGKILL and waits until it is gone. What it has started, VMs above all, lives on.
func (s *Server) Kill(program Program, node string) error {
	key := programKey{program: program, node: node}
	s.mu.Lock()
	p := s.running[key]
	delete(s.running, key)
	s.mu.Unlock()
	if p == nil {
		return fmt.Errorf("killing %s: it does not run", key)
	}
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing %s: %w", key, err)
	}
	<-p.Done()
	return nil
}

// PID of a running program; 0 if it does not run.
func (s *Server) PID(program Program, node string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.running[programKey{program: program, node: node}]; p != nil && p.Running() {
		return p.PID()
	}
	return 0
}

// Metrics is the address (host:port) of a program's metrics; it stays over Kill and Start.
func (s *Server) Metrics(program Program, node string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.metrics[programKey{program: program, node: node}]
}

// freeAddress gives a loopback address that was free a moment ago.
func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("finding a free port: %w", err)
	}
	return listener.Addr().String(), listener.Close()
}

// launch is the only place where a program of Imp is started. All of them run in the machine's own network namespace, so that
// registry, API and metrics on loopback work; the runtime is told which one is its host's. mu is held.
func (s *Server) launch(key programKey) (*child.Process, error) {
	spec := child.Spec{
		Name:    key.String(),
		Path:    filepath.Join(s.binDir, string(key.program)),
		Env:     []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "TMPDIR=" + os.TempDir()},
		LogFile: filepath.Join(s.Places.Logs(), key.String()+".log"),
	}
	switch key.program {
	case Operator:
		spec.UID, spec.GID, spec.Args = operatorUID, operatorUID, s.operatorArgs()
	case Agent:
		spec.UID, spec.GID, spec.Args = agentUID, agentUID, s.agentArgs(key.node)
	case Runtime:
		spec.Args = s.runtimeArgs(key.node)
		spec.Grace = 20 * time.Second // it leaves its VMs alone, but may be in the middle of a step
	}
	return s.group.Start(spec)
}

func (s *Server) operatorArgs() []string {
	args := []string{
		"--kubeconfig=" + filepath.Join(s.Places.credentials(operatorProgram), "kubeconfig"),
		"--metrics-addr=" + s.metrics[programKey{program: Operator}], "--health-addr=127.0.0.1:0",
	}
	return append(args, s.opts.OperatorArgs...)
}

func (s *Server) agentArgs(node string) []string {
	args := []string{
		"--node=" + node,
		"--kubeconfig=" + filepath.Join(s.Places.credentials(agentProgram+"-"+node), "kubeconfig"),
		"--runtime-socket=" + s.Places.RuntimeSocket(node),
		"--metrics-addr=" + s.metrics[programKey{program: Agent, node: node}],
	}
	return append(args, s.opts.AgentArgs...)
}

func (s *Server) runtimeArgs(node string) []string {
	args := []string{
		"--state-dir=" + s.Places.stateDir(node),
		"--run-dir=" + s.Places.runDir(node),
		"--cgroup-parent=" + s.Places.Cgroup + "/" + node,
		"--agent-uid=" + strconv.Itoa(agentUID),
		"--vmm=" + s.opts.VMM,
		"--vmm-uid-base=" + strconv.Itoa(vmmUIDBase+slices.Index(s.NodeNames(), node)*vmmUIDCount), "--vmm-uid-count=" + strconv.Itoa(vmmUIDCount),
		"--budget-vcpu=" + strconv.FormatInt(s.opts.VCPU, 10),
		"--budget-memory-mib=" + strconv.FormatInt(s.opts.MemoryMiB, 10),
		"--budget-disk-gib=" + strconv.FormatInt(s.opts.DiskGiB, 10),
		"--metrics-addr=" + s.metrics[programKey{program: Runtime, node: node}],
	}
	if s.opts.VMM == "qemu" {
		args = append(args, "--accel="+s.opts.Accel, "--boot-deadline="+bootDeadline(s.opts.Accel), "--kernel="+s.boot.kernel, "--initramfs="+s.boot.initramfs)
	}
	args = append(args, s.networkArgs(node)...)
	return append(args, s.opts.RuntimeArgs...)
}

// bootDeadline is generous for emulated guests, of which several boot side by side on the processors of a laptop.
func bootDeadline(accel string) string {
	if accel == "tcg" {
		return "90s"
	}
	return "30s"
}

func (s *Server) startOperator(ctx context.Context) error {
	if err := s.giveIdentity(ctx, operatorIdentity()); err != nil {
		return err
	}
	s.opts.Progress("starting " + operatorProgram)
	return s.Start(Operator, "")
}

func (s *Server) startNodes(ctx context.Context) error {
	refreshing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.refresh = cancel
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("reading the boot id: %w", err)
	}
	identities := []identity{operatorIdentity()}
	for _, name := range s.NodeNames() {
		node, err := s.ControlPlane.EnsureNode(ctx, s.kubeletsWord(name, string(bootID[:len(bootID)-1])))
		if err != nil {
			return err
		}
		who := agentIdentity(node)
		if err := s.giveIdentity(ctx, who); err != nil {
			return err
		}
		identities = append(identities, who)
		s.opts.Progress("starting " + runtimeProgram + " and " + agentProgram + " of " + name)
		for _, program := range []Program{Runtime, Agent} {
			if err := s.Start(program, name); err != nil {
				return err
			}
		}
	}
	s.refreshing.Go(func() { s.keepIdentities(refreshing, identities) })
	for _, name := range s.NodeNames() {
		if err := s.awaitNode(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// nodeTimeout bounds the wait for a node to take VMs: its runtime unpacks a kernel first.
const nodeTimeout = 2 * time.Minute

// awaitNode waits for the ImpNode that the node's agent writes, to say that the runtime can start VMs.
func (s *Server) awaitNode(ctx context.Context, name string) error {
	c, err := s.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	problem := "its agent has not written its ImpNode"
	for {
		node := &v1alpha1.ImpNode{}
		if err := c.Get(ctx, types.NamespacedName{Name: name}, node); err == nil {
			ready := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionRuntimeReady)
			switch {
			case meta.IsStatusConditionTrue(node.Status.Conditions, v1alpha1.ConditionRuntimeReady):
				return nil
			case ready != nil:
				problem = ready.Reason + ": " + ready.Message
			}
		}
		select {
		case err := <-s.ended:
			return fmt.Errorf("waiting for %s to take VMs: %w", name, err)
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s to take VMs: %w (%s; logs are in %s)", name, ctx.Err(), problem, s.Places.Logs())
		case <-ticker.C:
		}
	}
}
