#!/usr/bin/env bash
# Installs what building, testing and running Imp need beyond Go: shown first, and only what is missing.
set -euo pipefail

# program            Debian packages
needs='
qemu-system-x86_64   qemu-system-x86
mke2fs               e2fsprogs
e2fsck               e2fsprogs
protoc               protobuf-compiler libprotobuf-dev
gcc                  gcc libc6-dev
git                  git
dpkg-deb             dpkg
xz                   xz-utils
bzip2                bzip2
pgrep                procps
ip                   iproute2
musl-gcc             musl-tools
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
while read -r program packages; do
  [[ -z $program ]] && continue
  # Split on purpose: some programs need two packages (the race detector a compiler and its headers).
  # shellcheck disable=SC2206
  command -v "$program" >/dev/null 2>&1 || missing+=($packages)
done <<<"$needs"
((${#missing[@]})) || exit 0

mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
echo "missing packages: ${missing[*]}"
if ! command -v apt-get >/dev/null 2>&1; then
  echo "This is not a Debian system. Install the programs these packages bring, then try again:" >&2
  awk 'NF {program = $1; $1 = ""; printf "  %-20s (Debian:%s)\n", program, $0}' <<<"$needs" >&2
  exit 1
fi
as_root apt-get update -qq
as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
