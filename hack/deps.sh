#!/usr/bin/env bash
# Installs what building, testing and running Imp need beyond Go: shown first, and only what is missing.
set -euo pipefail

# program            Debian package
needs='
qemu-system-x86_64   qemu-system-x86
mke2fs               e2fsprogs
e2fsck               e2fsprogs
protoc               protobuf-compiler
git                  git
dpkg-deb             dpkg
setfattr             attr
'
export PATH="$PATH:/usr/sbin:/sbin"
missing=()
while read -r program package; do
  [[ -z $program ]] && continue
  command -v "$program" >/dev/null 2>&1 || missing+=("$package")
done <<<"$needs"
((${#missing[@]})) || exit 0

mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
echo "missing packages: ${missing[*]}"
if ! command -v apt-get >/dev/null 2>&1; then
  echo "This is not a Debian system. Install the programs these packages bring, then try again:" >&2
  awk 'NF {printf "  %-20s (Debian package %s)\n", $1, $2}' <<<"$needs" >&2
  exit 1
fi
sudo=""
if [[ $(id -u) != 0 ]]; then
  command -v sudo >/dev/null || { echo "run as root: apt-get install ${missing[*]}" >&2; exit 1; }
  sudo="sudo"
fi
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
