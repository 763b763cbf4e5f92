#!/bin/sh
# Installs what the real-runtime tests and `make run` use, where it is missing and we may.
set -eu
missing=
for pair in containerd:containerd runc:runc busybox:busybox-static ip:iproute2 iptables:iptables; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -d /usr/lib/cni ] || missing="$missing containernetworking-plugins"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "not root: tests that need$missing are skipped" >&2
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "please install:$missing" >&2
    exit 0
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # a list of packages
apt-get install -y -qq --no-install-recommends $missing >/dev/null
