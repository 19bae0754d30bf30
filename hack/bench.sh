#!/usr/bin/env bash
# Prints Imp's figures, each a comparison within one run.
set -euo pipefail
cd "$(dirname "$0")/.."
exec bin/imp-dev bench "$@"
