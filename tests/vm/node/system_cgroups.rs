//! `kubeletCgroups` on a node with systemd: the agent leaves the cgroup of its unit. Behavior: spec 06a §8.5.

use std::fs;

use serde_json::json;

use crate::node::inside::{ClusterFixture, UNIT, property, systemctl, until};

pub async fn the_agent_moves_to_its_cgroup(world: &ClusterFixture) {
    let mut fields = world.port.fields();
    fields["kubeletCgroups"] = json!("/kubelet.slice");
    world.configure(&fields);
    systemctl(&["restart", UNIT]);
    let pid = property(UNIT, "MainPID");
    let file = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).expect("readable");
    until("the agent is in its cgroup", async || (file("cgroup") == "0::/kubelet.slice\n").then_some(())).await;
    assert_eq!(file("oom_score_adj"), "-999\n");
    // systemd supervises the process that has left the unit's cgroup: it stops and starts it.
    assert_eq!(property(UNIT, "ActiveState"), "active");
    world.configure(&world.port.fields());
    systemctl(&["restart", UNIT]);
    assert!(fs::read_to_string(format!("/proc/{pid}/cgroup")).is_err(), "the process has ended");
    let pid = property(UNIT, "MainPID");
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("readable");
    assert_eq!(cgroup, format!("0::/system.slice/{UNIT}\n"));
}
