//! Fixture: a node with a real runtime, an agent, and a cgroup for its pods; nothing is left behind.
//!
//! Tests that only add pods share one node, as long as one of them is running.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use berth_testkit::{
    process::{Agent, Home, PATIENCE, container, manifest_of},
    real::{self, Real, RuntimeObject},
};

/// The shared node.
static SHARED: Mutex<Weak<Node>> = Mutex::const_new(Weak::new());

/// Maximum number of log files per container.
pub const MAX_LOGS: usize = 5;

/// A runtime with an agent. Fields are dropped in this order.
pub struct Node {
    /// The agent.
    pub agent: Agent,
    /// Files and configuration of the agent.
    pub home: Home,
    /// The runtime.
    pub runtime: Real,
    cgroup: PodsCgroup,
}

impl Node {
    /// The shared node; `None` if this machine cannot run one.
    pub async fn shared(test: &str) -> Option<Arc<Self>> {
        let mut shared = SHARED.lock().await;
        if let Some(node) = shared.upgrade() {
            return Some(node);
        }
        let node = Arc::new(Self::own(test).await?);
        *shared = Arc::downgrade(&node);
        Some(node)
    }

    /// A dedicated node; `None` if this machine cannot run one.
    pub async fn own(test: &str) -> Option<Self> {
        Self::prepared(test, |_| ()).await
    }

    /// A dedicated node whose home is prepared before the agent starts.
    pub async fn prepared(test: &str, prepare: impl FnOnce(&Home)) -> Option<Self> {
        Self::built(test, json!({}), &[], prepare).await
    }

    /// A dedicated node with these fields of the kubelet configuration.
    pub async fn with(test: &str, fields: Value) -> Option<Self> {
        Self::built(test, fields, &[], |_| ()).await
    }

    /// A dedicated node with these fields of the kubelet configuration and these flags.
    pub async fn with_flags(test: &str, fields: Value, flags: &[String]) -> Option<Self> {
        Self::built(test, fields, flags, |_| ()).await
    }

    async fn built(test: &str, fields: Value, flags: &[String], prepare: impl FnOnce(&Home)) -> Option<Self> {
        let runtime = real::start_or_skip(test)?;
        let name = runtime.dir().file_name().expect("a name").to_string_lossy().into_owned();
        let cgroup = PodsCgroup::new(&name);
        let home = runtime.home().with(json!({
            "cgroupsPerQOS": true,
            "cgroupRoot": format!("/{name}"),
            "containerLogMaxSize": "64Ki",
            "containerLogMaxFiles": MAX_LOGS,
            "containerLogMonitorInterval": "3s",
            "fileCheckFrequency": "5s",
        }));
        let home = flags.iter().fold(home.with(fields), Home::flag);
        prepare(&home);
        let agent = home.start().await;
        Some(Self { agent, home, runtime, cgroup })
    }

    /// Ends the agent with a signal and starts it again.
    pub async fn restart(&mut self, signal: Signal) {
        self.agent.end_with(signal).await;
        self.agent = self.home.start().await;
    }

    /// Writes a manifest and waits until its pod is ready.
    pub async fn run(&self, manifest: &Value) -> Value {
        self.home.put_pod(manifest);
        self.agent.until_ready(name_of(manifest)).await
    }

    /// Removes a pod's manifest and waits until nothing of the pod is left.
    pub async fn remove(&self, pod: &Value) {
        let full = name_of(pod);
        let name = full.strip_suffix("-test-node").expect("a static pod");
        self.home.remove(&format!("{name}.json"));
        self.until_nothing_is_left(pod).await;
    }

    /// Waits until nothing of a pod is left: status, sandbox, containers, directories, links, cgroups.
    pub async fn until_nothing_is_left(&self, pod: &Value) {
        let (uid, name) = (uid_of(pod), name_of(pod));
        self.agent
            .until(&format!("nothing is left of {name}"), async || self.leftovers(uid, name).await.is_empty())
            .await;
    }

    async fn leftovers(&self, uid: &str, name: &str) -> Vec<String> {
        let mut left = Vec::new();
        if self.agent.pods().await.iter().any(|pod| uid_of(pod) == uid) {
            left.push("shown".to_owned());
        }
        let folders = [self.home.root().join("pods").join(uid), self.home.logs().join(format!("default_{name}_{uid}"))];
        left.extend(folders.iter().filter(|folder| folder.exists()).map(|folder| folder.display().to_string()));
        let folder = &folders[1];
        let points_there = |link: &PathBuf| fs::read_link(link).is_ok_and(|target| target.starts_with(folder));
        left.extend(links("").iter().filter(|link| points_there(link)).map(|link| link.display().to_string()));
        left.extend(self.cgroup.of_pod(uid).iter().map(|group| group.display().to_string()));
        if left.is_empty() {
            // Last, because the runtime's lists are the most expensive.
            let objects = self.runtime.containers(uid).into_iter().chain(self.runtime.sandboxes(uid));
            left.extend(objects.map(|object| object.id));
        }
        left
    }

    /// The cgroup directories of a pod, one per hierarchy.
    pub fn cgroups(&self, pod: &Value) -> Vec<PathBuf> {
        self.cgroup.of_pod(uid_of(pod))
    }

    /// Output of a container, without the CRI log prefixes.
    pub fn output(&self, pod: &Value, container: &str, restart: u32) -> String {
        let text = fs::read_to_string(self.log_file(pod, container, restart)).unwrap_or_default();
        text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(|line| format!("{line}\n")).collect()
    }

    /// Path of a container's log.
    pub fn log_file(&self, pod: &Value, container: &str, restart: u32) -> PathBuf {
        let folder = format!("default_{}_{}", name_of(pod), uid_of(pod));
        self.home.logs().join(folder).join(container).join(format!("{restart}.log"))
    }

    /// Waits until a container has written a text; returns its whole output.
    pub async fn until_output(&self, pod: &Value, container: &str, text: &str) -> String {
        let what = format!("{container} of {} has written {text:?}", name_of(pod));
        self.agent.until(&what, async || self.output(pod, container, 0).contains(text)).await;
        self.output(pod, container, 0)
    }

    /// Process id of a running container.
    pub fn pid(&self, pod: &Value, name: &str) -> u32 {
        let id = container(pod, name)["containerID"].as_str().unwrap_or_default();
        let (_, id) = id.split_once("://").unwrap_or_else(|| panic!("{name} has no id: {pod:#}"));
        self.runtime.pid(id)
    }

    /// Process id of a pod's sandbox.
    pub fn sandbox_pid(&self, pod: &Value) -> u32 {
        let sandboxes = self.ids(pod, "sandbox");
        assert_eq!(sandboxes.len(), 1, "{sandboxes:?}");
        self.runtime.sandbox_pid(&sandboxes[0])
    }

    /// Ids of a pod's sandboxes or containers in the runtime; `kind` is `sandbox` or `container`.
    pub fn ids(&self, pod: &Value, kind: &str) -> Vec<String> {
        self.runtime_objects(pod, kind).into_iter().map(|object| object.id).collect()
    }

    /// The running ones of [`Self::ids`].
    pub fn tasks(&self, pod: &Value, kind: &str) -> Vec<String> {
        self.runtime_objects(pod, kind).into_iter().filter(|object| object.is_up).map(|object| object.id).collect()
    }

    fn runtime_objects(&self, pod: &Value, kind: &str) -> Vec<RuntimeObject> {
        let uid = uid_of(pod);
        if kind == "sandbox" { self.runtime.sandboxes(uid) } else { self.runtime.containers(uid) }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let logs = self.home.logs();
        for link in links("") {
            if fs::read_link(&link).is_ok_and(|target| target.starts_with(&logs)) {
                let _ = fs::remove_file(link); // the agent may remove it concurrently
            }
        }
    }
}

/// Links in `/var/log/containers` with that name prefix.
pub fn links(prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir("/var/log/containers").into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).map(|entry| entry.path()).collect()
}

/// A pod's name.
pub fn name_of(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().expect("a name")
}

/// A pod's UID.
pub fn uid_of(pod: &Value) -> &str {
    pod["metadata"]["uid"].as_str().expect("a UID")
}

/// Kills a process with SIGKILL.
pub fn kill_process(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid"));
    nix::sys::signal::kill(pid, Signal::SIGKILL).expect("it runs");
}

/// A pod with one container that runs until it is stopped.
pub fn lasting(name: &str) -> Value {
    manifest_of(name, json!({"terminationGracePeriodSeconds": 5, "containers": [shell("main", UNTIL_STOPPED)]}))
}

/// A container that runs a shell script.
pub fn shell(name: &str, script: &str) -> Value {
    json!({"name": name, "command": ["sh", "-c", script]})
}

/// End of a script for containers that run until they are stopped.
pub const UNTIL_STOPPED: &str = "trap 'exit 0' TERM; while true; do sleep 1 & wait $!; done";

/// A cgroup of that name in every hierarchy, for `cgroupRoot`.
struct PodsCgroup(Vec<PathBuf>);

impl PodsCgroup {
    fn new(name: &str) -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
        let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let is_cgroup = |fields: &Vec<&str>| matches!(fields.as_slice(), [_, _, "cgroup" | "cgroup2", ..]);
        let made = fields.filter(is_cgroup).filter_map(|fields| {
            let folder = Path::new(fields[1]).join(name);
            fs::create_dir(&folder).ok().map(|()| folder) // some hierarchies cannot be used
        });
        Self(made.collect())
    }

    fn of_pod(&self, uid: &str) -> Vec<PathBuf> {
        let name = format!("pod{uid}");
        let mut found = Vec::new();
        for top in &self.0 {
            walk(top, &mut |folder| {
                if folder.file_name().is_some_and(|own| own.to_string_lossy() == name) {
                    found.push(folder.to_owned());
                }
            });
        }
        found
    }
}

/// Visits a directory and those below it, children first.
fn walk(folder: &Path, visit: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), visit);
        }
    }
    visit(folder);
}

impl Drop for PodsCgroup {
    fn drop(&mut self) {
        // Recently killed processes may still be exiting.
        let deadline = Instant::now() + PATIENCE / 10;
        while self.0.iter().any(|folder| folder.exists()) && Instant::now() < deadline {
            for folder in &self.0 {
                walk(folder, &mut |folder| {
                    let _ = fs::remove_dir(folder); // retried
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
