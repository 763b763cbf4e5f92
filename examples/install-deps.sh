#!/bin/sh
# Installs what the build, the real-runtime tests and `make run` use, where it is missing and we may.
# `install-deps.sh required` fails where something is still missing; otherwise tests are skipped.
set -eu

# program:package
needed="cc:gcc cc:libc6-dev containerd:containerd ctr:containerd runc:runc busybox:busybox-static ip:iproute2 curl:curl openssl:openssl prometheus:prometheus promtool:prometheus"

missing() {
    PATH="$PATH:/usr/sbin:/sbin"
    for pair in $needed; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || printf '%s\n' "${pair#*:}"
    done
    [ -x /lib/systemd/systemd-journal-remote ] || echo systemd-journal-remote
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    [ -x /usr/lib/cni/bridge ] || echo containernetworking-plugins
}

give_up() {
    echo "$1" >&2
    [ "${2:-}" = required ] && exit 1
    echo "tests that need them are skipped" >&2
    exit 0
}

packages=$(missing | sort -u | tr '\n' ' ')
[ -z "$packages" ] && exit 0
[ "$(id -u)" = 0 ] || give_up "missing, and only root can install: $packages" "${1:-}"
command -v apt-get >/dev/null 2>&1 || give_up "please install (these are Debian's names): $packages" "${1:-}"
echo "installing: $packages"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of packages
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages >/dev/null; }; then
    give_up "could not install: $packages" "${1:-}"
fi
packages=$(missing | sort -u | tr '\n' ' ')
[ -z "$packages" ] || give_up "still missing after the installation: $packages" "${1:-}"
