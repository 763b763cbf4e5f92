//! Adverse environments of an agent on a real runtime: wrong sockets, failed recovery, full disks.

use std::{
    fs,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::node::{Node, UNTIL_STOPPED, lasting, shell};
use berth_testkit::{
    containerd::{self, Containerd},
    process::{Home, container, manifest_of},
    real,
    small_tmpfs::SmallTmpfs,
};

/// Asserts that an agent fails to start with this last log line.
async fn refuses(endpoint: &str, words: &str) {
    let home = Home::new(endpoint).with(json!({"runtimeRequestTimeout": "1s"}));
    let begun = Instant::now();
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    let log = agent.log();
    let last = log.lines().last().unwrap_or_default().replace("\\\"", "\"");
    let start = format!("validate service connection: validate CRI v1 runtime API for endpoint \"{endpoint}\": ");
    assert!(last.contains("\"command failed\"") && last.contains(&start) && last.contains(words), "{words}\n{last}");
    assert!(begun.elapsed() < Duration::from_secs(30), "patience has a limit");
}

/// containerd as Docker installs it, without CRI; and its other socket, which speaks ttrpc.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_service_on_the_socket_is_reported_as_unimplemented() {
    let test = "another_service_on_the_socket_is_reported_as_unimplemented";
    if real::is_about_containerd(test) || containerd::skips(test) {
        return;
    }
    let without_cri = |config: String| {
        config.replace("disabled_plugins = [", "disabled_plugins = [\n  \"io.containerd.grpc.v1.cri\",")
    };
    let containerd = Containerd::configured(without_cri);
    let words = "rpc error: code = Unimplemented desc = unknown service runtime.v1.RuntimeService";
    refuses(&containerd.endpoint(), words).await;
    refuses(&format!("{}.ttrpc", containerd.endpoint()), "rpc error: code = ").await;
}

/// The embedded runtime fails to recover its state: the start fails at once, with the cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recovery_that_fails_ends_the_start_with_its_cause() {
    let test = "a_recovery_that_fails_ends_the_start_with_its_cause";
    if !real::is_embedded() {
        println!("not for containerd: {test}: it is about the embedded runtime");
        return;
    }
    let Some(runtime) = real::start_or_skip(test) else { return };
    // A file instead of the directory of sandbox records.
    let root = runtime.dir().join("root");
    fs::create_dir_all(&root).and_then(|()| fs::write(root.join("sandboxes"), "")).expect("a file");
    let begun = Instant::now();
    let mut agent = runtime.home().spawn();
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    let log = agent.log();
    assert!(log.contains("root/sandboxes") && !log.contains("containerd.sock"), "{log}");
    // Without the cause, the agent would wait half a minute for the runtime.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

/// The log disk is full: containers run on and new ones start; only log lines are lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_of_logs_stops_no_container() {
    let mut mounted = None;
    let mount = |home: &Home| mounted = Some(SmallTmpfs::at(&home.logs(), "256k"));
    let Some(mut node) = Node::prepared("a_full_disk_of_logs_stops_no_container", mount).await else { return };
    let disk = mounted.expect("mounted before the agent started");
    let beat = node.home.path().join("beat");
    fs::create_dir(&beat).expect("a folder");
    let script =
        "trap 'exit 0' TERM; i=0; while true; do i=$((i+1)); echo line $i; echo $i > /beat/now; sleep 0.05; done";
    let mut main = shell("main", script);
    main["volumeMounts"] = json!([{"name": "beat", "mountPath": "/beat"}]);
    let volume = json!({"name": "beat", "hostPath": {"path": beat}});
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [main], "volumes": [volume]});
    let old = node.run(&manifest_of("talks", spec)).await;
    let count = || fs::read_to_string(beat.join("now")).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let count_past = async |from: u64| {
        node.agent.until("the container goes on", async || count().is_some_and(|now| now > from)).await;
    };
    count_past(3).await;

    disk.fill();
    let filled_at = count().unwrap_or_default();
    count_past(filled_at + 100).await; // several times the capacity of a pipe
    let new = node.run(&lasting("late")).await;
    assert_eq!(container(&node.agent.until_ready("talks").await, "main"), container(&old, "main"));

    disk.empty();
    let room_at = count().unwrap_or_default();
    let line = format!("line {}\n", room_at + 50);
    node.until_output(&old, "main", &line).await;
    node.restart(Signal::SIGKILL).await;
    for (name, pod) in [("talks", &old), ("late", &new)] {
        let now = node.agent.until_ready(name).await;
        assert_eq!(container(&now, "main"), container(pod, "main"), "{name}");
        node.remove(pod).await;
    }
}

/// The disk of the root directory is full: running pods continue, new ones wait and start once there is space; also
/// after a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_of_state_holds_up_only_what_is_new() {
    let mut mounted = None;
    let mount = |home: &Home| mounted = Some(SmallTmpfs::at(&home.root(), "256k"));
    let Some(mut node) = Node::prepared("a_full_disk_of_state_holds_up_only_what_is_new", mount).await else { return };
    let disk = mounted.expect("mounted before the agent started");
    let old = node.run(&lasting("settled")).await;
    let pid = node.pid(&old, "main");

    disk.fill();
    let script = format!("cat /etc/hosts; {UNTIL_STOPPED}");
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [shell("main", &script)]});
    node.home.put_pod(&manifest_of("newcomer", spec));
    node.agent.until_log("No space left on device").await;
    node.agent.until_pod("newcomer", "there", |pod| pod["status"]["phase"] == "Pending").await;
    assert_eq!(container(&node.agent.until_ready("settled").await, "main"), container(&old, "main"));
    assert_eq!(node.agent.get("/healthz").await.map(|answer| answer.status), Some(200));

    disk.empty();
    let new = node.agent.until_ready("newcomer").await;
    node.until_output(&new, "main", "newcomer-test-node").await; // its hosts file is complete
    node.restart(Signal::SIGKILL).await;
    for (name, pod) in [("settled", &old), ("newcomer", &new)] {
        let now = node.agent.until_ready(name).await;
        assert_eq!(container(&now, "main"), container(pod, "main"), "{name}");
    }
    assert_eq!(node.pid(&old, "main"), pid);
    node.remove(&old).await;
    node.remove(&new).await;
}
