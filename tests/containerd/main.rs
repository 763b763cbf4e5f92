//! Pods on a real containerd and runc, from manifest to process and back to nothing. Every test
//! here needs root and is skipped by name without.

#[path = "../kit/mod.rs"]
mod kit;

mod adversity;
mod endings;
mod environment;
mod failures;
mod kubectl;
mod kubectl_streams;
mod logs;
mod mixin;
mod node;
mod prometheus;
mod restarts;
mod security;
mod stats;

use kit::containerd;

#[test]
fn the_private_containerd_runs_containers() {
    let Some(containerd) = containerd::start_or_skip("the_private_containerd_runs_containers") else { return };
    let (ok, out) = containerd.ctr(&["images", "ls", "-q"]);
    assert!(ok && out.contains("busybox:1") && out.contains("pause:berth"), "{out}");
    let (ok, out) = containerd.ctr(&["run", "--rm", "docker.io/library/busybox:1", "one", "echo", "hello"]);
    assert!(ok && out.contains("hello"), "{out}\n{}", containerd.log());
}
