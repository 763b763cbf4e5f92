//! CPU, memory, and topology managers on two NUMA nodes, with containers in systemd scopes. Behavior: spec 06b.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::node::inside::{
    ClusterFixture, NAMESPACE, PODS, UNIT, file, files, memory_of_the_machine, only, property, scope, shell, sized,
    slice, systemctl, until,
};
use berth_testkit::main_port::MainPort;

const WAITS: &str = "exec sleep 100000";
/// Directory of the agent, with the checkpoints.
const ROOT: &str = "/var/lib/kubelet";
/// Hard eviction threshold of the configuration, in bytes.
const EVICTION: u64 = 100 << 20;
/// Allocatable memory of NUMA node 0, in bytes: half of what pods can request.
const PER_NODE: u64 = (PODS - EVICTION) / 2;
/// Memory of a pinned pod.
const MEMORY: &str = "40Mi";
const MEMORY_BYTES: u64 = 40 << 20;

/// Total memory of a NUMA node, in bytes.
fn memory_of_node(node: u32) -> u64 {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let (_, amount) = text.lines().find_map(|line| line.split_once("MemTotal:")).expect("received");
    amount.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Memory that is reserved on each NUMA node, in bytes. The sum is the reservation of the whole machine, as required.
fn reserved_memory() -> [u64; 2] {
    let first = memory_of_node(0) - PER_NODE;
    [first, memory_of_the_machine() - PODS + EVICTION - first]
}

/// Static policies and a main port. CPU 0 is reserved; CPUs 0 and 1 are those of NUMA node 0.
fn settings(port: &MainPort) -> Value {
    let [first, second] = reserved_memory();
    let own = json!({
        "cpuManagerPolicy": "static",
        // Only a change of the shared pool can update containers here, no periodic pass.
        "cpuManagerReconcilePeriod": "1h",
        "reservedSystemCPUs": "0",
        "memoryManagerPolicy": "Static",
        "reservedMemory": [
            {"numaNode": 0, "limits": {"memory": first.to_string()}},
            {"numaNode": 1, "limits": {"memory": second.to_string()}},
        ],
        "topologyManagerPolicy": "single-numa-node",
    });
    let mut fields = port.fields();
    for (key, value) in own.as_object().expect("fields") {
        fields[key] = value.clone();
    }
    fields
}

/// Starts the agent with other policies, as docs/topology.md describes: without the checkpoints of the former ones.
fn restart_with(world: &ClusterFixture, fields: &Value) {
    world.configure(fields);
    systemctl(&["stop", UNIT]);
    for name in ["cpu_manager_state", "memory_manager_state"] {
        fs::remove_file(Path::new(ROOT).join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    systemctl(&["start", UNIT]);
}

/// Resources of a Guaranteed pod with one CPU.
fn one_cpu(memory: &str) -> Value {
    let amounts = json!({"cpu": "1", "memory": memory});
    json!({"requests": amounts, "limits": amounts})
}

/// CPUs and memory nodes of a pod's container, as written and in effect.
fn cpusets(pod: &Value) -> Vec<String> {
    files(&scope(pod), &["cpuset.cpus", "cpuset.cpus.effective", "cpuset.mems", "cpuset.mems.effective"])
}

/// Asserts the CPUs of a container of the shared pool, which may use the memory of all nodes.
fn assert_shared(pod: &Value, cpus: &str) {
    let expected = [
        format!("cpuset.cpus={cpus}"),
        format!("cpuset.cpus.effective={cpus}"),
        "cpuset.mems=".to_owned(),
        "cpuset.mems.effective=0-1".to_owned(),
    ];
    assert_eq!(cpusets(pod), expected);
    assert_eq!(unit_sets(pod), [cpus, ""]);
}

/// Asserts that a container has one CPU of its own and the memory of one node, and no CPU quota.
fn assert_pinned(pod: &Value, cpu: &str, node: &str) {
    let expected = [
        format!("cpuset.cpus={cpu}"),
        format!("cpuset.cpus.effective={cpu}"),
        format!("cpuset.mems={node}"),
        format!("cpuset.mems.effective={node}"),
    ];
    assert_eq!(cpusets(pod), expected);
    assert_eq!(unit_sets(pod), [cpu, node]);
    assert_eq!([scope(pod), slice(pod)].map(|group| file(&group, "cpu.max")), ["max 100000", "max 100000"]);
}

/// CPUs and memory nodes of a container as systemd knows them: its next reload writes these.
fn unit_sets(pod: &Value) -> [String; 2] {
    let scope = scope(pod);
    let unit = scope.rsplit('/').next().expect("a name");
    // systemd separates ranges by spaces.
    ["AllowedCPUs", "AllowedMemoryNodes"].map(|name| property(unit, name).replace(' ', ","))
}

/// Document of `berth topology`.
async fn topology(port: &MainPort) -> Value {
    let client = port.client("kate", &["system:masters"]);
    let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let arguments = [
        "topology".to_owned(),
        "--output=json".to_owned(),
        format!("--server=127.0.0.1:{}", port.port),
        option("cacert", &port.path("ca.crt")),
        option("cert", &client.certificate),
        option("key", &client.key),
    ];
    until("the agent serves its topology", async || {
        let output = Command::new("/t/berth").args(&arguments).output().ok()?;
        serde_json::from_slice(&output.stdout).ok()
    })
    .await
}

pub async fn pods_have_cpus_and_memory_of_one_numa_node(world: &ClusterFixture) {
    restart_with(world, &settings(&world.port));
    world.run("shared", only(shell(WAITS)));
    let [shared] = world.until_ready(["shared"]).await;
    assert_shared(&shared, "0-3");

    // AC-06b-20, for memory: more than a node has, and less than both have together.
    world.run("wide", sized(WAITS, one_cpu("150Mi")));
    let wide = world.until_pod("wide", "is refused", |pod| pod["status"]["phase"] == "Failed").await;
    let message = "Pod was rejected: Resources cannot be allocated with Topology locality";
    let reported = [&wide["status"]["reason"], &wide["status"]["message"]];
    assert_eq!(reported, ["TopologyAffinityError", message], "{:#}", wide["status"]);

    // The lowest node has one CPU that is not reserved; the next pod gets CPU and memory of the other node.
    world.run("first", sized(WAITS, one_cpu(MEMORY)));
    let [first] = world.until_ready(["first"]).await;
    assert_pinned(&first, "1", "0");
    assert_shared(&shared, "0,2-3");
    world.run("second", sized(WAITS, one_cpu(MEMORY)));
    let [second] = world.until_ready(["second"]).await;
    assert_pinned(&second, "2", "1");
    assert_pinned(&first, "1", "0");
    assert_shared(&shared, "0,3");

    assert_topology(&topology(&world.port).await, [&first, &second]);

    // AC-06b-17
    world.remove(["first", "second"]).await;
    until("the shared pod has all CPUs", async || (file(&scope(&shared), "cpuset.cpus") == "0-3").then_some(())).await;
    assert_shared(&shared, "0-3");
    let begin = r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":"#;
    until("the checkpoint has no assignment", async || {
        let text = fs::read_to_string(Path::new(ROOT).join("cpu_manager_state")).ok()?;
        text.starts_with(begin).then_some(())
    })
    .await;
    world.remove(["shared", "wide"]).await;
}

/// Asserts the map of the machine with a pinned pod on each NUMA node.
fn assert_topology(map: &Value, pods: [&Value; 2]) {
    let policies = json!({
        "cpu": "static",
        "memory": "Static",
        "topology": "single-numa-node",
        "scope": "container",
        "options": {},
    });
    assert_eq!(map["policies"], policies);
    assert_eq!([&map["shared"], &map["reserved"]], ["0,3", "0"]);
    let uses: Vec<&Value> = map["cpus"].as_array().expect("CPUs").iter().map(|cpu| &cpu["use"]).collect();
    assert_eq!(uses, ["reserved", "exclusive", "exclusive", "shared"]);
    let cpus = map["cpus"].as_array().expect("CPUs").iter();
    let place = |cpu: &Value| ["cpu", "core", "node"].map(|field| cpu[field].as_u64().expect("a number"));
    assert_eq!(cpus.map(place).collect::<Vec<_>>(), [[0, 0, 0], [1, 1, 0], [2, 2, 1], [3, 3, 1]]);

    let [first, second] = reserved_memory();
    for (at, cpus, allocatable, distances) in [
        (0_usize, "0-1", memory_of_node(0) - first, json!({"0": 10, "1": 20})),
        (1, "2-3", memory_of_node(1) - second, json!({"0": 20, "1": 10})),
    ] {
        let node = &map["nodes"][at];
        let described = [&node["cpus"], &node["allocatableMemoryBytes"], &node["freeMemoryBytes"], &node["distances"]];
        let expected = [json!(cpus), json!(allocatable), json!(allocatable - MEMORY_BYTES), distances];
        assert_eq!(described, expected.each_ref(), "node {at}: {node}");
    }
    let container = |pod: &Value, cpu: &str, node: u32| {
        json!({
            "namespace": NAMESPACE,
            "pod": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
            "container": "main",
            "cpus": cpu,
            "memory": [{"type": "memory", "bytes": MEMORY_BYTES, "nodes": [node]}],
        })
    };
    assert_eq!(map["containers"], json!([container(pods[0], "1", 0), container(pods[1], "2", 1)]));
    let refusal = &map["refusals"][0];
    assert_eq!([&refusal["namespace"], &refusal["pod"]], [NAMESPACE, "wide"], "{refusal}");
    assert!(refusal["detail"].as_str().is_some_and(|detail| detail.contains("memory")), "{refusal}");
}
