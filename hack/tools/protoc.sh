#!/bin/sh
# Generates Go from the .proto files of one folder, with the generators pinned in hack/tools/go.mod and the system's protoc
# (Debian: protobuf-compiler). Usage: protoc.sh FOLDER
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
cd "${1:?usage: protoc.sh FOLDER}"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
(cd "$tools" && GOBIN="$bin" GOFLAGS=-mod=readonly go install google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc)
protoc --plugin="$bin/protoc-gen-go" --plugin="$bin/protoc-gen-go-grpc" \
	--go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative,require_unimplemented_servers=true ./*.proto
