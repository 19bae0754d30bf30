#!/usr/bin/env bash
# Runs golangci-lint (pinned in hack/lint, built once into the cache) and the size rules.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${IMP_CACHE:-$HOME/.cache/imp}
sum=$(sha256sum hack/lint/go.sum | cut -c1-16)
linter=$cache/tools/golangci-lint-$sum
if [[ ! -x $linter ]]; then
  echo "building golangci-lint once into $linter"
  mkdir -p "$cache/tools"
  (cd hack/lint && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$linter.tmp" github.com/golangci/golangci-lint/v2/cmd/golangci-lint)
  mv "$linter.tmp" "$linter"
fi
"$linter" run --timeout 15m ./...

# A file past its limit has deciding and doing in one place: split it there. Tests may be longer.
too_long=$(git ls-files '*.go' | grep -v -e zz_generated -e '\.pb\.go$' | xargs wc -l |
  awk '$2 != "total" { limit = ($2 ~ /_test\.go$/) ? 800 : 400; if ($1 > limit) print "  " $2 ": " $1 " lines, limit " limit }')
if [[ -n $too_long ]]; then
  printf 'files past their size limit (split deciding from doing):\n%s\n' "$too_long" >&2
  exit 1
fi
# A main wires flags to an assembly; logic in it cannot be tested.
long_mains=$(wc -l cmd/*/main.go | awk '$2 != "total" && $1 > 40 { print "  " $2 ": " $1 " lines, limit 40" }')
if [[ -n $long_mains ]]; then
  printf 'mains past 40 lines:\n%s\n' "$long_mains" >&2
  exit 1
fi

# Each direct dependency is explained.
unexplained=$(awk '/^require \(/ {r=1; next} /^\)/ {r=0} r && !/indirect/ {print $1}' go.mod |
  while read -r module; do grep -qF "\`$module\`" docs/dependencies.md || echo "  $module"; done)
if [[ -n $unexplained ]]; then
  printf 'direct dependencies without a line in docs/dependencies.md:\n%s\n' "$unexplained" >&2
  exit 1
fi
