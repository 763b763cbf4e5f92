//! Node pressure eviction on cgroup v2: memory, page cache, and disk. Behavior: spec 05 §3.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::node::inside::{ClusterFixture, NODE, counted, file, only, page, shell, sized, until};

const WAITS: &str = "exec sleep 100000";

/// A pod that writes that many mebibytes into a volume, and waits.
fn filling(volume: &Value, mebibytes: u32, resources: &Value) -> Value {
    let script = format!("dd if=/dev/zero of=/data/file bs=1M count={mebibytes}; {WAITS}");
    let mut spec = sized(&script, resources.clone());
    spec["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    spec["volumes"] = json!([{"name": "data", "emptyDir": volume}]);
    spec
}

fn requesting(memory: &str) -> Value {
    json!({"requests": {"memory": memory}})
}

/// Waits until a pod is evicted, and checks its status.
async fn until_evicted(world: &ClusterFixture, name: &str, resource: &str, threshold: &str) -> Arc<Value> {
    let pod = world.until_pod(name, "is over", |pod| pod["status"]["phase"] == "Failed").await;
    let (status, message) = (&pod["status"], pod["status"]["message"].as_str().unwrap_or_default());
    let begin = format!("The node was low on resource: {resource}. Threshold quantity: {threshold}, available: ");
    assert!(message.starts_with(&begin), "{message}");
    assert_eq!(status["reason"], "Evicted", "{status:#}");
    let target = status["conditions"].as_array().and_then(|all| all.iter().find(|c| c["type"] == "DisruptionTarget"));
    assert!(target.is_some_and(|c| c["status"] == "True" && c["reason"] == "TerminationByKubelet"), "{status:#}");
    world.until_event(NODE, "EvictionThresholdMet").await;
    world.until_event(name, "Evicted").await;
    pod
}

/// Waits until a new pod is rejected because of node pressure.
async fn is_refused(world: &ClusterFixture, name: &str, condition: &str) {
    world.run(name, only(shell(WAITS)));
    let pod = world.until_pod(name, "is refused", |pod| pod["status"]["phase"] == "Failed").await;
    let expected = format!("Pod was rejected: The node had condition: [{condition}]. ");
    assert_eq!((&pod["status"]["reason"], &pod["status"]["message"]), (&json!("Evicted"), &json!(expected)));
}

/// Number of evictions since the agent started.
async fn evictions() -> f64 {
    let page = page("/metrics").await.expect("answered");
    let counts = page.lines().filter_map(|line| line.strip_prefix("kubelet_evictions{")?.rsplit_once(' '));
    counts.map(|(_, count)| count.parse::<f64>().expect("a number")).sum()
}

/// Mebibytes that pods may still use, by the agent's formula.
fn left() -> u64 {
    const GROUP: &str = "/kubepods.slice";
    let value = |name| file(GROUP, name).parse::<u64>().unwrap_or_else(|e| panic!("{name}: {e}"));
    let used = value("memory.current") - counted(GROUP, "memory.stat", "inactive_file");
    (value("memory.max") - used) >> 20
}

async fn stay<const N: usize>(world: &ClusterFixture, before: [Arc<Value>; N]) {
    for pod in before {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        let now = world.pod(name);
        let id = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].clone();
        assert_eq!((&now["status"]["phase"], id(&now)), (&json!("Running"), id(&pod)), "{name}");
    }
}

pub async fn of_short_memory_one_pod_goes(world: &ClusterFixture) {
    // AC-05-14, AC-05-21
    let killed = counted("/kubepods.slice", "memory.events", "oom_kill");
    let before = evictions().await;
    let memory = json!({"medium": "Memory"});
    world.run("steady", filling(&memory, 15, &requesting("40Mi")));
    world.run("modest", only(shell(WAITS)));
    let others = world.until_ready(["steady", "modest"]).await;
    // Of 320 mebibytes less than 100 are available, but more than none.
    world.run("hungry", filling(&memory, 210, &requesting("10Mi")));
    world.until_node("MemoryPressure", "True").await;
    is_refused(world, "late", "MemoryPressure").await;
    let hungry = until_evicted(world, "hungry", "memory", "100Mi").await;
    let message = hungry["status"]["message"].as_str().unwrap_or_default();
    let (_, named) = message.split_once("Container main was using ").unwrap_or_else(|| panic!("{message}"));
    assert!(named.ends_with(", request is 10Mi, has larger consumption of memory. "), "{message}");
    world.until_node("MemoryPressure", "False").await;
    stay(world, others).await;
    assert_eq!(evictions().await, before + 1.0);
    assert_eq!(counted("/kubepods.slice", "memory.events", "oom_kill"), killed, "the kernel had to help");
    world.remove(["steady", "modest", "hungry", "late"]).await;
}

/// Pages read more than once count as used (active file), but the kernel can reclaim them at any time.
pub async fn of_pages_of_files_no_pod_has_to_go(world: &ClusterFixture) {
    let before = evictions().await;
    let script = format!(
        "dd if=/dev/zero of=/data/file bs=1M count=40; sync; {} {WAITS}",
        "cat /data/file >/dev/null; ".repeat(3)
    );
    let mut reads = sized(&script, json!({}));
    reads["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    reads["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    world.run("reads", reads);
    let active = || counted("/kubepods.slice", "memory.stat", "active_file");
    until("the file was read", async || (active() > 35 << 20).then_some(())).await;
    // 85 mebibytes would be available, less than the threshold of 100, and 125 without the file; a sandbox takes some,
    // too.
    let filled = u32::try_from(left() - 85).expect("some mebibytes");
    world.run("holds", filling(&json!({"medium": "Memory"}), filled, &requesting("10Mi")));
    let others = world.until_ready(["reads", "holds"]).await;
    world.until_node("MemoryPressure", "True").await;
    until("pages were taken back", async || (active() < 30 << 20).then_some(())).await;
    world.until_node("MemoryPressure", "False").await;
    stay(world, others).await;
    assert_eq!(evictions().await, before);
    world.remove(["reads", "holds"]).await;
}

pub async fn of_a_full_disk_one_pod_goes(world: &ClusterFixture) {
    let before = evictions().await;
    world.run("small", filling(&json!({}), 5, &json!({})));
    world.run("plain", only(shell(WAITS)));
    let others = world.until_ready(["small", "plain"]).await;
    world.run("large", filling(&json!({}), 65, &json!({})));
    world.until_node("DiskPressure", "True").await;
    is_refused(world, "too-late", "DiskPressure").await;
    until_evicted(world, "large", "ephemeral-storage", "30Mi").await;
    world.until_node("DiskPressure", "False").await;
    stay(world, others).await;
    assert_eq!(evictions().await, before + 1.0);
    world.remove(["small", "plain", "large", "too-late"]).await;
}
