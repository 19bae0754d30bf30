#!/usr/bin/env bash
# Fails when `make generate` or gofmt would change a file that is checked in, and shows how.
set -euo pipefail
cd "$(dirname "$0")/.."
generated=(api config/crd)
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
cp -a "${generated[@]}" --parents "$before/"
hack/generate.sh
for path in "${generated[@]}"; do
  if ! diff -ru "$before/$path" "$path"; then
    echo "generated files under $path were out of date; commit what make generate made" >&2
    exit 1
  fi
done
unformatted=$(gofmt -l $(git ls-files '*.go'))
if [[ -n $unformatted ]]; then
  echo "gofmt would change: $unformatted" >&2
  exit 1
fi
