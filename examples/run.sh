#!/bin/sh
# `make run`: pods on this machine with a private containerd under ./.run; Ctrl-C stops everything.
set -eu
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ]; then
    echo "make run needs root: it starts containerd, and containers need mounts, cgroups and namespaces." >&2
    echo "Try: sudo make run" >&2
    exit 1
fi

say() { printf '\n== %s\n' "$*"; }
dir="$PWD/.run"
socket="$dir/containerd.sock"
bridge=berth0
ctr="ctr -a $socket -n k8s.io"

examples/install-deps.sh
say "building (release)"
cargo build --release --quiet
cargo run --release --quiet --example images -- "$dir/images.tar.new"

stop() {
    trap - INT TERM EXIT
    say "stopping"
    [ -n "${agent:-}" ] && kill "$agent" 2>/dev/null && wait "$agent" 2>/dev/null || true
    for task in $($ctr tasks ls -q 2>/dev/null); do $ctr tasks kill -s SIGKILL -a "$task" >/dev/null 2>&1 || true; done
    for task in $($ctr tasks ls -q 2>/dev/null); do $ctr tasks rm -f "$task" >/dev/null 2>&1 || true; done
    [ -n "${containerd:-}" ] && kill "$containerd" 2>/dev/null && wait "$containerd" 2>/dev/null || true
    pkill -9 -f "containerd-shim.*-address $socket" 2>/dev/null || true
    awk -v d="$dir/" 'index($2, d) == 1 {print $2}' /proc/self/mounts | sort -r | while read -r target; do
        umount -l "$target" 2>/dev/null || true
    done
    ip link del "$bridge" 2>/dev/null || true
    echo "stopped; state is left in $dir (make run starts over)"
}

# What an earlier run left behind would stand in the way.
awk -v d="$dir/" 'index($2, d) == 1 {print $2}' /proc/self/mounts | sort -r | while read -r target; do
    umount -l "$target" 2>/dev/null || true
done
mv "$dir/images.tar.new" "$dir.images.tar"
rm -rf "$dir"
mkdir -p "$dir/cni" "$dir/pods" "$dir/kubelet" "$dir/logs"
mv "$dir.images.tar" "$dir/images.tar"

for file in containerd.toml cni.conflist; do
    target="$dir/config.toml"
    [ "$file" = cni.conflist ] && target="$dir/cni/10-berth.conflist"
    sed -e "s#@DIR@#$dir#g" -e "s#@CNI@#/usr/lib/cni#g" -e "s#@BRIDGE@#$bridge#g" -e "s#@SUBNET@#10.222.0.0/24#g" \
        "examples/$file" >"$target"
done
cp examples/standalone.yaml "$dir/standalone.yaml"
cp examples/pods/*.yaml "$dir/pods/"

trap stop INT TERM EXIT
say "starting a private containerd under $dir"
containerd --config "$dir/config.toml" >"$dir/containerd.log" 2>&1 &
containerd=$!
tries=0
until $ctr version >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -gt 300 ] || ! kill -0 "$containerd" 2>/dev/null; then
        echo "containerd did not start; its log:" >&2
        tail -20 "$dir/containerd.log" >&2
        exit 1
    fi
    sleep 0.1
done
$ctr images import "$dir/images.tar" >/dev/null

say "starting berth (log: $dir/berth.log)"
target/release/berth run --config "$dir/standalone.yaml" --root-dir "$dir/kubelet" \
    --container-runtime-endpoint "unix://$socket" --hostname-override "$(hostname)" >"$dir/berth.log" 2>&1 &
agent=$!

wanted=$(ls "$dir"/pods/*.yaml | wc -l)
tries=0
while :; do
    running=$(curl -fs http://127.0.0.1:10255/pods 2>/dev/null | grep -o '"phase":"Running"' | wc -l || true)
    [ "$running" -ge "$wanted" ] && break
    tries=$((tries + 1))
    if [ "$tries" -gt 600 ] || ! kill -0 "$agent" 2>/dev/null; then
        echo "the demo pods are not Running; the end of the log:" >&2
        tail -20 "$dir/berth.log" >&2
        exit 1
    fi
    sleep 0.1
done

say "$running pods are Running. Try, in another terminal:"
cat <<TEXT
  curl http://127.0.0.1:8080/                        # the demo pod "web" answers
  curl http://127.0.0.1:10255/pods                   # every pod with its status
  curl http://127.0.0.1:10255/metrics | grep kubelet_running
  curl http://127.0.0.1:10248/healthz                # is the agent alive?
  rm $dir/pods/clock.yaml                            # watch the pod go
  cp examples/pods/clock.yaml $dir/pods/             # and come back
  tail -f $dir/berth.log
Ctrl-C stops everything.
TEXT
wait "$agent"
