//! Warnings and errors in the agent's log: none during normal operation.

use nix::sys::signal::Signal;

use crate::cluster::{ClusterFixture, pod};
use berth_testkit::process::skips;

/// Expected warnings about the test node and the test machine.
const KNOWN: [&str; 7] = [
    "reason=\"CgroupV1\"",
    "ClusterDNS",
    "Insecure setting",
    "Hard eviction has no threshold",
    "Failed to set rlimit on max file handles",
    "Failed to apply oom_score_adj",
    "Couldn't collect info from any of the files in \"/etc/machine-id",
];

/// Unexpected warning and error lines.
fn worries(log: &str) -> Vec<&str> {
    let is_worry = |line: &&str| {
        let mut start = line.chars();
        matches!(start.next(), Some('E' | 'W')) && start.next().is_some_and(|digit| digit.is_ascii_digit())
    };
    let is_known = |line: &&str| KNOWN.iter().any(|known| line.contains(known));
    log.lines().filter(is_worry).filter(|line| !is_known(line)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orderly_life_logs_no_warning() {
    if skips("an_orderly_life_logs_no_warning") {
        return;
    }
    let (world, mut agent) = ClusterFixture::joined().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    assert!(agent.end_with(Signal::SIGTERM).await.success());
    let log = agent.whole_log();
    assert!(log.lines().count() > 10, "there is a log\n{log}");
    assert_eq!(worries(&log), [""; 0], "\n{log}");
    assert!(!log.contains("Removed resource slices"), "there were none\n{log}");
}
