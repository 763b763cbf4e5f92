//! Kills the daemon at each step of a pod's life; the next one continues or cleans up.
//!
//! Behavior: spec 09 §7, §8.

use std::{collections::BTreeSet, path::Path};

use berth_proto::cri::{ContainerConfig, ContainerState, PodSandboxConfig};
use berth_testkit::small_tmpfs::SmallTmpfs;

use crate::{
    fixture::{DaemonOptions, Fixture, Pids, container, pod},
    shims::{halted, resume},
    tests,
};

tests! {
    a_daemon_killed_at_any_step_leaves_nothing_behind_asked_again
    a_daemon_killed_at_any_step_leaves_nothing_behind_removed
    a_disk_that_fills_up_at_any_step_of_an_end_holds_nothing_up
    a_start_that_fills_the_disk_is_known_to_the_next_daemon
    every_step_is_killed_at
}

/// CRI requests in the life of a pod.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum CriRequest {
    Run,
    Create,
    Start,
    /// The container exits by itself on the stop signal.
    Stop,
    /// Stop with a grace period of zero.
    Kill,
    Remove,
    StopPod,
    RemovePod,
}

/// All steps of the daemon, by the request that reaches them.
const STEPS: &[(CriRequest, &[&str])] = &[
    (
        CriRequest::Run,
        &[
            "run.begun",
            "run.directory",
            "run.meta",
            "run.files",
            "run.memory",
            "run.group",
            "run.shim",
            "run.namespaces",
            "network.file",
            "network.leased",
            "network.ports",
            "network.links",
            "run.network",
            "run.final",
            "run.ready",
        ],
    ),
    (
        CriRequest::Create,
        &[
            "create.root",
            "create.directory",
            "create.planned",
            "create.spec",
            "create.state",
            "create.meta",
            "create.known",
        ],
    ),
    (CriRequest::Start, &["start.begun", "start.group", "start.devices", "start.launched", "start.written"]),
    (CriRequest::Stop, &["stop.decided", "stop.asked", "exit.received", "exit.written", "exit.group"]),
    (CriRequest::Kill, &["kill.decided", "kill.sent"]),
    (
        CriRequest::Remove,
        &[
            "kill.sent",
            "remove.marked",
            "remove.forgotten",
            "remove.group",
            "remove.record",
            "delete.renamed",
            "remove.directory",
            "remove.root",
        ],
    ),
    (
        CriRequest::StopPod,
        &[
            "kill.decided",
            "stop-pod.killed",
            "unnetwork.ports",
            "unnetwork.links",
            "unnetwork.lease",
            "stop-pod.network",
            "stop-pod.memory",
            "stop-pod.shim",
            "stop-pod.group",
            "stop-pod.written",
        ],
    ),
    (
        CriRequest::RemovePod,
        &[
            "stop-pod.group",
            "remove.directory",
            "teardown.begun",
            "teardown.freed",
            "teardown.shim",
            "teardown.deleted",
            "delete.renamed",
        ],
    ),
];

/// A pod and its progress.
struct PodLifecycle {
    pod: PodSandboxConfig,
    container: ContainerConfig,
    sandbox: String,
    id: String,
}

impl PodLifecycle {
    fn new(rig: &Fixture, pids: Pids) -> Self {
        let script = "trap 'exit 3' TERM; echo begun; while :; do sleep 0.05; done";
        let (pod, container) = (pod(rig, "life", pids), container("c", script, pids));
        Self { pod, container, sandbox: String::new(), id: String::new() }
    }

    async fn act(&mut self, rig: &Fixture, act: CriRequest) -> Result<(), tonic::Status> {
        match act {
            CriRequest::Run => self.sandbox = rig.run(&self.pod).await?,
            CriRequest::Create => {
                let _ = std::fs::remove_file(rig.place.join("logs/c.log")); // of the previous pod
                self.id = rig.create(&self.sandbox, &self.container).await?;
            }
            CriRequest::Start => rig.start_container(&self.id).await?,
            CriRequest::Stop => {
                // Without its trap installed, the shell is killed by the signal.
                rig.until_logged(&self.id, "begun").await;
                rig.stop_container(&self.id, 10).await?;
            }
            CriRequest::Kill => rig.stop_container(&self.id, 0).await?,
            CriRequest::Remove => rig.remove_container(&self.id).await?,
            CriRequest::StopPod => rig.stop(&self.sandbox).await?,
            CriRequest::RemovePod => rig.remove(&self.sandbox).await?,
        }
        Ok(())
    }

    /// Runs the requests before an act.
    async fn lead_up(&mut self, rig: &Fixture, act: CriRequest) {
        for earlier in
            [CriRequest::Run, CriRequest::Create, CriRequest::Start].into_iter().filter(|earlier| *earlier < act)
        {
            self.act(rig, earlier).await.expect("a life without events");
        }
    }

    /// As the kubelet does: repeats the request without a response, and continues the pod's life.
    async fn go_on(&mut self, rig: &Fixture, act: CriRequest, what: &str) {
        let state = |id: String| async move { rig.status(&id).await.state() };
        if act == CriRequest::Start && state(self.id.clone()).await == ContainerState::ContainerRunning {
            // The kubelet learns it from the container list.
        } else {
            self.act(rig, act).await.unwrap_or_else(|e| panic!("{what}, retried: {e}"));
        }
        for later in [CriRequest::Create, CriRequest::Start].into_iter().filter(|later| *later > act) {
            self.act(rig, later).await.unwrap_or_else(|e| panic!("{what}, then {later:?}: {e}"));
        }
        match act {
            CriRequest::Run | CriRequest::Create | CriRequest::Start => {
                assert_eq!(state(self.id.clone()).await, ContainerState::ContainerRunning, "{what}");
                let (out, code) = rig.exec(&self.id, "ip addr show eth0; echo hi").await.expect(what);
                assert!(out.contains("10.199.0.") && out.ends_with("hi\n") && code == 0, "{what}: {out:?} {code}");
                self.act(rig, CriRequest::Stop).await.unwrap_or_else(|e| panic!("{what}, then stop: {e}"));
                assert_eq!(rig.status(&self.id).await.exit_code, 3, "{what}");
            }
            CriRequest::Stop => assert_eq!(rig.exited(&self.id).await.exit_code, 3, "{what}"),
            CriRequest::Kill => assert_eq!(rig.exited(&self.id).await.exit_code, 137, "{what}"),
            CriRequest::Remove => assert_eq!(rig.containers().await, [], "{what}"),
            CriRequest::StopPod => assert!(rig.sandboxes().await.iter().all(|s| s.state != 0), "{what}"),
            CriRequest::RemovePod => assert_eq!(rig.sandboxes().await, [], "{what}"),
        }
    }
}

async fn a_daemon_killed_at_any_step_leaves_nothing_behind_asked_again(mut rig: Fixture) {
    kill_at_each(&mut rig, &[], Aftermath::Retried).await;
    rig.no_leaks();
}

async fn a_daemon_killed_at_any_step_leaves_nothing_behind_removed(mut rig: Fixture) {
    kill_at_each(&mut rig, &[], Aftermath::Removed).await;
    rig.no_leaks();
}

/// What the kubelet does once the next daemon serves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Aftermath {
    /// It repeats the failed request and continues.
    Retried,
    /// It removes the pod.
    Removed,
}

/// Kills the daemon at these steps, or at all of them if the list is empty.
pub async fn kill_at_each(rig: &mut Fixture, wanted: &[&str], then: Aftermath) {
    // Bridge and packet filter exist from now on.
    whole_life(rig).await;
    rig.take_inventory();
    let all = STEPS.iter().flat_map(|(act, steps)| steps.iter().map(move |step| (*act, *step)));
    let chosen = all.filter(|(_, step)| wanted.is_empty() || wanted.contains(step));
    for (number, (act, step)) in chosen.enumerate() {
        let pids = if number % 2 == 0 { Pids::Container } else { Pids::Pod };
        kill_at(rig, (act, step), then, pids).await;
    }
}

async fn kill_at(rig: &mut Fixture, (act, step): (CriRequest, &str), then: Aftermath, pids: Pids) {
    let what =
        format!("killed at {step} of {act:?}, {}", if then == Aftermath::Retried { "asked again" } else { "removed" });
    let mut life = PodLifecycle::new(rig, pids);
    life.lead_up(rig, act).await;
    rig.arm(step, "kill");
    let answer = life.act(rig, act).await;
    // Steps after a container's exit happen asynchronously.
    assert!(step.starts_with("exit.") || rig.has_fired(), "{what}: the step was not reached: {answer:?}");
    rig.until_dead(&what).await;
    rig.restart().await;
    if then == Aftermath::Retried {
        life.go_on(rig, act, &what).await;
    }
    rig.remove_all(&what).await;
    rig.nothing_left(&what).await;
}

/// Stopping and removing needs no disk space: the runtime's disk is full from each of these steps on, and every request
/// still succeeds (spec 09 §7, AC-09-E10).
async fn a_disk_that_fills_up_at_any_step_of_an_end_holds_nothing_up(rig: Fixture) {
    drop(rig);
    let (disks, mut rig) = on_small_disks().await;
    whole_life(&rig).await;
    rig.take_inventory();
    let ends = STEPS.iter().filter(|(act, _)| *act >= CriRequest::Stop);
    for (act, step) in ends.flat_map(|(act, steps)| steps.iter().map(move |step| (*act, *step))) {
        let what = format!("the disk is full from {step} of {act:?} on");
        let mut life = PodLifecycle::new(&rig, Pids::Container);
        life.lead_up(&rig, act).await;
        rig.arm(step, "halt");
        let fills = async {
            let halted = halted().await;
            disks.iter().for_each(SmallTmpfs::fill);
            resume(halted);
        };
        let (answer, ()) = tokio::join!(life.act(&rig, act), fills);
        answer.unwrap_or_else(|error| panic!("{what}: {error}"));
        rig.remove_all(&what).await;
        disks.iter().for_each(SmallTmpfs::empty);
    }
    // The next request writes the leases again.
    whole_life(&rig).await;
    rig.nothing_left("a full disk").await;
    rig.no_leaks();
}

/// A start succeeds if the disk is full before it is recorded. A daemon that is killed before there is space again,
/// with or without having responded, leaves a running container to the next one (spec 09 §7).
async fn a_start_that_fills_the_disk_is_known_to_the_next_daemon(rig: Fixture) {
    drop(rig);
    let (disks, mut rig) = on_small_disks().await;
    whole_life(&rig).await;
    rig.take_inventory();
    for killed_at in [None, Some("start.written")] {
        let what = format!("the disk is full from start.launched on, killed at {killed_at:?}");
        let mut life = PodLifecycle::new(&rig, Pids::Container);
        life.lead_up(&rig, CriRequest::Start).await;
        rig.arm("start.launched", "halt");
        let fills = async {
            let halted = halted().await;
            disks.iter().for_each(SmallTmpfs::fill);
            if let Some(step) = killed_at {
                rig.arm(step, "kill");
            }
            resume(halted);
        };
        let (answer, ()) = tokio::join!(life.act(&rig, CriRequest::Start), fills);
        if killed_at.is_some() {
            answer.expect_err(&what);
            rig.until_dead(&what).await;
        } else {
            answer.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(rig.status(&life.id).await.state(), ContainerState::ContainerRunning, "{what}");
            rig.kill();
        }
        let log = std::fs::read_to_string(rig.place.join("daemon.log")).expect("readable");
        assert!(log.contains("Failed to write sandbox record"), "{what}: the start was recorded");
        disks.iter().for_each(SmallTmpfs::empty);
        rig.restart().await;
        assert_eq!(rig.status(&life.id).await.state(), ContainerState::ContainerRunning, "{what}");
        life.go_on(&rig, CriRequest::Start, &what).await;
        rig.remove_all(&what).await;
        rig.nothing_left(&what).await;
    }
    rig.no_leaks();
}

/// Starts a daemon whose directories `root` and `state` are small disks of their own.
async fn on_small_disks() -> (Vec<SmallTmpfs>, Fixture) {
    let mut disks = Vec::new();
    let mount = |place: &Path| {
        disks.extend(["root", "state"].map(|name| {
            std::fs::create_dir_all(place.join(name)).expect("a directory");
            SmallTmpfs::at(&place.join(name), "32m")
        }));
        DaemonOptions::default()
    };
    let rig = Fixture::with(mount).await;
    (disks, rig)
}

/// A pod's life without faults.
async fn whole_life(rig: &Fixture) {
    let mut life = PodLifecycle::new(rig, Pids::Container);
    for act in [
        CriRequest::Run,
        CriRequest::Create,
        CriRequest::Start,
        CriRequest::Stop,
        CriRequest::Remove,
        CriRequest::StopPod,
        CriRequest::RemovePod,
    ] {
        life.act(rig, act).await.expect("a life without events");
    }
}

async fn every_step_is_killed_at(_rig: Fixture) {
    let (root, mut found) = (Path::new(env!("CARGO_MANIFEST_DIR")), BTreeSet::new());
    if !root.join("src").is_dir() {
        println!("skipped every_step_is_killed_at: needs the sources");
        return;
    }
    for sources in ["src", "crates"] {
        steps_in(&root.join(sources), &mut found);
    }
    let daemon = STEPS.iter().flat_map(|(_, steps)| *steps).map(|step| (*step).to_owned());
    let known: BTreeSet<String> = daemon.chain(crate::shims::steps()).chain(crate::power_cuts::steps()).collect();
    // The steps of volumes are covered beside an API server: tests/node/cluster/csi.rs.
    found.retain(|step| !step.starts_with("csi.") && !step.starts_with("block."));
    assert_eq!(found, known);
}

fn steps_in(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            steps_in(&entry.path(), found);
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        let rest = text.split("failpoint::reached(\"").skip(1);
        found.extend(rest.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
    }
}
