//! The rooms on a real containerd and runc. Every test here needs root.

#[path = "../kit/mod.rs"]
mod kit;

use kit::containerd;

#[test]
fn the_private_containerd_runs_containers() {
    let Some(containerd) = containerd::start_or_skip("the_private_containerd_runs_containers") else { return };
    let (ok, out) = containerd.ctr(&["images", "ls", "-q"]);
    assert!(ok && out.contains("busybox:1") && out.contains("pause:berth"), "{out}");
    let (ok, out) = containerd.ctr(&["run", "--rm", "docker.io/library/busybox:1", "one", "echo", "hello"]);
    assert!(ok && out.contains("hello"), "{out}\n{}", containerd.log());
}
