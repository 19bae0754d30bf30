// Package image is the contract for turning an image reference into a bootable disk.
//
// A Store resolves a reference, fetches the image with the caller's credentials, and builds one read-only file
// system out of its layers, shared by every VM of that image on the node:
//
//	reference ──resolve──► digest ──fetch──► verified blobs ──flatten──► winning tree ──write──► base file
//
// The base file is content-addressed, root-owned, mode 0444, and never changes once it is published (rename after
// fsync). A VM holds it by a hard link in its own directory, so "in use" is the link count: the kernel's truth, which
// survives any restart. The store evicts bases whose only link is its own, least recently used first, to stay within
// its budget.
package image

import (
	"context"
	"time"
)

// PullPolicy says when the registry is asked. The words are Kubernetes' own.
type PullPolicy string

// Pull policies. IfNotPresent with a pinned digest never needs the registry once the base is cached.
const (
	Always       PullPolicy = "Always"
	IfNotPresent PullPolicy = "IfNotPresent"
	Never        PullPolicy = "Never"
)

// Credential is one entry of a docker config file's auths. It is kept in memory only: never in a record, log or error.
type Credential struct {
	// Registry is the key as written in the docker config: host, host:port, or a URL with a repository path.
	Registry      string
	Username      string
	Password      string
	IdentityToken string
	RegistryToken string
}

// Request names an image and who asks for it.
type Request struct {
	// Reference as the user wrote it; short names mean docker.io.
	Reference string
	// Digest, when set ("sha256:…"), is the manifest digest pinned at an earlier start of the same VM: that very image is
	// wanted, whatever the tag says today.
	Digest string
	Policy PullPolicy
	// Architecture in Go's spelling ("amd64"); the OS is always linux.
	Architecture string
	// Credentials of the asking VM's namespace, in order of preference. The node-wide ones are the store's own.
	Credentials []Credential
	// LinkTo is the path that becomes a hard link to the base file before Ensure returns, so that the base cannot be
	// evicted between the answer and its use. An existing link to the same file is success; to another file it is replaced.
	LinkTo string
}

// Base is a bootable, read-only root file system on this node.
type Base struct {
	// Digest of the image's manifest for this platform ("sha256:…").
	Digest string
	// Path of the base file in the store. VMs use their own link (Request.LinkTo).
	Path string
	// UUID of the file system, derived from the digest, so that an overlay upper made on another base is refused.
	UUID string
	// SizeBytes is the length of the file, AllocatedBytes what it takes on the disk.
	SizeBytes, AllocatedBytes int64
	Config                    Config
}

// Config is what the image's OCI configuration says about running it. Byte strings of the image are kept as they are.
type Config struct {
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Env        []string          `json:"env,omitempty"` // "NAME=value"
	User       string            `json:"user,omitempty"`
	WorkingDir string            `json:"workingDir,omitempty"`
	StopSignal string            `json:"stopSignal,omitempty"`
	Volumes    []string          `json:"volumes,omitempty"` // sorted
	Labels     map[string]string `json:"labels,omitempty"`
}

// Progress is told while Ensure works. Times are measured by the store's clock.
type Progress struct {
	// Stage is "resolving", "pulling", "building" or "waiting" (for another VM's pull of the same image).
	Stage string
	// Done and Total are bytes; Total is 0 while unknown.
	Done, Total int64
}

// Timing says where Ensure's time went. A cached base has zero Pull and Build.
type Timing struct {
	Resolve, Pull, Build time.Duration
	Cached               bool
}

// Store gives bases. Every method may be called from many goroutines.
type Store interface {
	// Ensure returns the base for req, with the link at req.LinkTo made.
	//
	// Concurrent calls for one image with the same credentials share one pull and one build; a failed one poisons
	// nothing. A caller whose credentials did not fetch the cached digest proves its access by a manifest HEAD first
	// (so the cache never hands an image to somebody the registry would refuse). progress may be nil and is called from
	// one goroutine at a time. A cancelled ctx ends this caller's wait; the pull goes on only while somebody waits.
	//
	// Errors are fault.Errors: ImagePullFailed (unknown name, 401, digest mismatch, registry down, refused content: the
	// message names the registry and the cause, never a secret) or DiskFailed (no space, I/O error). Content that can
	// never become valid for this digest is Permanent only when the digest is pinned.
	Ensure(ctx context.Context, req Request, progress func(Progress)) (Base, Timing, error)
	// Sweep evicts to the budget and removes leftovers of builds that died. It runs at start and now and then.
	Sweep(ctx context.Context) error
	// Usage tells what the cache takes on the disk now, in bytes, and how many bases it holds.
	Usage(ctx context.Context) (Usage, error)
}

// Usage of the cache.
type Usage struct {
	Bytes, Budget int64
	Bases, InUse  int
}
