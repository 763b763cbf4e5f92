//! State directory: a full disk delays new pods only; an unusable directory or state file fails the start, and is kept.

use std::fs;

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{container, manifest, skips},
    small_tmpfs::SmallTmpfs,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_holds_up_only_what_is_new() {
    if skips("a_full_disk_holds_up_only_what_is_new") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let disk = SmallTmpfs::at(&home.root(), "256k");
    home.put_pod(&manifest("old"));
    let agent = home.start().await;
    let before = agent.until_ready("old").await;

    disk.fill();
    home.put_pod(&manifest("new"));
    agent.until_log("No space left on device").await;
    agent.until_pod("new", "there", |pod| pod["status"]["phase"] == "Pending").await;
    assert_eq!(container(&agent.until_ready("old").await, "main"), container(&before, "main"));
    assert_eq!(agent.get("/healthz").await.map(|answer| answer.status), Some(200));

    disk.empty();
    agent.until_ready("new").await;
    agent.kill().await;
    let agent = home.start().await;
    agent.until_ready("new").await;
    assert_eq!(container(&agent.until_ready("old").await, "main"), container(&before, "main"));
    assert!(runtime.cri.violations().is_empty());
    drop(agent);
}

/// A root directory that cannot be created: the start fails and names it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_directory_that_cannot_be_made_is_named() {
    if skips("a_root_directory_that_cannot_be_made_is_named") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let file = home.path().join("file");
    fs::write(&file, "").expect("written");
    let home = home.flag(format!("--root-dir={}/root", file.display()));
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1));
    let log = agent.log();
    assert!(log.contains("file/root") && log.contains("Not a directory"), "{log}");
}

/// A damaged state file fails the start with advice, and is not overwritten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_state_file_is_named_and_kept() {
    if skips("a_damaged_state_file_is_named_and_kept") {
        return;
    }
    // AC-02a-21
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    home.put_pod(&manifest("one"));
    let agent = home.start().await;
    agent.until_ready("one").await;
    agent.kill().await;
    let file = home.root().join("allocated_pods_state");
    fs::write(&file, "{\"data\":\"{}\",\"checksum\":1}").expect("written");
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1));
    let log = agent.log();
    assert!(log.contains("allocated_pods_state") && log.contains("please drain this node"), "{log}");
    assert!(fs::read_to_string(&file).expect("there").contains("\"checksum\":1"));
    assert_eq!(runtime.cri.running("one-test-node", "main").len(), 1);
    fs::remove_file(file).expect("removed");
    let agent = home.start().await;
    agent.until_ready("one").await;
    assert_eq!(runtime.cri.count("start_container"), 1);
}

/// A previous agent may have pinned containers to CPUs: that state is not discarded silently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processors_that_were_given_away_stop_the_start() {
    if skips("processors_that_were_given_away_stop_the_start") {
        return;
    }
    // AC-06-4, AC-01-38
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    home.put_pod(&manifest("one"));
    let agent = home.start().await;
    agent.until_ready("one").await;
    agent.kill().await;
    let file = home.root().join("cpu_manager_state");
    let none = r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#;
    assert_eq!(fs::read_to_string(&file).expect("written at the start"), none);
    let given = r#"{"policyName":"static","defaultCpuSet":"0","entries":{"u":{"c":"1"}},"checksum":0}"#;
    fs::write(&file, given).expect("written");
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1));
    let log = agent.log();
    let differs = r#"configured policy "none" differs from state checkpoint policy "static", please drain this node"#;
    assert!(log.replace('\\', "").contains(differs), "{log}");
    assert_eq!(fs::read_to_string(&file).expect("kept"), given);
    fs::remove_file(&file).expect("removed");
    let agent = home.start().await;
    agent.until_ready("one").await;
    assert_eq!(fs::read_to_string(&file).expect("written again"), none);
}
