# Targets for developers. Each installs what it needs and prints what is missing.
CARGO ?= cargo
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
BUILT = $(abspath $(or $(CARGO_TARGET_DIR),target))
# Static and at a fixed address: nothing is relocated, so no page is a process's own for that.
STATIC = -C target-feature=+crt-static -C relocation-model=static
# The tests that boot a machine; what runs on it is ignored elsewhere.
VM = systemd::real::a_machine_that_systemd_runs node::boot::a_node_of_cgroup_v2_and_systemd storage::boot::shares_of_a_real_server
BENCH = $(CARGO) bench --profile harness --bench agent -- --agent "$(BUILT)/$(HOST)/release/berth"

.PHONY: run test test-real test-vm test-long bench bench-server bench-runtime bench-cluster bench-volumes bench-health bench-devices lint release deb deps fuzz-smoke fuzz fuzz-api

run:            ## pods on this machine, everything under ./.run; RUNTIME=containerd: on a private containerd
	@examples/run.sh

test: deps      ## all tests but the virtual machines; one area: cargo nextest run -p berth --lib pleg:: or --test it pleg::
	@tests/run.sh

test-real: deps ## pods that really run, on RUNTIME=containerd (default) or embedded; one area: FILTER=probes::
	BERTH_TEST_RUNTIME=$(or $(RUNTIME),containerd) $(CARGO) test --test real -- --test-threads=$(or $(REAL_THREADS),5) $(FILTER)

test-vm: deps   ## nodes in virtual machines: cgroup v2, systemd, NFS; some minutes of emulation
	$(CARGO) test --test crash -- --ignored
	$(CARGO) test --test vm -- --ignored --exact --nocapture --test-threads=2 $(VM) # that of NFS mostly waits

test-long: deps ## the long campaigns: 100 power cuts, 10,000 seeds, 15 s per fuzz target, schemathesis in full, 2,000 random pods, test-vm
	@tests/run.sh long
	@$(MAKE) test-vm

bench: deps release ## the figures of BENCHMARKS.md; BIN=/path/to/kubelet measures that one beside
	$(BENCH) $(if $(BIN),--against $(BIN))

bench-server: deps release ## the figures of the server alone; BIN=/path/to/kubelet measures that one beside
	$(BENCH) --only server $(if $(BIN),--against $(BIN))

bench-runtime: deps release ## the embedded runtime beside containerd and runc
	$(BENCH) --only runtime

bench-cluster: release ## a node of the test API server; BIN=/path/to/kubelet measures that one beside
	$(BENCH) --only cluster $(if $(BIN),--against $(BIN))

bench-volumes: release ## volumes of pods of the test API server; BIN=/path/to/kubelet measures that one beside
	$(BENCH) --only volumes $(if $(BIN),--against $(BIN))

bench-health: release ## probes, pressure, log rotation, the end of a node; BIN=/path/to/kubelet measures that one beside
	$(BENCH) --only health $(if $(BIN),--against $(BIN))

bench-devices: release ## device plugins, and CPU, memory, and topology managers
	$(BENCH) --only devices
	$(CARGO) bench --profile harness -p berth-resources --bench managers

lint:           ## what CI refuses
	$(CARGO) fmt --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --quiet
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check --hide-inclusion-graph licenses bans sources; \
	else echo "skipped: cargo deny check: cargo-deny is not installed; tests check licenses and registries"; fi

release:        ## one static binary, with its shim within: target/<host>/release/berth
	RUSTFLAGS="$(STATIC)" $(CARGO) build --profile shim -p berth-shim --bin shim --target $(HOST)
	RUSTFLAGS="$(STATIC)" BERTH_SHIM="$(BUILT)/$(HOST)/shim/shim" $(CARGO) build --release --bin berth --target $(HOST)

deb: release    ## a Debian package that takes the place of the kubelet's: target/debian/ (packaging/README.md)
	@$(CARGO) deb --version >/dev/null 2>&1 || { echo "needs cargo-deb: cargo install cargo-deb"; exit 2; }
	$(CARGO) deb --no-build --no-strip --target $(HOST)

deps:           ## Debian packages the real-runtime tests use; without root they are skipped by name
	@examples/install-deps.sh

fuzz-smoke:     ## every parser of foreign bytes on its corpus and on seeded mutations; SECONDS=60 longer, SEED=2 others
	FUZZ_SMOKE_SECONDS=$(or $(SECONDS),1) FUZZ_SMOKE_SEED=$(or $(SEED),1) $(CARGO) test --test fuzz_smoke -- --nocapture

fuzz:           ## one parser under a coverage-guided fuzzer until it fails: make fuzz TARGET=manifest_file
	@test -n "$(TARGET)" || { echo "which? make fuzz TARGET=…, one of:"; ls fuzz/corpus | column; exit 2; }
	@test -d "fuzz/corpus/$(TARGET)" || { echo "no target $(TARGET) in fuzz/corpus"; exit 2; }
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { echo "needs cargo-fuzz: cargo install cargo-fuzz"; exit 2; }
	@$(CARGO) +nightly --version >/dev/null 2>&1 || { echo "needs a nightly compiler: rustup toolchain install nightly"; exit 2; }
	@mkdir -p fuzz/grown/$(TARGET)
	$(CARGO) +nightly fuzz run $(TARGET) fuzz/grown/$(TARGET) fuzz/corpus/$(TARGET) -- $(FUZZ_ARGS)

fuzz-api:       ## every operation of api/openapi.yaml against a running agent: make fuzz-api URL=http://127.0.0.1:10255 ARGS="--include-tag open"
	@api/fuzz.sh "$(URL)" $(ARGS)
