//! Exclusive CPUs on real runtimes: CPU sets of running containers, agent restart, refusal, release (spec 06b §1).

use std::{fs, path::PathBuf};

use berth_proto::pod_resources::{
    AllocatableResourcesRequest, ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient,
};
use berth_types::{CpuSet, hash::fnv1a_32};
use hyper_util::rt::TokioIo;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::{
    commands::NodeWithMainPort,
    node::{Node, UNTIL_STOPPED, lasting, shell},
};
use berth_testkit::process::{container, manifest_of};

/// UID of the pod with exclusive CPUs: a part of the checkpoint.
const UID: &str = "5f6d0a3e-9d0c-4c58-8f0f-2f6f5b1c7a11";
/// Updates of containers by this agent.
const UPDATES: &str = "kubelet_runtime_operations_total{operation_type=\"update_container\"}";

/// A node with the static CPU policy on which one CPU can be exclusive, and the others are reserved.
struct PinningFixture {
    open: NodeWithMainPort,
    /// All online CPUs.
    all: CpuSet,
    /// The CPU that can be exclusive: the last one.
    last: CpuSet,
    /// The shared pool while that CPU is exclusive.
    others: CpuSet,
}

impl PinningFixture {
    /// `None` if this machine has one CPU or cannot run pods; prints the test's name then.
    async fn new(test: &str) -> Option<Self> {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").expect("readable");
        let all = CpuSet::parse(online.trim()).expect("a list of CPUs");
        if all.len() < 2 {
            println!("skipped {test}: needs two online CPUs");
            return None;
        }
        let last: CpuSet = all.iter().last().into_iter().collect();
        let others = all.difference(&last);
        let fields = json!({
            "cpuManagerPolicy": "static",
            "cpuManagerReconcilePeriod": "1s",
            "reservedSystemCPUs": others.to_string(),
        });
        let open = NodeWithMainPort::with(test, &fields).await?;
        Some(Self { open, all, last, others })
    }

    fn node(&self) -> &Node {
        &self.open.node
    }

    /// Directories of the cgroup of a pod's container `main`, one per hierarchy.
    fn groups(&self, pod: &Value) -> Vec<PathBuf> {
        let id = container(pod, "main")["containerID"].as_str().expect("an ID");
        let id = id.rsplit('/').next().expect("an ID");
        let below = |group: &PathBuf| fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
        let all: Vec<PathBuf> = self.node().cgroups(pod).iter().flat_map(below).collect();
        all.into_iter().filter(|group| group.to_string_lossy().contains(id)).collect()
    }

    /// Directory with the CPU set of a pod's container `main`.
    fn cpuset_directory(&self, pod: &Value) -> PathBuf {
        let mut groups = self.groups(pod).into_iter();
        groups.find(|group| group.join("cpuset.cpus").exists()).unwrap_or_else(|| panic!("no CPU set of {pod:#}"))
    }

    /// CPU set of a pod's container `main`.
    fn cpus(&self, pod: &Value) -> String {
        fs::read_to_string(self.cpuset_directory(pod).join("cpuset.cpus")).expect("readable").trim().to_owned()
    }

    /// CPUs of each pod in the answer of the pod-resources API, and the allocatable CPUs.
    async fn pod_resources(&self) -> (Vec<(String, Vec<i64>)>, Vec<i64>) {
        let mut lister = PodResourcesListerClient::new(self.connect().await);
        let list = lister.list(ListPodResourcesRequest {}).await.expect("answered").into_inner().pod_resources;
        let cpus = list.into_iter().map(|pod| {
            let cpus: Vec<i64> = pod.containers.into_iter().flat_map(|container| container.cpu_ids).collect();
            (pod.name, cpus)
        });
        let mut cpus: Vec<(String, Vec<i64>)> = cpus.collect();
        cpus.sort();
        let all = lister.get_allocatable_resources(AllocatableResourcesRequest {}).await.expect("answered");
        (cpus, all.into_inner().cpu_ids)
    }

    async fn connect(&self) -> Channel {
        let socket = self.node().home.root().join("pod-resources/kubelet.sock");
        let connector = tower::service_fn(move |_: http::Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        Endpoint::from_static("http://localhost").connect_with_connector(connector).await.expect("it listens")
    }

    /// Document of `berth topology -o json`.
    async fn topology(&self) -> Value {
        serde_json::from_str(&self.open.stdout_of(&["topology", "-o", "json"]).await).expect("JSON")
    }

    fn checkpoint(&self) -> String {
        fs::read_to_string(self.node().home.root().join("cpu_manager_state")).expect("a checkpoint")
    }

    /// The checkpoint of kubelet with the last CPU assigned to the container `main` of [`UID`].
    fn pinned_checkpoint(&self) -> String {
        let (shared, own) = (&self.others, &self.last);
        let sum = checksum("static", &shared.to_string(), &format!("{UID}:map[main:{own}]"));
        let entries = format!(r#"{{"{UID}":{{"main":"{own}"}}}}"#);
        format!(r#"{{"policyName":"static","defaultCpuSet":"{shared}","entries":{entries},"checksum":{sum}}}"#)
    }

    /// The checkpoint of kubelet without assignments.
    fn empty_checkpoint(&self) -> String {
        let sum = checksum("static", &self.all.to_string(), "");
        format!(r#"{{"policyName":"static","defaultCpuSet":"{}","checksum":{sum}}}"#, self.all)
    }

    /// Asserts what the agent reports about the exclusive CPU: pod-resources API, topology map, metrics.
    async fn assert_reported(&self) {
        let last: Vec<i64> = self.last.iter().map(i64::from).collect();
        let cpus = |name: &str, cpus: &[i64]| (format!("{name}-test-node"), cpus.to_vec());
        let expected = vec![cpus("late", &[]), cpus("pinned", &last), cpus("shared", &[])];
        assert_eq!(self.pod_resources().await, (expected, last));

        let map = self.topology().await;
        let answer = self.open.port.curl_with(&self.open.client, "/debug/topology").await;
        assert_eq!(serde_json::from_str::<Value>(&answer.body).ok().as_ref(), Some(&map), "{answer:?}");
        let (others, last) = (self.others.to_string(), self.last.to_string());
        assert_eq!([&map["shared"], &map["reserved"]], [others.as_str(), others.as_str()]);
        assert_eq!([&map["policies"]["cpu"], &map["policies"]["memory"]], ["static", "None"]);
        let pinned = json!([{
            "namespace": "default",
            "pod": "pinned-test-node",
            "uid": UID,
            "container": "main",
            "cpus": last,
            "memory": [],
        }]);
        assert_eq!(map["containers"], pinned);
        let uses = map["cpus"].as_array().expect("CPUs").iter().map(|cpu| cpu["use"].as_str().expect("a use"));
        let mut expected = vec!["reserved"; self.others.len()];
        expected.push("exclusive");
        assert_eq!(uses.collect::<Vec<_>>(), expected);
        let screen = self.open.stdout_of(&["topology"]).await;
        assert!(screen.contains("static") && screen.contains("default/pinned-test-node"), "{screen}");

        for (series, expected) in [
            ("kubelet_cpu_manager_exclusive_cpu_allocation_count", 1.0),
            ("kubelet_cpu_manager_shared_pool_size_millicores", 0.0),
            ("kubelet_cpu_manager_pinning_errors_total", 0.0),
        ] {
            assert_eq!(self.node().agent.metric(series).await, Some(expected), "{series}");
        }
    }

    /// Creates a second pod that requests a CPU, asserts that it is refused, and removes it.
    async fn assert_no_cpu_is_left(&self) {
        let node = self.node();
        node.home.put_pod(&guaranteed("second", shell("main", UNTIL_STOPPED)));
        let is_failed = |pod: &Value| pod["status"]["phase"] == "Failed";
        let pod = node.agent.until_pod("second", "refused", is_failed).await;
        let message = "Pod was rejected: Allocate failed due to not enough cpus available to satisfy request: \
                       requested=1, available=0, which is unexpected";
        let reported = [&pod["status"]["reason"], &pod["status"]["message"]];
        assert_eq!(reported, ["UnexpectedAdmissionError", message], "{:#}", pod["status"]);
        let refusal = self.topology().await["refusals"][0].clone();
        assert_eq!(refusal["pod"], "second-test-node", "{refusal}");
        self.until_metric("kubelet_cpu_manager_pinning_errors_total", 1.0).await;
        node.home.remove("second.json");
        node.agent.until_gone("second").await;
    }

    /// Waits until a metric has a value: the page is cached for a moment.
    async fn until_metric(&self, series: &str, value: f64) {
        let agent = &self.node().agent;
        agent.until(&format!("{series} is {value}"), async || agent.metric(series).await == Some(value)).await;
    }

    /// Waits until these containers of the shared pool run on all CPUs.
    async fn until_all_cpus_are_shared(&self, pods: [&Value; 2]) {
        let all = self.all.to_string();
        let have_all = async || pods.iter().all(|pod| self.cpus(pod) == all);
        self.node().agent.until("containers of the shared pool run on all CPUs", have_all).await;
    }
}

/// Checksum of a checkpoint: FNV-1a of Go's dump of the object, with the entries as Go prints a map.
fn checksum(policy: &str, shared: &str, entries: &str) -> u32 {
    let dump = format!(
        "(*state.CPUManagerCheckpoint){{PolicyName:(string){policy} DefaultCPUSet:(string){shared} \
         Entries:(map[string]map[string]string)map[{entries}] Checksum:(checksum.Checksum)0}}"
    );
    fnv1a_32(dump.as_bytes())
}

/// A Guaranteed pod with one CPU.
fn guaranteed(name: &str, mut main: Value) -> Value {
    let amounts = json!({"cpu": "1", "memory": "32Mi"});
    main["resources"] = json!({"requests": amounts, "limits": amounts});
    manifest_of(name, json!({"terminationGracePeriodSeconds": 5, "containers": [main]}))
}

/// The CPU quota of a cgroup, from the file of either cgroup version.
fn quota(groups: &[PathBuf]) -> String {
    let files = ["cpu.cfs_quota_us", "cpu.max"];
    let read = |file: &str| groups.iter().find_map(|group| fs::read_to_string(group.join(file)).ok());
    files.into_iter().find_map(read).expect("a quota").trim().to_owned()
}

#[test]
fn the_checksum_is_that_of_kubelet() {
    // AC-06-4
    assert_eq!(checksum("none", "", ""), 1_353_318_690);
}

/// A container with a CPU of its own: containers of the shared pool leave the CPU before it runs, and get it back when
/// it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_has_a_cpu_of_its_own() {
    let Some(mut fixture) = PinningFixture::new("a_container_has_a_cpu_of_its_own").await else { return };
    assert_eq!(fixture.checkpoint(), fixture.empty_checkpoint());
    let shared = fixture.node().run(&lasting("shared")).await;
    assert_eq!(fixture.cpus(&shared), fixture.all.to_string());

    // AC-06b-11: the first act of the container is to read the CPU set of the other one.
    let mut main = shell("main", &format!("cat /shared/cpuset.cpus; {UNTIL_STOPPED}"));
    main["volumeMounts"] = json!([{"name": "shared", "mountPath": "/shared", "readOnly": true}]);
    let mut manifest = guaranteed("pinned", main);
    manifest["metadata"]["uid"] = json!(UID);
    manifest["spec"]["volumes"] = json!([{"name": "shared", "hostPath": {"path": fixture.cpuset_directory(&shared)}}]);
    let pinned = fixture.node().run(&manifest).await;
    let (last, others) = (fixture.last.to_string(), fixture.others.to_string());
    assert_eq!(fixture.node().until_output(&pinned, "main", "\n").await, format!("{others}\n"));
    assert_eq!([fixture.cpus(&pinned), fixture.cpus(&shared)], [last.clone(), others.clone()]);
    let quotas = [fixture.groups(&pinned), fixture.node().cgroups(&pinned)].map(|groups| quota(&groups));
    assert!(quotas.iter().all(|quota| ["-1", "max 100000"].contains(&quota.as_str())), "{quotas:?}");
    assert_eq!(fixture.checkpoint(), fixture.pinned_checkpoint());
    // A new container of the shared pool starts without the CPU.
    let late = fixture.node().run(&lasting("late")).await;
    assert_eq!(fixture.cpus(&late), others);
    fixture.assert_reported().await;

    // AC-06b-18
    let pid = fixture.node().pid(&pinned, "main");
    fixture.open.node.restart(Signal::SIGKILL).await;
    fixture.open.port.open().await;
    for (name, before, cpus) in [("pinned", &pinned, &last), ("shared", &shared, &others), ("late", &late, &others)] {
        let now = fixture.node().agent.until_ready(name).await;
        assert_eq!(now["status"]["containerStatuses"], before["status"]["containerStatuses"], "{name}");
        assert_eq!(fixture.cpus(&now), *cpus, "{name}");
    }
    assert_eq!(fixture.node().pid(&pinned, "main"), pid);
    assert_eq!(fixture.checkpoint(), fixture.pinned_checkpoint());
    // Only the containers of the shared pool are updated: the checkpoint has the CPUs of the other one.
    let updates = async || fixture.node().agent.metric(UPDATES).await.unwrap_or_default();
    fixture.node().agent.until("the shared pool is reconciled", async || updates().await >= 2.0).await;
    fixture.assert_no_cpu_is_left().await;
    assert_eq!(updates().await, 2.0);

    // AC-06b-17
    fixture.node().remove(&pinned).await;
    fixture.until_all_cpus_are_shared([&shared, &late]).await;
    let agent = &fixture.node().agent;
    agent.until("no CPU is assigned", async || fixture.checkpoint() == fixture.empty_checkpoint()).await;
    fixture.until_metric("kubelet_cpu_manager_exclusive_cpu_allocation_count", 0.0).await;
    fixture.node().remove(&shared).await;
    fixture.node().remove(&late).await;
}
