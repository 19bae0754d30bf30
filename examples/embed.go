// Package examples carries the example manifests inside imp-dev, whose demo applies them.
package examples

import "embed"

// Files are the manifests, by file name.
//
//go:embed *.yaml
var Files embed.FS

// Registry is the registry that the examples name: imp-dev up serves it there.
const Registry = "127.0.0.1:5050"
