// Package config carries Imp's manifests inside the programs that install them: crd/ is generated from the Go types,
// rbac/ holds the roles, policy/ the admission policies.
package config

import "embed"

// Files holds the folders crd, rbac and policy.
//
//go:embed */*.yaml
var Files embed.FS
