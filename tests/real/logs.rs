//! Container log rotation on a real runtime under fast writers: bounded, and no torn lines.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use serde_json::json;

use crate::node::{MAX_LOGS, Node, UNTIL_STOPPED, shell};
use berth_testkit::process::manifest_of;

/// Numbers in a log file, in order; none if it was just deleted.
fn numbers(path: &Path) -> Vec<u64> {
    let bytes = fs::read(path).unwrap_or_default();
    let mut text = String::new();
    if path.extension().is_some_and(|end| end == "gz") && !bytes.is_empty() {
        GzDecoder::new(bytes.as_slice()).read_to_string(&mut text).expect("a whole archive");
    } else {
        text = String::from_utf8_lossy(&bytes).into_owned();
    }
    let whole = text.rfind('\n').map_or("", |end| text.get(..end).unwrap_or_default());
    let number = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse().ok());
    whole.lines().map(|line| number(line).unwrap_or_else(|| panic!("no number: {line:?}"))).collect()
}

/// Files of a log, oldest first.
fn files(log: &Path) -> Vec<PathBuf> {
    let folder = log.parent().expect("a folder");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut rotated: Vec<_> =
        entries.filter(|path| path != log && path.extension().is_none_or(|end| end != "tmp")).collect();
    rotated.sort();
    rotated.push(log.to_owned());
    rotated
}

/// An endless writer has a bounded number of files, the oldest of them compressed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_without_end_is_bounded() {
    let Some(node) = Node::shared("a_log_without_end_is_bounded").await else { return };
    let script =
        "trap 'exit 0' TERM; i=0; while true; do for _ in $(seq 100); do i=$((i+1)); echo $i; done; sleep 0.05; done";
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [shell("main", script)]});
    let pod = node.run(&manifest_of("writer", spec)).await;
    let log = node.log_file(&pod, "main", 0);
    let oldest_is_gone = || files(&log).first().is_some_and(|first| numbers(first).first().is_some_and(|n| *n > 1));
    node.agent.until("the oldest lines are gone", async || oldest_is_gone()).await;
    let files = files(&log);
    // One more during a rotation.
    assert!(files.len() >= 3 && files.len() <= MAX_LOGS + 1, "{files:?}");
    assert!(files[0].extension().is_some_and(|end| end == "gz"), "{files:?}");
    node.remove(&pod).await;
}

/// Every kept file continues where the previous one ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rotated_logs_continue_one_another() {
    let Some(node) = Node::shared("rotated_logs_continue_one_another").await else { return };
    // Bursts that are rotated one by one, and few enough that none is deleted.
    let script = format!(
        "i=0; for _ in 1 2 3; do for _ in $(seq 2000); do i=$((i+1)); echo $i; done; sleep 4; done; {UNTIL_STOPPED}"
    );
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [shell("main", &script)]});
    let pod = node.run(&manifest_of("counter", spec)).await;
    let log = node.log_file(&pod, "main", 0);
    let all = || files(&log).iter().flat_map(|path| numbers(path)).collect::<Vec<u64>>();
    node.agent.until("it has been rotated twice", async || files(&log).len() >= 3).await;
    node.agent.until("nothing is missing", async || all() == (1..=6000).collect::<Vec<u64>>()).await;
    node.remove(&pod).await;
}
