package runtimed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"imp.dev/imp/internal/cgroup"
	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/process"
)

// builderMemory bounds one image build. Half of it is Go's own soft limit, so that the collector works before the kernel does.
const builderMemory = 2 << 30

// newBuilder makes images in a child that has nothing but its descriptors: what it reads was written by strangers. Without root
// there is no sandbox to be had and it builds in this process, which then has no privileges to lose either.
func newBuilder(o Options, instance string, log *slog.Logger) build.Builder {
	if os.Geteuid() != 0 {
		log.Warn("not root: images are built without a sandbox")
		return build.InProcess
	}
	// A tree of its own: what is in the VMs' tree is a VM's.
	tree, err := cgroup.Open(cgroup.Options{Parent: o.CgroupParent, Instance: instance + "-build"})
	if err != nil {
		log.Warn("no cgroups on this host: image builds have no memory limit", "error", err)
		tree = nil
	}
	clearBuilds(tree, log)
	var builds atomic.Int64
	return build.Child(func(ctx context.Context, stdin io.Reader, stdout io.Writer, files []*os.File) error {
		s := process.Sandbox{
			Cmd: process.Cmd{
				Path: "/proc/self/exe", Args: []string{buildCommand}, Env: []string{fmt.Sprintf("GOMEMLIMIT=%d", builderMemory/2), "GOTRACEBACK=none"},
				Dir: "/", Stdin: stdin, Stdout: stdout, Files: files,
			},
			UID: o.BuilderUID, GID: o.BuilderUID, OpenFiles: 4096,
		}
		if tree != nil {
			// A group for each build: one hostile image is not to spend another build's memory.
			group, err := tree.Create(fmt.Sprintf("image-%d", builds.Add(1)), cgroup.Limits{MemoryBytes: builderMemory, Pids: 256})
			if err != nil {
				return fmt.Errorf("making cgroup of image build: %w", err)
			}
			defer clearBuild(context.WithoutCancel(ctx), group, log)
			s.CgroupProcs = group.ProcsFiles()
		}
		r, err := process.RunSandboxed(ctx, s)
		if words := strings.TrimSpace(string(r.Stderr)); err != nil && words != "" {
			log.Error("image build child complained", "error", err, "words", words)
		}
		return err
	})
}

// clearTime bounds the end of what a build may have left running.
const clearTime = 10 * time.Second

// clearBuild ends whatever a build left running, before its base is published: it would still have the file open for writing.
func clearBuild(ctx context.Context, group *cgroup.Group, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, clearTime)
	defer cancel()
	if err := errors.Join(group.Kill(ctx), group.Remove(ctx)); err != nil {
		log.Warn("cgroup of an image build stays", "group", group.Name(), "error", err)
	}
}

// clearBuilds removes what builds under way left when an earlier runtime was killed. The lock on the state directory says that no
// other runtime of this instance builds.
func clearBuilds(tree *cgroup.Tree, log *slog.Logger) {
	if tree == nil {
		return
	}
	names, err := tree.List()
	if err != nil {
		log.Warn("cgroups of image builds not listed", "error", err)
	}
	for _, name := range names {
		if group, err := tree.Group(name); err == nil {
			clearBuild(context.Background(), group, log)
		}
	}
}
