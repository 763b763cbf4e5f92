#!/bin/sh
# Asks a running agent everything api/openapi.yaml describes, and much it does not, with schemathesis (of PyPI):
#   api/fuzz.sh http://127.0.0.1:10255 --include-tag open
#   api/fuzz.sh https://127.0.0.1:10250 --request-cert admin.crt --request-cert-key admin.key --tls-verify ca.crt
# More options are those of `st run`. Bounded: EXAMPLES per operation (30), LIMIT seconds in all (120).
set -eu
cd "$(dirname "$0")/.."

url=${1:?which agent? e.g. http://127.0.0.1:10255}
shift
case "$url" in
    *://127.0.0.1:* | *://localhost:* | *://\[::1\]:*) ;;
    *) echo "only an agent of this machine is fuzzed, not $url" >&2; exit 2 ;;
esac

st=$(command -v st || command -v schemathesis || true)
if [ -z "$st" ]; then
    place=${SCHEMATHESIS:-target/schemathesis}
    [ -x "$place/bin/st" ] || {
        python3 -m venv "$place"
        "$place/bin/pip" install --quiet "schemathesis>=4,<5"
    }
    st=$place/bin/st
fi

# A profile takes its time; and the checks are those that hold of a kubelet: some of its 500s are its answers.
exec "$st" run api/openapi.yaml --url "$url" \
    --exclude-operation-id takeProfile \
    --checks response_schema_conformance,content_type_conformance,status_code_conformance \
    --phases examples,coverage,fuzzing \
    --max-examples "${EXAMPLES:-30}" --max-time "${LIMIT:-120}" --request-timeout 10 --max-redirects 0 \
    --generation-database none --seed "${SEED:-1}" "$@"
