# `make help` lists what there is. CI is `make check test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

IMP_CACHE ?= $(HOME)/.cache/imp
export IMP_CACHE
# One setting for build, vet and lint, so that they share what is compiled; the race detector needs its own.
export CGO_ENABLED ?= 0
BIN := $(CURDIR)/bin
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -s -w -X imp.dev/imp/internal/version.version=$(VERSION)
# gRPC's request tracing, which nobody serves here, keeps the linker from leaving out unused methods: 45 MB of agent instead of 35.
TAGS := grpcnotrace
PROGRAMS := imp-operator imp-agent imp-runtime imp-guest imp-dev
TEST_TIMEOUT ?= 20m

.DEFAULT_GOAL := help
.PHONY: help deps build generate check drift lint vet test control-plane kernel demo bench chaos clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

deps: ## install what this machine lacks (Debian: apt-get; elsewhere: a list)
	@hack/deps.sh

build: ## all programs, static, into bin/
	@mkdir -p $(BIN)
	go build -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o $(BIN)/ $(addprefix ./cmd/,$(PROGRAMS))

generate: ## deep copies, CRDs, protobuf code
	hack/generate.sh

check: deps drift lint vet build ## generated files without drift, lint, vet, build

drift:
	hack/drift.sh

lint: ## import and size rules, and the usual suspects
	hack/lint.sh

vet:
	go vet ./...

control-plane: build ## etcd, kube-apiserver, kube-controller-manager, kubectl from their modules into the cache
	$(BIN)/imp-dev build-control-plane

kernel: build ## Debian's cloud kernel into the cache, not installed
	$(BIN)/imp-dev kernel

test: deps control-plane kernel ## unit tests with -race, the real API server, the suites, real guests
	hack/test.sh

demo: deps control-plane kernel ## boot real microVMs through the Kubernetes API and show what they said
	$(BIN)/imp-dev demo

bench: deps control-plane kernel ## print the figures of docs/figures.md
	hack/bench.sh

SEED ?= 1
MINUTES ?= 5
chaos: deps control-plane ## disturb 200 fake VMs on 3 nodes by the schedule of SEED for MINUTES, and give a verdict
	$(BIN)/imp-dev chaos --seed $(SEED) --duration $(MINUTES)m

clean: ## remove bin/ and .dev/ (the cache stays: IMP_CACHE)
	rm -rf $(BIN) .dev
