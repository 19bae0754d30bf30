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

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "run as root: $*" >&2
    return 1
  fi
}

# The guests' kernel and the demo's busybox are downloaded by apt-get, which needs its lists.
if command -v apt-cache >/dev/null 2>&1 && ! apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1; then
  echo "apt has no package lists: apt-get update"
  as_root apt-get update -qq
fi

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
as_root apt-get update -qq
as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
