#!/bin/sh
# `make run`: runs demo pods on this machine, with all files under ./.run; Ctrl-C stops everything. The embedded runtime needs
# no package; with RUNTIME=containerd the pods run on a private containerd.
set -eu
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ]; then
    echo "make run needs root: containers need mounts, cgroups and namespaces." >&2
    echo "Try: sudo make run" >&2
    exit 1
fi

runtime="${RUNTIME:-embedded}"
dir="$PWD/.run"
socket="$dir/containerd.sock"
bridge=berthrun0
target="${CARGO_TARGET_DIR:-$PWD/target}"
PATH="$PATH:/usr/sbin:/sbin"

# Builds quickly; `make release` makes the small and fast program.
profile=demo
steps=3
[ "$runtime" = embedded ] || steps=4
step=0

say() { printf '\n== %s\n' "$*"; }
# Prints the next of the steps until the pods are Running.
next_step() {
    step=$((step + 1))
    say "step $step of $steps: $*"
}
fail() {
    echo "$*" >&2
    exit 1
}
ctr() { command ctr -a "$socket" -n k8s.io "$@"; }
alive() { [ -n "$1" ] && kill -0 "$1" 2>/dev/null; }

case $runtime in
embedded) pods=pods ;;
containerd) pods=pods-containerd ;;
*) fail "RUNTIME must be embedded (Berth's own) or containerd, not \"$runtime\"." ;;
esac

# Under sudo, builds as the calling user: with their toolchain, and files that they own.
as_caller() {
    if [ -z "${SUDO_USER:-}" ] || [ "$SUDO_USER" = root ]; then
        "$@"
        return
    fi
    home=$(getent passwd "$SUDO_USER" | cut -d: -f6)
    runuser -u "$SUDO_USER" -- env HOME="$home" PATH="$home/.cargo/bin:$PATH" "$@"
}

# Fails if another process listens on a required port, and prints its name.
free_port() {
    command -v ss >/dev/null 2>&1 || return 0 # the agent reports it instead
    who=$(ss -Hltnp "sport = :$1" | sed -n 's/.*users:(("\([^"]*\)",pid=\([0-9]*\).*/\1 (pid \2)/p' | head -n 1)
    [ -n "$(ss -Hltn "sport = :$1")" ] || return 0
    fail "port $1 is in use by ${who:-another process}, and $2 needs it. Stop that process first (ss -ltnp lists listeners)."
}


page() {
    if command -v curl >/dev/null 2>&1; then curl -fs "$1"; else wget -qO- "$1"; fi 2>/dev/null
}

# The agent, containerd and all shims, which name this folder, and below a shim the containers.
kill_all() {
    # shellcheck disable=SC2013  # numbers
    for pid in $(grep -lzF -e "$dir/" /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); do
        case $(cat "/proc/$pid/comm" 2>/dev/null) in
        containerd-shim* | berth-shim | shim) pids="$(cat "/proc/$pid"/task/*/children 2>/dev/null) $pid" ;;
        containerd | berth) pids=$pid ;;
        *) continue ;;
        esac
        # shellcheck disable=SC2086  # a list
        kill -9 $pids 2>/dev/null || true
    done
}

# What such processes leave: mounts (the deepest first), the bridge, links to logs.
clear_away() {
    # A blank in a path is \040 there.
    awk -v d="$dir/" '{gsub(/\\040/, " ", $2)} index($2, d) == 1 {print $2}' /proc/self/mounts | sort -r | while read -r target; do
        umount -l "$target" 2>/dev/null || true
    done
    for name in /run/netns/"$bridge"-*; do
        [ -e "$name" ] || continue
        umount -l "$name" 2>/dev/null || true
        rm -f "$name"
    done
    command -v ip >/dev/null 2>&1 && ip link del "$bridge" 2>/dev/null || true
    command -v nft >/dev/null 2>&1 && nft delete table inet "$bridge" 2>/dev/null || true
    find /var/log/containers -lname "$dir/*" -delete 2>/dev/null || true
}

# Whether pods are still here.
are_left() {
    if [ "$runtime" = embedded ]; then
        [ -n "$(ls "$dir/state/s" 2>/dev/null)" ]
    else
        alive "$containerd" && [ -n "$(ctr containers ls -q 2>/dev/null)" ]
    fi
}

groups() { ls -d /sys/fs/cgroup/kubepods /sys/fs/cgroup/*/kubepods 2>/dev/null || true; }

agent=
containerd=
groups_before=$(groups)

stop() {
    trap '' INT TERM HUP PIPE
    trap - EXIT
    set +e # nothing is skipped because something before it failed, be it a terminal that is gone
    say "stopping pods and the agent (grace periods apply)"
    rm -f "$dir"/pods/*
    tries=0
    while alive "$agent" && are_left; do
        tries=$((tries + 1))
        [ "$tries" -gt 200 ] && break
        sleep 0.1
    done
    alive "$agent" && kill "$agent" && wait "$agent" || true
    if alive "$containerd"; then
        for task in $(ctr tasks ls -q 2>/dev/null); do
            ctr tasks rm -f "$task" >/dev/null 2>&1 || true
        done
        kill "$containerd" && wait "$containerd" || true
    fi
    kill_all
    clear_away
    if [ -z "$groups_before" ]; then
        # shellcheck disable=SC2046  # paths without blanks
        [ -z "$(groups)" ] || find $(groups) -depth -type d -exec rmdir {} + 2>/dev/null || true
    fi
    if [ "$runtime" = embedded ] && ! command -v nft >/dev/null 2>&1; then
        echo "nft is not installed: the firewall table inet $bridge remains until a reboot"
    fi
    echo "stopped; logs are in $dir (the next make run deletes it)"
}

[ "$runtime" = embedded ] || examples/install-deps.sh required
as_caller sh -c 'command -v cargo >/dev/null' || fail "make run builds Berth and requires Rust: https://rustup.rs"
as_caller mkdir -p "$target"
exec 9>"$target/.run.lock"
flock -n 9 || fail "make run is already running in this directory."
# Remove leftovers of a killed run.
kill_all
clear_away
free_port 10255 "the agent (pods, metrics)"
free_port 10248 "the agent (healthz)"
free_port 10250 "the agent (main port)"
free_port 8080 "the demo pod \"web\""

next_step "building Berth (profile \"$profile\"; some minutes the first time, seconds later)"
begun=$(date +%s)
case $runtime in
embedded)
    as_caller cargo build --profile "$profile" -p berth -p berth-demo -p berth-sample-device-plugin \
        --bin berth --bin berth-shim --bin berth-demo --bin sample-device-plugin
    as_caller examples/demo/image.sh "$target/$profile/berth-demo" "$target/demo-images.tar" \
        "$target/$profile/sample-device-plugin"
    ;;
containerd)
    as_caller cargo build --profile "$profile" --bin berth --bin berth-shim
    as_caller cargo build --profile "$profile" --example images
    as_caller "$target/$profile/examples/images" "$target/demo-images.tar"
    ;;
esac
echo "built in $(($(date +%s) - begun)) s"

rm -rf "$dir"
mkdir -p "$dir/cni" "$dir/pods" "$dir/kubelet" "$dir/logs" "$dir/images"
cp examples/standalone.yaml "$dir/standalone.yaml"
# Disable eviction: demo pods and images stay even if the disk is full.
printf 'podLogsDir: logs\nevictionHard: {}\n' >>"$dir/standalone.yaml"
cp examples/"$pods"/*.yaml "$dir/pods/"
[ "$runtime" = containerd ] || mv "$target/demo-images.tar" "$dir/images/demo.tar"

trap stop EXIT
trap 'exit 130' INT TERM HUP

start_containerd() {
    mv "$target/demo-images.tar" "$dir/images.tar"
    fill() {
        sed -e "s#@DIR@#$dir#g" -e "s#@CNI@#/usr/lib/cni#g" -e "s#@BRIDGE@#$bridge#g" -e "s#@SUBNET@#10.222.0.0/24#g" "$1"
    }
    fill examples/containerd.toml >"$dir/config.toml"
    fill examples/cni.conflist >"$dir/cni/10-berth.conflist"
    cat >>"$dir/standalone.yaml" <<TEXT
containerRuntimeEndpoint: "unix://$socket"
# The demo images are not in any registry.
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
TEXT
    next_step "starting a private containerd under $dir"
    # Sessions of their own: Ctrl-C is for this script, which ends them in order.
    setsid containerd --config "$dir/config.toml" >"$dir/containerd.log" 2>&1 9>&- &
    containerd=$!
    tries=0
    until ctr version >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ "$tries" -gt 300 ] || ! alive "$containerd"; then
            tail -20 "$dir/containerd.log" >&2
            fail "containerd failed to start; the end of its log is above."
        fi
        sleep 0.1
    done
    ctr images import "$dir/images.tar" >/dev/null
}

# Directories of the embedded runtime; a dedicated machine can use the defaults.
cat >"$dir/berth.yaml" <<TEXT
embeddedRuntime:
  root: "$dir/runtime"
  state: "$dir/state"
  importDir: "$dir/images"
  serveSocket: "unix://$dir/cri.sock"
  network: {mode: builtin, bridge: $bridge}
devices:
  pluginDirectory: "$dir/device-plugins"
TEXT
[ "$runtime" = embedded ] || start_containerd

next_step "starting the agent (log: $dir/berth.log)"
BERTH_CONFIG="$dir/berth.yaml" setsid "$target/$profile/berth" run --config "$dir/standalone.yaml" --root-dir "$dir/kubelet" \
    --cert-dir "$dir/pki" --hostname-override "$(uname -n)" >"$dir/berth.log" 2>&1 9>&- &
agent=$!

wanted=$(find "$dir/pods" -name '*.yaml' | wc -l)
next_step "waiting for $wanted demo pods"
tries=0
shown=0
while :; do
    running=$(page http://127.0.0.1:10255/pods | grep -o '"phase":"Running"' | wc -l || true)
    [ "$running" -eq "$shown" ] || echo "$running of $wanted pods are Running"
    shown=$running
    [ "$running" -ge "$wanted" ] && break
    tries=$((tries + 1))
    if [ "$tries" -gt 600 ] || ! alive "$agent"; then
        tail -20 "$dir/berth.log" >&2
        fail "timed out waiting for the demo pods to be Running; the end of the agent's log is above."
    fi
    sleep 0.1
done

# Command with the local administrator's certificate, from the agent's log.
admin=$(sed -n 's/.*"List the pods with this command" command="\(.*\)".*/\1/p' "$dir/berth.log" | tail -n 1)
url=${admin##* }
logs="${admin% *} -N '${url%/pods}/containerLogs/default/clock-$(uname -n)/clock?follow=1'"
say "$running pods are Running. Try in another terminal:"
cat <<TEXT
  curl http://127.0.0.1:8080/                        # the demo pod "web" answers
  curl http://127.0.0.1:10255/pods                   # all pods with their status
  curl http://127.0.0.1:10255/metrics | grep kubelet_running
  curl http://127.0.0.1:10248/healthz                # is the agent alive?
  $admin
  $logs    # follow a container's log
  rm '$dir/pods/clock.yaml'    # stop the pod
  cp examples/$pods/clock.yaml '$dir/pods/'    # start it again
  tail -f '$dir/berth.log'
Ctrl-C stops everything.
TEXT
trap 'exit 0' INT TERM HUP
wait "$agent" || true
tail -20 "$dir/berth.log" >&2
fail "the agent exited unexpectedly; the end of its log is above."
