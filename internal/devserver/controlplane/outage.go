package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"imp.dev/imp/internal/devserver/child"
)

// Names of the processes.
const (
	EtcdProcess              = "etcd"
	APIServerProcess         = "kube-apiserver"
	ControllerManagerProcess = "kube-controller-manager"
)

// StartProcess starts one of the control plane's processes, which does not run, with the arguments it always had. It does not wait
// for it to be ready.
func (cp *ControlPlane) StartProcess(name string) error {
	at := slices.IndexFunc(cp.specs, func(s child.Spec) bool { return s.Name == name })
	if at < 0 {
		return fmt.Errorf("starting %s: the control plane has no such process", name)
	}
	cp.mu.Lock()
	defer cp.mu.Unlock()
	for _, p := range cp.children {
		if p.Name == name {
			return fmt.Errorf("starting %s: it was not stopped", name)
		}
	}
	p, err := cp.group.Start(cp.specs[at])
	if err == nil {
		cp.children = append(cp.children, p)
	}
	return err
}

// KillProcess ends one of the processes with SIGKILL and waits until it is gone.
func (cp *ControlPlane) KillProcess(name string) error { return cp.end(name, syscall.SIGKILL) }

// TerminateProcess ends one of the processes with SIGTERM and waits until it is gone. One that has not ended after its grace is killed.
func (cp *ControlPlane) TerminateProcess(name string) error { return cp.end(name, syscall.SIGTERM) }

func (cp *ControlPlane) end(name string, sig syscall.Signal) error {
	cp.mu.Lock()
	at := slices.IndexFunc(cp.children, func(p *child.Process) bool { return p.Name == name })
	if at < 0 {
		cp.mu.Unlock()
		return fmt.Errorf("stopping %s: it does not run", name)
	}
	p := cp.children[at]
	cp.children = slices.Delete(cp.children, at, at+1) // before it ends, so that its end is no surprise
	cp.mu.Unlock()
	if sig == syscall.SIGTERM {
		p.Stop()
		return nil
	}
	if err := p.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing %s: %w", name, err)
	}
	<-p.Done()
	return nil
}

// etcdDir is etcd's data.
func (cp *ControlPlane) etcdDir() string { return filepath.Join(filepath.Dir(cp.Kubeconfig), "etcd") }

// BackUp stops etcd, copies its data into dir, which must not exist, and starts it again. The API server waits for etcd meanwhile.
func (cp *ControlPlane) BackUp(ctx context.Context, dir string) error {
	if err := cp.TerminateProcess(EtcdProcess); err != nil {
		return err
	}
	if err := os.CopyFS(dir, os.DirFS(cp.etcdDir())); err != nil {
		return fmt.Errorf("backing up etcd: %w", err)
	}
	if err := cp.StartProcess(EtcdProcess); err != nil {
		return err
	}
	return cp.AwaitReady(ctx)
}

// Restore puts the data of an earlier BackUp in the place of etcd's and starts the control plane's processes anew: what was written since
// then is gone, as after a disaster. Resource versions begin again from that time.
func (cp *ControlPlane) Restore(ctx context.Context, dir string) error {
	names := []string{EtcdProcess, APIServerProcess, ControllerManagerProcess}
	for _, name := range slices.Backward(names) {
		if err := cp.TerminateProcess(name); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(cp.etcdDir()); err != nil {
		return fmt.Errorf("restoring etcd: %w", err)
	}
	if err := os.CopyFS(cp.etcdDir(), os.DirFS(dir)); err != nil {
		return fmt.Errorf("restoring etcd: %w", err)
	}
	if err := os.Chmod(cp.etcdDir(), 0o700); err != nil { // etcd refuses others
		return fmt.Errorf("restoring etcd: %w", err)
	}
	for _, name := range names {
		if err := cp.StartProcess(name); err != nil {
			return err
		}
	}
	return cp.AwaitReady(ctx)
}
