//! CPU and memory manager policies, and cgroups, at the agent's start: state files and error texts.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::process::{Home, skips};

const CPU_FILE: &str = "cpu_manager_state";

/// Asserts that an agent does not start, and that the log line about it contains this text.
async fn refuses(home: &Home, text: &str) {
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    let log = agent.log().replace('\\', "");
    let mut lines = log.lines();
    assert!(lines.any(|line| line.contains("\"command failed\"") && line.contains(text)), "{text}\n{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_static_cpu_policy_needs_a_reservation() {
    if skips("the_static_cpu_policy_needs_a_reservation") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"cpuManagerPolicy": "static"}));
    let text = "failed to run Kubelet: failed to initialize cpu manager: [cpumanager] the static policy requires \
                systemreserved.cpu + kubereserved.cpu to be greater than zero";
    refuses(&home, text).await;
    assert!(!home.root().join(CPU_FILE).exists(), "no state of a policy that does not start");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_cpu_policy_needs_a_drained_node() {
    if skips("another_cpu_policy_needs_a_drained_node") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let file = home.root().join(CPU_FILE);
    home.start().await.kill().await;
    let none = fs::read_to_string(&file).expect("written at the start");
    let refusal = |configured: &str, stored: &str| {
        format!(
            "failed to run Kubelet: start cpu manager error: could not restore state from checkpoint: configured \
             policy \"{configured}\" differs from state checkpoint policy \"{stored}\", please drain this node and \
             delete the CPU manager checkpoint file \"{}\" before restarting Kubelet",
            file.display()
        )
    };

    let home = home.with(json!({"cpuManagerPolicy": "static", "kubeReserved": {"cpu": "1"}}));
    refuses(&home, &refusal("static", "none")).await;
    assert_eq!(fs::read_to_string(&file).expect("kept"), none);

    fs::remove_file(&file).expect("removed");
    home.start().await.kill().await;
    let written = fs::read_to_string(&file).expect("written at the start");
    let state: Value = serde_json::from_str(&written).expect("JSON");
    let online = fs::read_to_string("/sys/devices/system/cpu/online").expect("the online CPUs");
    assert_eq!((&state["policyName"], &state["defaultCpuSet"]), (&json!("static"), &json!(online.trim())));
    // The next start accepts what this one has written.
    home.start().await.kill().await;
    assert_eq!(fs::read_to_string(&file).expect("kept"), written);

    // AC-06b-16
    let home = home.with(json!({"cpuManagerPolicy": "none"}));
    refuses(&home, &refusal("none", "static")).await;
    assert_eq!(fs::read_to_string(&file).expect("kept"), written);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_that_no_pod_needs_is_renewed_on_request() {
    if skips("a_state_that_no_pod_needs_is_renewed_on_request") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().settings(json!({"resourceManagers": {"renewStateFiles": true}}));
    let file = home.root().join(CPU_FILE);
    home.start().await.kill().await;
    let none = fs::read_to_string(&file).expect("written at the start");
    let home = home.with(json!({"cpuManagerPolicy": "static", "kubeReserved": {"cpu": "1"}}));
    home.start().await.kill().await;
    let state: Value = serde_json::from_str(&fs::read_to_string(&file).expect("written at the start")).expect("JSON");
    assert_eq!(state["policyName"], "static");
    let aside = home.root().join("cpu_manager_state.old");
    assert_eq!(fs::read_to_string(&aside).expect("moved aside"), none);

    let home = home.settings(json!({"resourceManagers": {"renew": true}}));
    refuses(&home, "resourceManagers: unknown field `renew`, expected `renewStateFiles`").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_cpu_state_needs_a_drained_node() {
    if skips("a_damaged_cpu_state_needs_a_drained_node") {
        return;
    }
    // AC-06-5
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let file = home.root().join(CPU_FILE);
    let damaged = r#"{"policyName":"none","defaultCpuSet":"","checksum":1}"#;
    fs::write(&file, damaged).expect("written");
    let text = "checkpoint is corrupted, please drain this node and delete the CPU manager checkpoint file";
    refuses(&home, text).await;
    assert_eq!(fs::read_to_string(&file).expect("kept"), damaged);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reserved_memory_must_add_up() {
    if skips("reserved_memory_must_add_up") {
        return;
    }
    // AC-06b-23
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({
        "memoryManagerPolicy": "Static",
        "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}],
        "kubeReserved": {"memory": "1Gi"},
        "evictionHard": {"memory.available": "100Mi"},
    }));
    let text = "failed to initialize memory manager: the total amount \"1Gi\" of type \"memory\" is not equal to the \
                value \"1124Mi\" determined by Node Allocatable feature";
    refuses(&home, text).await;
    let right = json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1124Mi"}}]});
    let home = home.with(right);
    home.start().await.kill().await;
    let state = fs::read_to_string(home.root().join("memory_manager_state")).expect("written at the start");
    let state: Value = serde_json::from_str(&state).expect("JSON");
    let reserved = &state["machineState"]["0"]["memoryMap"]["memory"]["systemReserved"];
    assert_eq!((&state["policyName"], reserved), (&json!("Static"), &json!(1124_u64 << 20)));
}

/// By default an agent starts on cgroup v2 only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cgroup_v1_is_refused_by_default() {
    if skips("cgroup_v1_is_refused_by_default") {
        return;
    }
    // AC-06-3
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"failCgroupV1": true}));
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        home.start().await.kill().await;
        return;
    }
    let text = "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will \
                be removed in a future release";
    refuses(&home, text).await;
    assert!(!home.root().join(CPU_FILE).exists());
}

/// Paths of `systemCgroups` and `kubeletCgroups` that are not usable: the start fails and names the setting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_cgroups_of_system_and_agent_stop_the_start() {
    if skips("unusable_cgroups_of_system_and_agent_stop_the_start") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    for (fields, text) in [
        (json!({"systemCgroups": "/"}), "systemCgroups: system container cannot be root (\"/\")"),
        (json!({"systemCgroups": "/system/.."}), "systemCgroups: invalid cgroup path \"/system/..\""),
        (json!({"kubeletCgroups": "/a/../b"}), "kubeletCgroups: invalid cgroup path \"/a/../b\""),
    ] {
        let home = runtime.home().with(json!({"cgroupRoot": "/"})).with(fields);
        refuses(&home, &format!("failed to run Kubelet: {text}")).await;
    }
}
