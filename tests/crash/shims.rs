//! Kills a shim at each step of its own. Behavior: spec 09 §7 (AC-09-E3), 09a §10, §14.

use std::{fs, time::Duration};

use berth_proto::cri::{ContainerState, PodSandboxState};

use crate::{
    fixture::{Fixture, Pids, container, pod},
    test_machine, tests,
};

tests! {
    a_shim_killed_at_any_step_leaves_nothing_behind
    a_shim_killed_at_any_step_leaves_nothing_behind_in_a_shared_pid_namespace
    a_daemon_killed_while_a_container_starts_leaves_it_made_or_running
}

/// Steps of a sandbox start.
const RUN: &[&str] = &["shim.settled", "shim.grouped", "shim.namespaces"];
/// Steps of a container start: of the shim, and of its helper.
const START: &[&str] = &[
    "shim.begun",
    "helper.born",
    "helper.grouped",
    "helper.rooted",
    "helper.joined",
    "helper.spawned",
    "helper.announced",
    "shim.started",
    "shim.replied",
];
/// Steps of a container stop.
const STOP: &[&str] = &["shim.signalled", "shim.reaped", "shim.recorded"];
/// Steps of a sandbox stop.
const END: &[&str] = &["shim.leaving", "shim.done", "shim.empty"];
/// Steps of a container removal.
const FORGET: &[&str] = &["shim.forgotten"];

/// All steps of a shim.
pub fn steps() -> impl Iterator<Item = String> {
    [RUN, START, STOP, END, FORGET].into_iter().flatten().map(|step| (*step).to_owned())
}

/// Action at a step: a helper kills its parent, the shim.
fn act(step: &str) -> &'static str {
    if step.starts_with("helper.") { "kill-parent" } else { "kill" }
}

const SCRIPT: &str = "trap 'exit 3' TERM; (while :; do sleep 0.05; done) & while :; do sleep 0.05; done";

async fn a_shim_killed_at_any_step_leaves_nothing_behind(rig: Fixture) {
    kill_shims_at_each(rig, Pids::Container).await;
}

async fn a_shim_killed_at_any_step_leaves_nothing_behind_in_a_shared_pid_namespace(rig: Fixture) {
    kill_shims_at_each(rig, Pids::Pod).await;
}

async fn kill_shims_at_each(mut rig: Fixture, pids: Pids) {
    let sandbox = rig.run(&pod(&rig, "s", Pids::Container)).await.expect("runs");
    rig.remove(&sandbox).await.expect("goes");
    rig.take_inventory();
    let (pod, one) = (pod(&rig, "s", pids), container("c", SCRIPT, pids));
    for step in RUN {
        rig.arm(step, act(step));
        let refused = rig.run(&pod).await;
        assert!(rig.has_fired(), "{step}: {refused:?}");
        refused.expect_err(step);
        rig.remove_all(step).await;
        rig.nothing_left(step).await;
        let sandbox = rig.run(&pod).await.unwrap_or_else(|e| panic!("{step}, again: {e}"));
        rig.remove(&sandbox).await.expect(step);
        rig.nothing_left(step).await;
    }
    for step in START.iter().chain(STOP) {
        let sandbox = rig.run(&pod).await.expect("runs");
        let id = rig.create(&sandbox, &one).await.expect("made");
        let other = rig.running(&sandbox, &container("other", SCRIPT, pids)).await;
        if START.contains(step) {
            rig.arm(step, act(step));
            // The start may already have been reported.
            let _ = rig.start_container(&id).await;
        } else {
            rig.start_container(&id).await.expect("starts");
            rig.arm(step, act(step));
            let _ = rig.stop_container(&id, 5).await;
        }
        assert!(rig.has_fired(), "{step}");
        // AC-09-E3
        let took = rig.until_not_ready(&sandbox).await;
        assert!(took < Duration::from_secs(30), "{step}: {took:?}");
        let status = rig.exited(&id).await;
        let expected: &[i32] = match *step {
            "shim.recorded" => &[3],
            _ if STOP.contains(step) => &[255],
            // The shim died during the start, or before the start was reported.
            _ => &[255, 128],
        };
        assert!(expected.contains(&status.exit_code), "{step}: {} {}", status.exit_code, status.reason);
        let status = rig.exited(&other).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"), "{step}");
        for folder in test_machine::directories(&test_machine::parent()) {
            let left = processes_below(&folder);
            assert!(left.is_empty(), "{step}: {left:?}");
        }
        rig.remove_all(step).await;
        rig.nothing_left(step).await;
    }
    for step in FORGET.iter().chain(END) {
        let sandbox = rig.run(&pod).await.expect("runs");
        let id = rig.running(&sandbox, &one).await;
        rig.arm(step, act(step));
        match FORGET.contains(step) {
            true => rig.remove_container(&id).await.expect(step),
            false => rig.stop(&sandbox).await.expect(step),
        }
        // Once the shim has announced its exit, its cgroup may be killed before it has exited.
        assert!(rig.has_fired() || ["shim.done", "shim.empty"].contains(step), "{step}");
        rig.disarm();
        rig.until_not_ready(&sandbox).await;
        rig.remove_all(step).await;
        rig.nothing_left(step).await;
    }
    rig.no_leaks();
}

/// Processes in a cgroup's direct children; waits a little for killed ones.
fn processes_below(folder: &std::path::Path) -> Vec<String> {
    let mut left = Vec::new();
    for _ in 0..200 {
        left.clear();
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path().join("cgroup.procs")).unwrap_or_default();
            left.extend(text.lines().map(|pid| {
                let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
                let (line, stat) = (read("cmdline").replace('\0', " "), read("stat"));
                format!("{} {pid} {line} {stat}", entry.path().display())
            }));
        }
        if left.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    left
}

async fn a_daemon_killed_while_a_container_starts_leaves_it_made_or_running(mut rig: Fixture) {
    let sandbox = rig.run(&pod(&rig, "h", Pids::Container)).await.expect("runs");
    rig.remove(&sandbox).await.expect("goes");
    rig.take_inventory();
    for step in START.iter().filter(|step| **step != "shim.replied") {
        for goes_on in [true, false] {
            let (pod, one) = (pod(&rig, "h", Pids::Container), container("c", SCRIPT, Pids::Container));
            let sandbox = rig.run(&pod).await.expect("runs");
            let id = rig.create(&sandbox, &one).await.expect("made");
            rig.arm(step, "halt");
            let (asking, asked) = (rig.rpc.clone(), id.clone());
            let request = berth_proto::cri::StartContainerRequest { container_id: asked };
            let asking = tokio::spawn(async move { asking.clone().start_container(request).await });
            let halted = halted().await;
            rig.kill();
            let _ = asking.await;
            if step.starts_with("helper.") {
                // The shim lives, and receives no report of its helper while the request is pending.
                rig.restart().await;
                resume(halted);
            } else {
                resume(halted);
                rig.restart().await;
            }
            if goes_on {
                let status = rig.status(&id).await;
                if status.state() != ContainerState::ContainerRunning {
                    assert_eq!(status.state(), ContainerState::ContainerCreated, "{step}: {status:?}");
                    rig.start_container(&id).await.unwrap_or_else(|e| panic!("{step}: start again: {e}"));
                }
                let ready = rig.sandboxes().await.first().map(|sandbox| sandbox.state());
                assert_eq!(ready, Some(PodSandboxState::SandboxReady), "{step}");
                assert_eq!(rig.exec(&id, "echo hi").await.expect(step), ("hi\n".to_owned(), 0), "{step}");
            }
            rig.remove_all(step).await;
            rig.nothing_left(step).await;
        }
    }
    rig.no_leaks();
}

/// Waits until a process is halted.
pub async fn halted() -> i32 {
    for _ in 0..4000 {
        let pids = fs::read_dir("/proc").expect("processes").flatten();
        for pid in pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            if state == Some('T') {
                return pid;
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("nobody is halted");
}

/// Resumes a halted process.
pub fn resume(pid: i32) {
    // The process may have been killed by now.
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGCONT);
}
