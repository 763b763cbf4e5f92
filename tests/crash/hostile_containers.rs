//! Misbehaving containers, and a kernel without overlayfs. Behavior: spec 09 §5, 09a §3, §9.5, §13.

use std::{
    fs,
    time::{Duration, Instant},
};

use berth_proto::cri::{ContainerConfig, LinuxContainerSecurityContext, NamespaceMode, NamespaceOption};
use nix::mount::{MsFlags, mount};

use crate::{
    fixture::{DaemonOptions, Fixture, LIMIT, Pids, container, pod},
    test_machine, tests,
};

tests! {
    a_fork_bomb_is_limited_and_killed
    who_ignores_the_signal_is_killed
    a_full_disk_loses_log_lines_and_blocks_nothing
    whatever_is_mounted_inside_stays_inside
    containers_run_on_copies_where_there_are_no_overlays
}

async fn a_fork_bomb_is_limited_and_killed(mut rig: Fixture) {
    rig.take_inventory();
    for pids in [Pids::Node, Pids::Container] {
        let sandbox = rig.run(&pod(&rig, "b", pids)).await.expect("runs");
        // As the kubelet does for every pod.
        for folder in
            test_machine::directories(&test_machine::parent()).iter().filter(|folder| folder.join("pids.max").exists())
        {
            fs::write(folder.join("pids.max"), "300").expect("limited");
        }
        // A shell that cannot fork exits: a bomb in a loop would disappear at once, with all its processes.
        let bomb = container("bomb", "trap '' TERM; f() { f & f & sleep 1000; }; f & exec sleep 1000", pids);
        let id = rig.running(&sandbox, &bomb).await;
        let begun = Instant::now();
        while forks(&id) < 100 {
            assert!(begun.elapsed() < LIMIT, "{} processes only", forks(&id));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        rig.stop_container(&id, 1).await.expect("stops");
        assert_eq!(rig.status(&id).await.exit_code, 137);
        rig.remove_all("a bomb").await;
        rig.nothing_left(if pids == Pids::Node { "a bomb" } else { "a bomb of its own" }).await;
    }
    rig.no_leaks();
}

/// Number of processes of a container.
fn forks(id: &str) -> usize {
    let groups = test_machine::directories(&format!("{}/{id}", test_machine::parent()));
    let counts = groups.iter().map(|group| fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default());
    counts.map(|text| text.lines().count()).max().unwrap_or_default()
}

async fn who_ignores_the_signal_is_killed(rig: Fixture) {
    let sandbox = rig.run(&pod(&rig, "i", Pids::Container)).await.expect("runs");
    let id =
        rig.running(&sandbox, &container("c", "trap '' TERM; while :; do sleep 0.05; done", Pids::Container)).await;
    let begun = Instant::now();
    rig.stop_container(&id, 1).await.expect("stops");
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(1) && took < LIMIT, "{took:?}");
    let status = rig.status(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "Error"));
    rig.remove_all("ignores").await;
}

async fn a_full_disk_loses_log_lines_and_blocks_nothing(rig: Fixture) {
    let logs = rig.place.join("logs");
    fs::create_dir_all(&logs).expect("a directory");
    mount(Some("logs"), &logs, Some("tmpfs"), MsFlags::empty(), Some("size=256k")).expect("a small disk");
    let sandbox = rig.run(&pod(&rig, "f", Pids::Container)).await.expect("runs");
    let fills =
        "i=0; while [ $i -lt 20000 ]; do echo 0123456789012345678901234567890123456789 $i; i=$((i+1)); done; exit 7";
    let id = rig.running(&sandbox, &container("c", fills, Pids::Container)).await;
    let status = rig.exited(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));
    let log = fs::read_to_string(&status.log_path).expect("a log");
    let count = log.lines().count();
    assert!((100..20_000).contains(&count), "{count} lines");
    assert!(log.lines().take(100).all(|line| line.contains(" stdout F 0123456789")), "whole lines");
    rig.remove_all("full").await;
    nix::mount::umount2(&logs, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
}

fn privileged(config: ContainerConfig) -> ContainerConfig {
    let options = NamespaceOption { pid: NamespaceMode::Container.into(), ..NamespaceOption::default() };
    let context = LinuxContainerSecurityContext {
        privileged: true,
        namespace_options: Some(options),
        ..LinuxContainerSecurityContext::default()
    };
    let mut linux = config.linux.unwrap_or_default();
    linux.security_context = Some(context);
    ContainerConfig { linux: Some(linux), ..config }
}

async fn whatever_is_mounted_inside_stays_inside(mut rig: Fixture) {
    rig.take_inventory();
    let mounts = || fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let sandbox = rig.run(&pod(&rig, "m", Pids::Container)).await.expect("runs");
    let before = mounts();
    let all = "for m in $(cat /proc/mounts | sed 's/^[^ ]* //; s/ .*//')";
    let waits = "while :; do sleep 0.05; done";
    // Without CAP_SYS_ADMIN nothing is mounted, in the container neither.
    let script =
        format!("{all}; do mount -o remount,ro $m; mount -t tmpfs x $m; done; cat /proc/mounts | wc -l; {waits}");
    let id = rig.running(&sandbox, &container("plain", &script, Pids::Container)).await;
    let (out, code) = rig.exec(&id, "echo x > /tmp/x && mount -t tmpfs x /tmp 2>&1; echo $?").await.expect("runs");
    assert!(out.ends_with("1\n") && code == 0, "{out:?}");
    assert_eq!(mounts(), before);
    // With it, only the container's own mount namespace changes.
    let script = format!("{all}; do /bin/busybox mount -t tmpfs x $m; done; {waits}");
    let mut pod = pod(&rig, "p", Pids::Container);
    pod.port_mappings.clear();
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    context.expect("a context").privileged = true;
    let sandbox = rig.run(&pod).await.expect("runs");
    let before = mounts();
    let id = rig.running(&sandbox, &privileged(container("mighty", &script, Pids::Container))).await;
    // The mounts hide its own programs now.
    let _refused = rig.exec(&id, "true").await;
    assert_eq!(mounts(), before);
    rig.stop_container(&id, 1).await.expect("stops");
    rig.remove_all("mounts").await;
    rig.nothing_left("mounts").await;
    rig.no_leaks();
}

async fn containers_run_on_copies_where_there_are_no_overlays(rig: Fixture) {
    drop(rig);
    let mut rig = Fixture::with(|_| DaemonOptions { snapshotter: "copy", ..DaemonOptions::default() }).await;
    rig.take_inventory();
    let sandbox = rig.run(&pod(&rig, "c", Pids::Container)).await.expect("runs");
    for name in ["a", "b"] {
        let script = format!("echo {name} > /tmp/own; while :; do sleep 0.05; done");
        let id = rig.running(&sandbox, &container(name, &script, Pids::Container)).await;
        let command = "until cat /tmp/own; do sleep 0.05; done 2>/dev/null; grep -c overlay /proc/mounts";
        assert_eq!(rig.exec(&id, command).await.expect("runs").0, format!("{name}\n0\n"));
    }
    rig.kill();
    rig.restart().await;
    assert_eq!(rig.containers().await.iter().filter(|c| c.state == 1).count(), 2);
    rig.remove_all("copies").await;
    rig.nothing_left("copies").await;
    rig.no_leaks();
}
