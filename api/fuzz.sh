#!/bin/sh
# Asks a running agent everything api/openapi.yaml describes, and much it does not, with schemathesis (of PyPI):
#   api/fuzz.sh http://127.0.0.1:10255 --include-tag open
#   api/fuzz.sh https://127.0.0.1:10250 --request-cert admin.crt --request-cert-key admin.key --tls-verify serving.crt
#   api/fuzz.sh install            only installs it, into SCHEMATHESIS (target/schemathesis)
# More options are those of `st run`. Bounded: EXAMPLES per operation (20), LIMIT seconds in all (120).
# What is asked is in api/schemathesis.toml. 3 where schemathesis cannot be installed.
set -eu
cd "$(dirname "$0")/.."
version=4.32.5

url=${1:?which agent? e.g. http://127.0.0.1:10255}
shift
case "$url" in
    install | http://127.0.0.1:* | https://127.0.0.1:* | http://localhost:* | https://localhost:*) ;;
    *) echo "only an agent of this machine is fuzzed, not $url" >&2; exit 2 ;;
esac

place=${SCHEMATHESIS:-target/schemathesis}
if ! "$place/bin/st" --version 2>/dev/null | grep -qF "$version"; then
    rm -rf "$place"
    python3 -m venv "$place" && "$place/bin/pip" install --quiet --retries 1 --timeout 15 "schemathesis==$version" || {
        rm -rf "$place"
        echo "cannot install schemathesis: needs python3 with venv and PyPI" >&2
        exit 3
    }
fi
[ "$url" != install ] || exit 0

exec "$place/bin/st" --config-file api/schemathesis.toml run api/openapi.yaml --url "$url" \
    --phases examples,coverage,fuzzing --max-examples "${EXAMPLES:-20}" --max-time "${LIMIT:-120}" "$@"
