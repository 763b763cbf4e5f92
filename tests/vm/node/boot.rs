//! Boots the virtual machine of a cgroup v2 node: its files, its output, and its power-off.

use std::{path::Path, time::Duration};

use crate::node::inside;
use berth_testkit::{
    image::{BUSYBOX, Image, write_archive},
    machine::{self, Root},
    machine_systemd,
};

/// Timeout of the virtual machine.
const LIMIT: Duration = Duration::from_secs(1500);
/// Last kernel message of a powered-off machine.
const OFF: &str = "reboot: Power down";

/// Additions to the packaged unit: a long start timeout for a slow machine, fast restarts, and a shorter watchdog
/// interval than in the package.
const DROP_IN: &str = "[Service]
Type=notify
TimeoutStartSec=600
WatchdogSec=40
RestartSec=1
StandardOutput=append:/t/kubelet.log
StandardError=append:/t/kubelet.log
";
/// The node's own address: it has no peers.
const NETWORK: &str = "hostname node
ip link add name lan0 type bridge; ip addr add 10.77.0.1/24 dev lan0; ip link set lan0 up; ip route add default dev lan0";

/// Writes the package's files as on a node.
fn lay_down_package(root: &Root) {
    let packaged = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging").join(name);
        std::fs::read_to_string(path).expect("packaged")
    };
    for (name, text) in [
        ("lib/systemd/system/kubelet.service", packaged("kubelet.service")),
        ("lib/systemd/system/kubelet.service.d/10-kubeadm.conf", packaged("10-kubeadm.conf")),
        ("etc/systemd/system/kubelet.service.d/20-tests.conf", DROP_IN.to_owned()),
    ] {
        root.file(name, &text);
    }
    for (to, name) in
        [("/t/berth", "usr/bin/berth"), ("/t/berth-shim", "usr/bin/berth-shim"), ("berth", "usr/bin/kubelet")]
    {
        root.link(to, name);
    }
}

#[test]
#[ignore = "takes five minutes of emulation: make test-vm"]
fn a_node_of_cgroup_v2_and_systemd() {
    const NAME: &str = "a_node_of_cgroup_v2_and_systemd";
    let kernel = match machine::kernel() {
        Ok(kernel) => kernel,
        Err(why) => return machine::skip(NAME, why),
    };
    if let Some(why) = machine_systemd::obstacle_of_node() {
        return machine::skip(NAME, why);
    }
    let place = tempfile::tempdir().expect("a directory");
    let root = Root::new(place.path());
    machine_systemd::lay_down(&root, "exec /t/test --ignored --exact --nocapture node::inside::all 2>&1\n");
    lay_down_package(&root);
    write_archive(&[Image::busybox(BUSYBOX)], &root.path("t/images/busybox.tar")).expect("an image");
    let image = root.pack(&kernel, &machine_systemd::second(NETWORK));
    let lines = machine::run_with_numa_nodes(&kernel, &image, LIMIT);
    for line in lines.iter().filter(|line| line.contains("skipped ") || line.starts_with("test inside")) {
        println!("{line}");
    }
    let failed = machine::failed(inside::names(), &lines);
    assert!(failed.is_empty(), "{failed:?}");
    let is_off = lines.last().is_some_and(|line| line.ends_with(OFF));
    assert!(is_off, "it did not go down by itself:\n{}", lines.join("\n"));
}
