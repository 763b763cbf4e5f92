//! What an orderly life leaves in the log.

use nix::sys::signal::Signal;

use crate::cluster::{World, pod};
use berth_testkit::process::skips;

/// What is said of a test's node and of the machine that tests run on.
const KNOWN: [&str; 6] = [
    "reason=\"CgroupV1\"",
    "ClusterDNS",
    "Insecure setting",
    "Hard eviction has no threshold",
    "Failed to set rlimit on max file handles",
    "Failed to apply oom_score_adj",
];

/// Lines that somebody would have to look at.
fn worries(log: &str) -> Vec<&str> {
    let is_worry = |line: &&str| {
        let mut start = line.chars();
        matches!(start.next(), Some('E' | 'W')) && start.next().is_some_and(|digit| digit.is_ascii_digit())
    };
    let is_known = |line: &&str| KNOWN.iter().any(|known| line.contains(known));
    log.lines().filter(is_worry).filter(|line| !is_known(line)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orderly_life_worries_nobody() {
    if skips("an_orderly_life_worries_nobody") {
        return;
    }
    let (world, mut agent) = World::joined().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    assert!(agent.end_with(Signal::SIGTERM).await.success());
    let log = agent.whole_log();
    assert!(log.lines().count() > 10, "there is a log\n{log}");
    assert_eq!(worries(&log), [""; 0], "\n{log}");
    assert!(!log.contains("Removed resource slices"), "there were none\n{log}");
}
