//! Boot without an API server: the last-known pods start from the checkpoint, if configured.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod, pod_of};
use berth_testkit::process::{Agent, NODE, skips, unmount_below};

/// A secret that must not be stored in plain text, and its base64 form in the API.
const SECRET: &str = "swordfish";
const ENCODED: &str = "c3dvcmRmaXNo";

/// A node that keeps a checkpoint of its last-known pods.
struct CheckpointingNode {
    world: ClusterFixture,
    key: PathBuf,
}

impl CheckpointingNode {
    async fn new() -> Self {
        let mut world = ClusterFixture::new().await;
        let key = world.home.path().join("offline.key");
        let this = |world| Self { world, key: key.clone() };
        let settings = json!({"offlinePods": {"keyFile": key, "patienceSeconds": 1}});
        world.home = world.home.with(json!({"syncFrequency": "2s"})).settings(settings);
        let node = this(world);
        node.put_key(7);
        node
    }

    fn put_key(&self, byte: u8) {
        fs::write(&self.key, [byte; 32]).expect("written");
        fs::set_permissions(&self.key, fs::Permissions::from_mode(0o600)).expect("changed");
    }

    fn file(&self) -> PathBuf {
        self.world.home.root().join("offline_pods")
    }

    fn runs(&self, pod: &str) -> bool {
        !self.world.runtime.cri.running(pod, "main").is_empty()
    }

    async fn until_runs(&self, agent: &Agent, pod: &str) {
        self.world.runtime.until(&format!("{pod} runs"), agent, |cri| !cri.running(pod, "main").is_empty()).await;
    }

    /// Simulates a reboot: no containers, no mounts. The checkpoint was written when the agent exited.
    async fn reboots(&self, agent: Agent) {
        assert_eq!(agent.stop().await, Some(0));
        self.world.runtime.cri.reboot();
        unmount_below(&self.world.home.root());
    }
}

/// All files below a directory.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let below = |path: PathBuf| if path.is_dir() && !path.is_symlink() { files(&path) } else { vec![path] };
    entries.into_iter().flat_map(below).collect()
}

/// Files below a directory that contain that text.
fn holding(folder: &Path, text: &str) -> Vec<PathBuf> {
    let holds = |path: &PathBuf| {
        fs::read(path).is_ok_and(|bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes()))
    };
    files(folder).into_iter().filter(holds).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_without_a_server_the_last_known_pods_run() {
    if skips("after_a_reboot_without_a_server_the_last_known_pods_run") {
        return;
    }
    let node = CheckpointingNode::new().await;
    let world = &node.world;
    world.api.create(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings",
        "namespace": NAMESPACE}, "data": {"colour": "blue"}}));
    world.api.create(json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "word",
        "namespace": NAMESPACE}, "data": {"word": ENCODED}}));
    let agent = world.start().await;
    let spec = json!({
        "containers": [{"name": "main", "envFrom": [{"configMapRef": {"name": "settings"}}],
                        "volumeMounts": [{"name": "word", "mountPath": "/word"}]}],
        "volumes": [{"name": "word", "secret": {"secretName": "word"}}]});
    let user = world.run(pod_of("user", spec));
    world.run(pod("moved"));
    world.until_ready(&agent, "user").await;
    world.until_ready(&agent, "moved").await;
    node.reboots(agent).await;
    assert_eq!(fs::metadata(node.file()).expect("kept").permissions().mode() & 0o777, 0o600);
    for text in [SECRET, ENCODED] {
        assert_eq!(holding(&world.home.root(), text), Vec::<PathBuf>::new(), "{text}");
    }

    world.api.take_offline().await;
    world.api.delete("pods", NAMESPACE, "moved", Some(0));
    let agent = world.home.start().await;
    node.until_runs(&agent, "user").await;
    node.until_runs(&agent, "moved").await;
    let volumes = world.home.root().join("pods").join(user["metadata"]["uid"].as_str().expect("a uid")).join("volumes");
    assert_eq!(fs::read_to_string(volumes.join("kubernetes.io~secret/word/word")).expect("there"), SECRET);
    let environment = world.runtime.cri.environment("user", "main");
    assert!(environment.contains(&("colour".to_owned(), "blue".to_owned())), "{environment:?}");
    let is_good = || tokens(&volumes).iter().any(|token| token.split('.').count() == 3);
    assert!(!is_good(), "tokens are not kept");

    let (started, kept, before) =
        (world.runtime.cri.count("start_container"), world.runtime.cri.running("user", "main"), world.api.last());
    world.api.bring_online().await;
    world
        .runtime
        .until("who was deleted meanwhile is ended", &agent, |cri| cri.running("moved", "main").is_empty())
        .await;
    world
        .until_pod(&agent, "user", "tells its restart", |pod| {
            pod["status"]["containerStatuses"][0]["restartCount"] == 1 && pod["status"]["phase"] == "Running"
        })
        .await;
    agent.until("it has a good token", async || is_good()).await;
    a_moment().await;
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");
    assert_eq!(world.runtime.cri.running("user", "main"), kept);
    let asked = world.agent_requests().since(before).of("pods");
    assert_eq!((asked.verb("list").len(), asked.verb("watch").len()), (0, 1), "{asked}");
    drop(agent);
}

/// Service account tokens below a pod's volumes.
fn tokens(volumes: &Path) -> Vec<String> {
    let all = files(&volumes.join("kubernetes.io~projected"));
    all.iter().filter(|path| path.ends_with("token")).filter_map(|path| fs::read_to_string(path).ok()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_kept_and_cannot_be_read_costs_no_pod() {
    if skips("what_was_kept_and_cannot_be_read_costs_no_pod") {
        return;
    }
    let node = CheckpointingNode::new().await;
    let world = &node.world;
    let mut agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    node.reboots(agent).await;
    world.api.take_offline().await;
    let content = fs::read(node.file()).expect("kept");
    let mut changed = content.clone();
    *changed.last_mut().expect("not empty") ^= 1;
    for (key, file, message) in [
        (8, &content, "decryption failed: written with another key or for another node, or modified"),
        (7, &changed, "decryption failed: written with another key or for another node, or modified"),
        (7, &b"{}".to_vec(), "not an encrypted checkpoint of a supported version"),
    ] {
        node.put_key(key);
        fs::write(node.file(), file).expect("written");
        agent = world.home.start().await;
        let line = agent.until_log("Ignoring invalid pod checkpoint").await;
        assert!(line.contains(message) && line.contains("offline_pods"), "{line}");
        a_moment().await;
        assert!(!node.runs("a"), "of what is not known nothing runs");
        assert_eq!(agent.stop().await, Some(0));
        assert_eq!(&fs::read(node.file()).expect("there"), file, "what is not understood is left alone");
    }

    agent = world.home.start().await;
    world.api.bring_online().await;
    node.until_runs(&agent, "a").await;
    let restarted = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"] == 1;
    world.until_pod(&agent, "a", "tells its restart", restarted).await;
    node.reboots(agent).await;
    world.api.take_offline().await;
    agent = world.home.start().await;
    node.until_runs(&agent, "a").await;
    assert!(!agent.log().contains("Ignoring invalid pod checkpoint"), "it was kept again");
    assert_eq!(agent.stop().await, Some(0));

    fs::set_permissions(&node.key, fs::Permissions::from_mode(0o644)).expect("changed");
    agent = world.home.spawn();
    assert_eq!(agent.end().await.code(), Some(1));
    assert!(agent.log().contains("has mode 0644, must be accessible by its owner only"), "{}", agent.log_end());
    assert!(world.api.get("nodes", "", NODE).is_some());
}
