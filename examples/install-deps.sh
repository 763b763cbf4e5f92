#!/bin/sh
# Installs missing dependencies of the build, the real-runtime tests, and `make run`, if run as root.
# `install-deps.sh required` fails if a dependency is still missing; otherwise tests are skipped.
set -eu

# program:package
needed="cc:gcc cc:libc6-dev containerd:containerd ctr:containerd runc:runc busybox:busybox-static ip:iproute2 curl:curl openssl:openssl prometheus:prometheus promtool:prometheus"
# What only tests use.
[ "${1:-}" = required ] || needed="$needed docker-registry:docker-registry qemu-system-x86_64:qemu-system-x86 mke2fs:e2fsprogs losetup:mount"

missing() {
    PATH="$PATH:/usr/sbin:/sbin"
    for pair in $needed; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || printf '%s\n' "${pair#*:}"
    done
    [ -x /lib/systemd/systemd-journal-remote ] || echo systemd-journal-remote
    # Nothing of it is started here: the tests' virtual machine is run by a copy.
    [ -x /lib/systemd/systemd ] || echo systemd
    [ -x /usr/bin/dbus-daemon ] || echo dbus-daemon
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    [ -x /usr/lib/cni/bridge ] || echo containernetworking-plugins
}

give_up() {
    echo "$1" >&2
    [ "${2:-}" = required ] && exit 1
    echo "tests that need them are skipped" >&2
    exit 0
}

# A kernel for the virtual machine of the tests: a few files of its package are unpacked (27 MB to fetch, 20 MB to keep);
# installed it would bring an initial file system and touch the boot loader.
kernel=/var/cache/berth-tests/kernel
lay_down_kernel() {
    [ "$(uname -m)" = x86_64 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
    [ -z "$(find "$kernel" -name nfsd.ko 2>/dev/null)" ] || return 0
    apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1 || apt-get update -qq || return 0
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: *\(linux-image-[^ ]*\).*/\1/p')
    folder=$(mktemp -d)
    if (cd "$folder" && apt-get -o APT::Sandbox::User=root -qq download "$package" && mkdir kernel &&
        dpkg-deb --fsys-tarfile ./*.deb | tar -x -C kernel --wildcards './boot/vmlinuz-*' '*/overlay.ko' '*/llc.ko' \
            '*/stp.ko' '*/bridge.ko' '*/veth.ko' '*/loop.ko' '*/sunrpc.ko' '*/auth_rpcgss.ko' '*/dns_resolver.ko' \
            '*/grace.ko' '*/nfs_acl.ko' '*/lockd.ko' '*/netfs.ko' '*/fscache.ko' '*/nfs.ko' '*/nfsv4.ko' '*/nfsd.ko'); then
        mkdir -p "${kernel%/*}" && rm -rf "$kernel" && mv "$folder/kernel" "$kernel"
    else
        echo "failed to download a kernel: tests that need a virtual machine are skipped" >&2
    fi
    rm -rf "$folder"
}
[ "${1:-}" = required ] || lay_down_kernel

# Client and server of NFS for that machine: unpacked, because installed they would be started here.
nfs=/var/cache/berth-tests/nfs
lay_down_nfs() {
    [ "$(uname -m)" = x86_64 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
    [ ! -x "$nfs/sbin/mount.nfs" ] || return 0
    apt-cache show nfs-kernel-server >/dev/null 2>&1 || apt-get update -qq || return 0
    folder=$(mktemp -d)
    if (cd "$folder" && apt-get -o APT::Sandbox::User=root -qq download nfs-common nfs-kernel-server libtirpc3 libwrap0 &&
        for package in ./*.deb; do dpkg-deb -x "$package" nfs || exit 1; done && rm -rf nfs/usr/share); then
        mkdir -p "${nfs%/*}" && rm -rf "$nfs" && mv "$folder/nfs" "$nfs"
    else
        echo "failed to download an NFS server: tests that need one are skipped" >&2
    fi
    rm -rf "$folder"
}
[ "${1:-}" = required ] || lay_down_nfs

# It runs tests side by side; without it `cargo test` runs one program after the other.
install_nextest() {
    command -v cargo >/dev/null 2>&1 || return 0
    cargo nextest --version >/dev/null 2>&1 && return 0
    echo "installing: cargo-nextest"
    cargo install --quiet --locked --debug cargo-nextest || echo "failed to install cargo-nextest: tests take longer" >&2
}
[ "${1:-}" = required ] || install_nextest

packages=$(missing | sort -u | tr '\n' ' ')
[ -z "$packages" ] && exit 0
[ "$(id -u)" = 0 ] || give_up "missing packages (root is required to install them): $packages" "${1:-}"
command -v apt-get >/dev/null 2>&1 || give_up "apt-get not found, install these Debian packages: $packages" "${1:-}"
echo "installing: $packages"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of packages
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages >/dev/null; }; then
    give_up "failed to install: $packages" "${1:-}"
fi
packages=$(missing | sort -u | tr '\n' ' ')
[ -z "$packages" ] || give_up "still missing after the installation: $packages" "${1:-}"
