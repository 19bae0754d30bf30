#!/usr/bin/env bash
# Every test there is. With IMP_REQUIRE_ALL=1 (CI) a test that lacks root, QEMU or the API server fails instead of skipping.
#
# Two passes: pure packages with the race detector, several at a time; then what starts real processes, guests or an API
# server, one package at a time, because two cores cannot boot five guests within their deadlines.
set -euo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=1 # the race detector needs it
timeout=${TEST_TIMEOUT:-20m}
mapfile -t heavy < <(go list ./internal/... ./test/... ./api/... ./config/... ./cmd/... | grep -E "$(grep -v '^#' hack/heavy-tests | paste -sd'|')")
mapfile -t light < <(comm -23 <(go list ./... | sort) <(printf '%s\n' "${heavy[@]}" | sort))
go test -race -timeout "$timeout" "${light[@]}"
go test -race -timeout "$timeout" -p 1 "${heavy[@]}"
