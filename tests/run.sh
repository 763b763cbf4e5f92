#!/usr/bin/env bash
# Runs all tests: cargo-nextest runs each in a process of its own (.config/nextest.toml); beside it the program `real`,
# whose tests share a runtime, runs by the standard harness: once on containerd, once on the embedded runtime.
#
#   tests/run.sh          everything but virtual machines
#   tests/run.sh long     the long campaigns alone: power cuts, seeds, fuzzing, schemathesis, pods (make test-long);
#                         a variable that is set (FUZZ_SMOKE_SECONDS=90) makes one longer or shorter
#   REAL_THREADS=n        tests of `real` at a time (5)
#
# Without cargo-nextest everything runs by `cargo test`, which takes longer.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
threads=${REAL_THREADS:-5}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
began=$SECONDS

# The table of where the time goes.
took() {
    printf '%6d s  %s\n' "$((SECONDS - $2))" "$1" >>"$logs/table"
}

# One run of `real`; its output comes at the end, in one piece.
real() {
    local start=$SECONDS status=0
    BERTH_TEST_RUNTIME=$1 "$cargo" test --quiet --test real -- --test-threads="$threads" >"$logs/$1" 2>&1 || status=$?
    took "real on $1" "$start"
    return "$status"
}

has_nextest() {
    "$cargo" nextest --version >/dev/null 2>&1
}

if [ "${1:-}" = long ]; then
    export BERTH_POWER_CUTS=${BERTH_POWER_CUTS:-100} BERTH_SIM_SEEDS=${BERTH_SIM_SEEDS:-10000}
    export FUZZ_SMOKE_SECONDS=${FUZZ_SMOKE_SECONDS:-15} BERTH_SCHEMATHESIS_EXAMPLES=${BERTH_SCHEMATHESIS_EXAMPLES:-20}
    export BERTH_BURSTS=${BERTH_BURSTS:-8} BERTH_FORWARDS=${BERTH_FORWARDS:-2500}
    export BERTH_RANDOM_PODS=${BERTH_RANDOM_PODS:-2000}
    campaigns='test(/power_cuts_at_any_time/) | test(/^pods_survive_random_faults/) | binary(fuzz_smoke)'
    campaigns+=' | test(every_answer_is_described) | test(/bursts_of_pods/) | test(/no_request_of_thousands/)'
    if has_nextest; then
        "$cargo" nextest run --workspace --profile long -E "$campaigns"
    else
        "$cargo" test --test crash power_cuts_at_any_time
        "$cargo" test --test simulation --test fuzz_smoke
        "$cargo" test --test node every_answer_is_described
        "$cargo" test --test embedded bursts_of_pods
        "$cargo" test --test it no_request_of_thousands
    fi
    BERTH_TEST_RUNTIME=embedded exec "$cargo" test --test real random_pods -- --nocapture
fi

status=0
if has_nextest; then
    "$cargo" nextest run --workspace --cargo-quiet --no-run
    "$cargo" test --quiet --test real --no-run
    took build "$began"
    (
        status=0
        real containerd || status=1
        real embedded || status=1
        exit "$status"
    ) &
    beside=$!
    start=$SECONDS
    "$cargo" nextest run --workspace --cargo-quiet || status=1
    took "each in its process, of which by program, added up:" "$start"
    # Added up over all threads: many tests run at the same time.
    awk -F'"' '/<testcase / {
        for (i = 1; i < NF; i++) {
            if ($i ~ / classname=$/) program = $(i + 1)
            if ($i ~ / time=$/) seconds = $(i + 1)
        }
        count[program]++; sum[program] += seconds
    } END { for (program in count) printf "  %6d s  %s, %d tests\n", sum[program], program, count[program] }' \
        target/nextest/default/junit.xml | sort -rn >>"$logs/table"
    wait "$beside" || status=1
else
    "$cargo" test --workspace --lib --bins --tests --examples --no-run
    took build "$began"
    start=$SECONDS
    "$cargo" test --workspace --no-fail-fast --lib --bins --tests --examples || status=1
    took "all, on containerd" "$start"
    real embedded || status=1
fi
for runtime in containerd embedded; do
    [ ! -f "$logs/$runtime" ] || { echo "== real on $runtime"; cat "$logs/$runtime"; }
done
took total "$began"
echo "== where the time went"
cat "$logs/table"
exit "$status"
