//! Checks inside the virtual machine: the test API server in this process, one agent for all checks.

use std::{
    fs,
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    pin::Pin,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::node::{groups, memory, memory_qos, pinning, pressure, service, shutdown, system_cgroups};
use berth_testkit::{
    api_server::{ApiServer, ConditionContext},
    main_port::MainPort,
    process::{condition, get, is_ready, manifest_of},
};

/// Name of the node: its host name.
pub const NODE: &str = "node";
/// Namespace of the pods.
pub const NAMESPACE: &str = "default";
/// Systemd unit of the agent.
pub const UNIT: &str = "kubelet.service";
/// Timeout of steps that take moments; the machine is emulated.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Memory of all pods, in bytes.
pub const PODS: u64 = 320 << 20;
const LOG: &str = "/t/kubelet.log";
const GROUPS: &str = "/sys/fs/cgroup";
const SETTINGS: &str = r#"{"embeddedRuntime": {"importDir": "/t/images", "network": {"mode": "builtin"}}}"#;

type Check = fn(&ClusterFixture) -> Pin<Box<dyn Future<Output = ()> + '_>>;

macro_rules! checks {
    ($($room:ident::$name:ident)*) => {
        /// In this order: later checks build on the state that earlier ones leave.
        const CHECKS: &[(&str, Check)] = &[$((stringify!($name), |world| Box::pin($room::$name(world)))),*];
    };
}

checks! {
    service::the_packaged_unit_has_started_once_it_is_ready
    groups::pods_get_their_shares_of_the_unified_hierarchy
    groups::statistics_come_from_the_unified_hierarchy
    groups::a_resize_reaches_groups_and_units
    memory::a_container_over_its_limit_ends_as_a_whole
    service::a_restart_keeps_pods
    memory::a_process_over_the_limit_ends_alone
    service::a_killed_agent_comes_back_to_its_pods
    service::an_agent_that_does_not_turn_is_started_again
    pressure::of_short_memory_one_pod_goes
    pressure::of_pages_of_files_no_pod_has_to_go
    pressure::of_a_full_disk_one_pod_goes
    memory_qos::memory_requests_are_protected_by_the_kernel
    system_cgroups::the_agent_moves_to_its_cgroup
    pinning::pods_have_cpus_and_memory_of_one_numa_node
    shutdown::a_soft_reboot_ends_pods
    shutdown::the_machine_waits_for_its_pods
}

/// Names of all checks, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(|(name, _)| *name)
}

/// A cluster of one node: this machine.
pub struct ClusterFixture {
    /// The control plane.
    pub api: ApiServer,
    /// Main port of the agent, as long as a check configures it.
    pub port: MainPort,
}

#[test]
#[ignore = "runs inside"]
fn all() {
    if std::env::var_os("BERTH_INSIDE").is_none() {
        println!("skipped: runs on the machine that a_node_of_cgroup_v2_and_systemd boots");
        return;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        // Ignores SIGTERM, to observe more of the machine's shutdown.
        let _lasts = signal(SignalKind::terminate()).expect("a signal");
        let world = ClusterFixture::new().await;
        for (name, check) in CHECKS {
            let (begun, log_position) = (Instant::now(), fs::metadata(LOG).map_or(0, |log| log.len()));
            let is_good = AssertUnwindSafe(check(&world)).catch_unwind().await.is_ok();
            if !is_good {
                println!("--- log of the agent\n{}---", log_since(log_position));
            }
            let verdict = if is_good { "ok" } else { "FAILED" };
            println!("{:.1?}: test {name} ... {verdict}", begun.elapsed());
        }
    });
}

fn log_since(position: u64) -> String {
    let log = fs::read(LOG).unwrap_or_default();
    String::from_utf8_lossy(&log[usize::try_from(position).expect("a size").min(log.len())..]).into_owned()
}

impl ClusterFixture {
    async fn new() -> Self {
        let nodefs = "/var/lib/kubelet";
        fs::create_dir_all(nodefs).expect("a directory");
        // The disk of the agent and its volumes is small.
        fs::File::create("/t/disk").and_then(|disk| disk.set_len(96 << 20)).expect("a file");
        command("/usr/sbin/mke2fs", &["-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "/t/disk"]);
        command("/bin/busybox", &["mount", "-o", "loop", "/t/disk", nodefs]);
        fs::create_dir_all("/etc/kubernetes").expect("a directory");
        fs::create_dir_all("/etc/berth").expect("a directory");
        fs::write("/etc/berth/config.yaml", SETTINGS).expect("written");
        let flags = format!("KUBELET_KUBEADM_ARGS=\"--hostname-override={NODE} --node-ip=10.77.0.1\"\n");
        fs::write("/var/lib/kubelet/kubeadm-flags.env", flags).expect("written");
        let world = Self { api: ApiServer::start().await, port: MainPort::new() };
        fs::copy(world.api.node_kubeconfig(NODE), "/etc/kubernetes/kubelet.conf").expect("written");
        world.configure(&json!({}));
        world
    }

    /// Writes the agent's configuration, which takes effect at its next start.
    pub fn configure(&self, fields: &Value) {
        let reserved = memory_of_the_machine() - PODS;
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": "embedded",
            "cgroupDriver": "systemd",
            "address": "127.0.0.1",
            "readOnlyPort": 10255,
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "podPidsLimit": 100,
            "enforceNodeAllocatable": ["pods"],
            "systemReserved": {"memory": reserved.to_string()},
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "30Mi"},
            // Long enough to create a pod and see it rejected, on a slow machine.
            "evictionPressureTransitionPeriod": "20s",
            "volumeStatsAggPeriod": "1s",
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "shutdownGracePeriod": "240s",
            "shutdownGracePeriodCriticalPods": "120s",
        });
        for (key, value) in fields.as_object().expect("fields") {
            config[key] = value.clone();
        }
        fs::write("/var/lib/kubelet/config.yaml", config.to_string()).expect("written");
    }

    /// Waits until the server meets a condition.
    pub async fn until(&self, what: &str, holds: impl Fn(&ConditionContext<'_>) -> bool) {
        self.api.wait_until(what, PATIENCE, holds).await;
    }

    /// Waits until the node reports a condition with that status.
    pub async fn until_node(&self, kind: &str, status: &str) {
        let holds = |node: &Value| condition(node, kind) == Some(status);
        self.until(&format!("{kind} is {status}"), |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| holds(&node))
        })
        .await;
    }

    /// Creates a pod and binds it to this node, as a scheduler does.
    pub fn run(&self, name: &str, spec: Value) {
        let mut pod = manifest_of(name, spec);
        pod["metadata"]["namespace"] = json!(NAMESPACE);
        pod["spec"]["hostNetwork"] = json!(true);
        pod["spec"].as_object_mut().expect("a spec").entry("terminationGracePeriodSeconds").or_insert(json!(1));
        self.api.create(pod);
        self.api.bind(NAMESPACE, name, NODE);
    }

    /// The server's copy of a pod.
    pub fn pod(&self, name: &str) -> Arc<Value> {
        self.api.get("pods", NAMESPACE, name).unwrap_or_else(|| panic!("{name} is not there"))
    }

    /// Waits until a pod meets a condition, and returns it.
    pub async fn until_pod(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Arc<Value> {
        let of_it = |seen: &ConditionContext<'_>| seen.object("pods", NAMESPACE, name).is_some_and(|pod| holds(&pod));
        self.until(&format!("{name} {what}"), of_it).await;
        self.pod(name)
    }

    /// Waits until these pods are Running and Ready.
    pub async fn until_ready<const N: usize>(&self, names: [&str; N]) -> [Arc<Value>; N] {
        for name in names {
            self.until_pod(name, "is ready", is_ready).await;
        }
        names.map(|name| self.pod(name))
    }

    /// Waits for an event with that reason about a pod or the node; returns its message.
    pub async fn until_event(&self, of: &str, reason: &str) -> String {
        let is_it = |event: &Arc<Value>| event["reason"] == reason && event["involvedObject"]["name"] == of;
        self.until(&format!("the event {reason} of {of}"), |seen| seen.all("events").iter().any(is_it)).await;
        let found = self.api.all("events").into_iter().find(is_it).expect("it was there just now");
        found["message"].as_str().expect("a message").to_owned()
    }

    /// Deletes pods and waits until they are gone.
    pub async fn remove<const N: usize>(&self, names: [&str; N]) {
        for name in names {
            self.api.delete("pods", NAMESPACE, name, None);
        }
        for name in names {
            self.until(&format!("{name} is gone"), |seen| seen.object("pods", NAMESPACE, name).is_none()).await;
        }
    }
}

/// The container `main` with a shell script.
pub fn shell(script: &str) -> Value {
    json!({"name": "main", "command": ["sh", "-c", script]})
}

/// Pod spec with only that container.
pub fn only(container: Value) -> Value {
    json!({"containers": [container]})
}

/// As [`only`], with a shell script and these resources.
pub fn sized(script: &str, resources: Value) -> Value {
    let mut container = shell(script);
    container["resources"] = resources;
    only(container)
}

/// Cgroup of a pod: its slice.
pub fn slice(pod: &Value) -> String {
    let uid = pod["metadata"]["uid"].as_str().expect("a uid").replace('-', "_");
    match pod["status"]["qosClass"].as_str().expect("a class") {
        "Guaranteed" => format!("/kubepods.slice/kubepods-pod{uid}.slice"),
        class => {
            let class = class.to_lowercase();
            format!("/kubepods.slice/kubepods-{class}.slice/kubepods-{class}-pod{uid}.slice")
        }
    }
}

/// Cgroup of a pod's container `main`: its scope.
pub fn scope(pod: &Value) -> String {
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().expect("an id");
    format!("{}/berth-{}.scope", slice(pod), id.rsplit('/').next().expect("an id"))
}

/// Content of a cgroup file.
pub fn file(group: &str, name: &str) -> String {
    let path = directory(group).join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).trim().to_owned()
}

/// Content of these cgroup files, as `name=value`.
pub fn files(group: &str, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("{name}={}", file(group, name))).collect()
}

/// A number in a cgroup file with lines like `name 17`.
pub fn counted(group: &str, name: &str, key: &str) -> u64 {
    let text = file(group, name);
    let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    found.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {key} in {text}"))
}

/// Directory of a cgroup.
pub fn directory(group: &str) -> PathBuf {
    Path::new(GROUPS).join(group.trim_start_matches('/'))
}

/// Processes of a container, the first one first.
pub fn processes(pod: &Value) -> Vec<u32> {
    file(&scope(pod), "cgroup.procs").lines().map(|pid| pid.parse().expect("a pid")).collect()
}

/// Log of a pod's container.
pub fn log(pod: &Value) -> String {
    let (name, uid) =
        (pod["metadata"]["name"].as_str().expect("a name"), pod["metadata"]["uid"].as_str().expect("a uid"));
    fs::read_to_string(format!("/var/log/pods/{NAMESPACE}_{name}_{uid}/main/0.log")).unwrap_or_default()
}

/// Total memory of the machine, in bytes.
pub fn memory_of_the_machine() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("readable");
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("received");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Polls until a value is available; for states without a watch.
pub async fn until<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A page of the read-only port; `None` if nobody responds.
pub async fn page(path: &str) -> Option<String> {
    get(10255, path).await.filter(|answer| answer.status == 200).map(|answer| answer.body)
}

/// Runs a command to its end; returns its output.
pub fn command(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {} {text}", output.status);
    text.trim().to_owned()
}

/// Output of `systemctl`.
pub fn systemctl(arguments: &[&str]) -> String {
    command("/bin/systemctl", arguments)
}

/// A property of a systemd unit.
pub fn property(unit: &str, name: &str) -> String {
    systemctl(&["show", "--property", name, "--value", unit])
}
