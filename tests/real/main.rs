//! Pods on real runtimes: a containerd with runc, and the embedded runtime as `on_embedded`.
//!
//! From manifest to process, and back to nothing. Every test needs root; without, it reports its name and is skipped.

mod claims;
mod commands;
mod devices;
mod environment;
mod environment_faults;
mod failures;
mod growth;
mod kubectl;
mod kubectl_streams;
mod logs;
mod mixin;
mod node;
mod pinning;
mod probes;
mod prometheus;
mod random;
mod resize;
mod restarts;
mod security;
mod stats;
mod termination;
mod volumes;

use berth_testkit::{containerd, real};

#[test]
fn the_private_containerd_runs_containers() {
    let test = "the_private_containerd_runs_containers";
    if real::is_about_containerd(test) {
        return;
    }
    let Some(containerd) = containerd::start_or_skip(test) else { return };
    let (ok, out) = containerd.ctr(&["images", "ls", "-q"]);
    assert!(ok && out.contains("busybox:1") && out.contains("pause:berth"), "{out}");
    let (ok, out) = containerd.ctr(&["run", "--rm", "docker.io/library/busybox:1", "one", "echo", "hello"]);
    assert!(ok && out.contains("hello"), "{out}\n{}", containerd.log());
}
