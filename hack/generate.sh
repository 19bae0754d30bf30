#!/usr/bin/env bash
# Generates deep copies, CRDs and protobuf code with the tools pinned in hack/tools.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/bin/tools
mkdir -p "$tools"
(cd hack/tools && CGO_ENABLED=0 go build -o "$tools/" sigs.k8s.io/controller-tools/cmd/controller-gen \
  google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc)
"$tools/controller-gen" object paths=./api/v1alpha1/...
"$tools/controller-gen" crd paths=./api/v1alpha1/... output:crd:dir=config/crd
PATH="$tools:$PATH" protoc --go_out=. --go_opt=paths=source_relative \
  --go-grpc_out=. --go-grpc_opt=paths=source_relative api/runtime/v1/*.proto
