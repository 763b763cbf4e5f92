# What people type. Every target installs what it needs and says what it lacks.
CARGO ?= cargo

.PHONY: run test bench lint release deps fuzz-smoke

run:            ## pods on this machine with a private containerd under ./.run
	@examples/run.sh

test: deps      ## everything: tables, properties, simulation, scripted CRI, real containerd
	$(CARGO) test --lib --bins --tests --examples
	$(CARGO) test --doc

bench: deps     ## the figures of BENCHMARKS.md; BIN=/path/to/kubelet measures that one beside
	$(CARGO) build --release
	$(CARGO) bench --bench agent -- $(if $(BIN),--against $(BIN))

lint:           ## what CI refuses
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --quiet

release:        ## one stripped binary
	$(CARGO) build --release

deps:           ## Debian packages the real-runtime tests use; without root they are skipped by name
	@examples/install-deps.sh
