//! System cgroups on this machine's cgroups: the processes that move were all started by the test.
//!
//! A cgroup of the test stands for the root cgroup, and a process of the test for the agent.

use std::{
    collections::BTreeSet,
    fs,
    process::{Child, Command},
    time::Duration,
};

use berth::resources::system_cgroups::{ProcessTable, SystemCgroupConfig, SystemCgroups};
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Fixture;

/// Maximum wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process in the cgroup that stands for the root; ends with the test.
struct Sleeper(Child);

impl Sleeper {
    fn new(bench: &Fixture) -> Self {
        let sleeper = Self(Command::new("sleep").arg("1000").spawn().expect("spawnable"));
        bench.hierarchy.attach(&bench.group("/source"), sleeper.pid()).expect("movable");
        sleeper
    }

    fn pid(&self) -> i32 {
        self.0.id().try_into().expect("a process id")
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rounds of moves with a short period; they end with the test.
struct Rounds {
    task: JoinHandle<()>,
    stop: DropGuard,
}

impl Rounds {
    /// Starts them and waits for the end of the first round. An empty cgroup is not configured.
    async fn start(bench: &Fixture, kubelet: &str, system: &str, agent: &Sleeper) -> Self {
        let path = |below: &str| if below.is_empty() { String::new() } else { bench.group(below).to_string() };
        let config = SystemCgroupConfig::new(&path(kubelet), &path(system), 500).expect("valid");
        let config = SystemCgroupConfig { source: bench.group("/source"), period: Duration::from_millis(20), ..config };
        // PID 1 of a sandbox may have capabilities that this process lacks; then its namespace cannot be read.
        let init = std::process::id().try_into().expect("a process id");
        let processes = ProcessTable { agent: agent.pid(), init, ..ProcessTable::default() };
        let mover = SystemCgroups::new(bench.hierarchy.clone(), processes, config);
        let ((ended, first_round), stop) = (oneshot::channel(), CancellationToken::new());
        let task = tokio::spawn(mover.run(ended, stop.clone()));
        timeout(PATIENCE, first_round).await.expect("in time").expect("a round");
        Self { task, stop: stop.drop_guard() }
    }

    async fn stop(self) {
        drop(self.stop);
        timeout(PATIENCE, self.task).await.expect("in time").expect("joined");
    }
}

fn processes(bench: &Fixture, below: &str) -> BTreeSet<i32> {
    bench.hierarchy.processes(&bench.group(below)).expect("readable").into_iter().collect()
}

fn pids(sleepers: &[&Sleeper]) -> BTreeSet<i32> {
    sleepers.iter().map(|sleeper| sleeper.pid()).collect()
}

/// Waits until the cgroup has exactly these processes.
async fn reach(bench: &Fixture, below: &str, sleepers: &[&Sleeper]) {
    let expected = pids(sleepers);
    let reached = timeout(PATIENCE, async {
        while processes(bench, below) != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(reached.await.is_ok(), "{below}: {:?}, not {expected:?}", processes(bench, below));
}

fn own_cgroups() -> String {
    fs::read_to_string("/proc/self/cgroup").expect("readable")
}

#[tokio::test]
async fn agent_and_system_processes_move_to_their_cgroups() {
    let Some(bench) = Fixture::new() else { return };
    let before = own_cgroups();
    let (agent, other) = (Sleeper::new(&bench), Sleeper::new(&bench));
    let rounds = Rounds::start(&bench, "/agent", "/system/misc", &agent).await;
    // The first round has moved both: the agent through the system cgroup to its own.
    assert_eq!(processes(&bench, "/agent"), pids(&[&agent]));
    assert_eq!(processes(&bench, "/system/misc"), pids(&[&other]));
    assert_eq!(processes(&bench, "/source"), pids(&[]));
    for directory in bench.hierarchy.directories(&bench.group("/agent")) {
        let listed = fs::read_to_string(directory.join("cgroup.procs")).expect("readable");
        assert_eq!(listed.trim(), agent.pid().to_string(), "{}", directory.display());
    }
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", agent.pid())).expect("readable");
    assert_eq!(score.trim(), "500");
    // Later rounds move processes that start in the root.
    let late = Sleeper::new(&bench);
    reach(&bench, "/system/misc", &[&other, &late]).await;
    rounds.stop().await;
    // An agent that others have moved away returns.
    bench.hierarchy.attach(&bench.group("/elsewhere"), agent.pid()).expect("movable");
    let rounds = Rounds::start(&bench, "/agent", "", &agent).await;
    assert_eq!(processes(&bench, "/agent"), pids(&[&agent]));
    rounds.stop().await;
    assert_eq!(own_cgroups(), before, "this process stays");
}

#[tokio::test]
async fn a_cgroup_that_cannot_be_made_does_not_affect_the_other() {
    let Some(bench) = Fixture::new() else { return };
    let (agent, other) = (Sleeper::new(&bench), Sleeper::new(&bench));
    // The path of an interface file, so that no directory can be made there.
    let rounds = Rounds::start(&bench, "/agent", "/source/cgroup.procs", &agent).await;
    assert_eq!(processes(&bench, "/agent"), pids(&[&agent]));
    assert_eq!(processes(&bench, "/source"), pids(&[&other]));
    rounds.stop().await;
}

#[tokio::test]
async fn the_source_alone_is_emptied_and_not_its_descendants() {
    let Some(bench) = Fixture::new() else { return };
    let (direct, below) = (Sleeper::new(&bench), Sleeper::new(&bench));
    bench.hierarchy.attach(&bench.group("/source/inner"), below.pid()).expect("movable");
    let rounds = Rounds::start(&bench, "", "/system", &direct).await;
    assert_eq!(processes(&bench, "/system"), pids(&[&direct]));
    assert_eq!(processes(&bench, "/source/inner"), pids(&[&below]));
    rounds.stop().await;
}
