#!/bin/sh
# Writes the demo image as an archive in the format of `docker save`: examples/demo/image.sh PROGRAM FILE [PROGRAM...]
# The first program is that of the tools; further ones are in /bin under their own names.
set -eu
umask 022

program=$1
archive=$2
shift 2
case $(uname -m) in
x86_64) architecture=amd64 ;;
aarch64) architecture=arm64 ;;
*) architecture=$(uname -m) ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
for folder in bin dev etc proc sys tmp var; do
    mkdir -p "$root/$folder"
done
chmod 755 "$root" "$root"/*
chmod 1777 "$root/tmp"
printf 'root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nnobody:x:65534:\n' >"$root/etc/group"
install -m 755 "$program" "$root/bin/demo"
for tool in $("$program"); do
    ln -s demo "$root/bin/$tool"
done
for other in "$@"; do
    install -m 755 "$other" "$root/bin/"
done
# The libraries and the loader of dynamically linked programs; a static one has none.
for linked in "$program" "$@"; do
    ldd "$linked" 2>/dev/null | grep -o '/[^ ]*' | while read -r library; do
        install -D -m 755 "$library" "$root$library"
    done
done

digest() { sha256sum "$1" | cut -d ' ' -f 1; }

# The same program makes the same image.
pack() { tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - "$@"; }
(cd "$root" && pack -- *) >"$work/layer.tar"
cat >"$work/config.json" <<TEXT
{
  "architecture": "$architecture", "os": "linux",
  "config": {"Cmd": ["/bin/httpd", ":8080"], "Env": ["PATH=/bin"], "WorkingDir": "/"},
  "rootfs": {"type": "layers", "diff_ids": ["sha256:$(digest "$work/layer.tar")"]}
}
TEXT
cat >"$work/manifest.json" <<TEXT
[{"Config": "config.json", "RepoTags": ["berth.local/demo:latest"], "Layers": ["layer.tar"]}]
TEXT
(cd "$work" && pack manifest.json config.json layer.tar) >"$archive"
