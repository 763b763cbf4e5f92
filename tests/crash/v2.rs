//! Tests on a cgroup v2 machine: limits, devices, group kill, OOM. Behavior: spec 09a §9, §11, §12.

use std::{collections::HashMap, fs, path::PathBuf};

use berth_proto::cri::{
    ContainerConfig, ContainerState, LinuxContainerResources, NamespaceMode, UpdateContainerResourcesRequest,
};

use crate::{
    fixture::{Fixture, Pids, container, pod},
    steps, test_machine, tests,
};

tests! {
    limits_devices_and_executed_processes
    a_group_is_killed_at_once
    a_kill_for_want_of_memory_takes_the_group
    what_is_killed_leaves_nothing_behind
}

const WAITS: &str = "trap 'exit 3' TERM; while :; do sleep 0.1; done";
const MEBI: i64 = 1 << 20;

fn limited(config: ContainerConfig, resources: LinuxContainerResources) -> ContainerConfig {
    let mut linux = config.linux.clone().unwrap_or_default();
    linux.resources = Some(resources);
    ContainerConfig { linux: Some(linux), ..config }
}

fn unified(files: &[(&str, &str)]) -> HashMap<String, String> {
    files.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
}

fn group(id: &str) -> PathBuf {
    PathBuf::from("/sys/fs/cgroup").join(test_machine::parent().trim_start_matches('/')).join(id)
}

fn file(id: &str, name: &str) -> String {
    fs::read_to_string(group(id).join(name)).unwrap_or_else(|e| panic!("{name}: {e}")).trim().to_owned()
}

fn files(id: &str, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("{name}={}", file(id, name))).collect()
}

async fn limits_devices_and_executed_processes(rig: Fixture) {
    let sandbox = rig.run(&pod(&rig, "l", Pids::Container)).await.expect("runs");
    let resources = LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 50_000,
        cpu_shares: 512,
        memory_limit_in_bytes: 64 * MEBI,
        unified: unified(&[("pids.max", "32"), ("memory.oom.group", "1")]),
        ..Default::default()
    };
    // Not WAITS: a shell that cannot start its next `sleep` exits, and its cgroup is removed.
    let id = rig.running(&sandbox, &limited(container("c", "exec sleep 1000", Pids::Container), resources)).await;
    let names = ["cpu.max", "cpu.weight", "memory.max", "memory.swap.max", "pids.max", "memory.oom.group"];
    let expected = [
        "cpu.max=50000 100000",
        "cpu.weight=59",
        "memory.max=67108864",
        "memory.swap.max=0",
        "pids.max=32",
        "memory.oom.group=1",
    ];
    assert_eq!(files(&id, &names), expected);
    // The sandbox's own processes have the smallest CPU weight and no memory limit.
    assert_eq!(files(&sandbox, &["cpu.weight", "memory.max"]), ["cpu.weight=1", "memory.max=max"]);
    let (out, code) =
        rig.exec(&id, "cat /proc/self/cgroup /proc/1/cgroup; cat /sys/fs/cgroup/memory.max").await.expect("runs");
    assert_eq!((out.as_str(), code), ("0::/\n0::/\n67108864\n", 0), "an executed process is in the group");
    let devices = "echo x > /dev/null && head -c 1 /dev/zero | wc -c; mknod /tmp/d b 7 0; cat /tmp/d; echo $?";
    let (out, _) = rig.exec(&id, &format!("({devices}) 2>&1")).await.expect("runs");
    assert_eq!(out, "1\ncat: can't open '/tmp/d': Operation not permitted\n1\n");
    // AC-09a-X18, on a running container
    let update = LinuxContainerResources {
        cpu_quota: 25_000,
        memory_limit_in_bytes: 96 * MEBI,
        unified: unified(&[("pids.max", "16")]),
        ..Default::default()
    };
    let request = UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: Some(update),
        ..UpdateContainerResourcesRequest::default()
    };
    rig.rpc.clone().update_container_resources(request).await.expect("updated");
    assert_eq!(
        files(&id, &["cpu.max", "cpu.weight", "memory.max", "pids.max"]),
        ["cpu.max=25000 100000", "cpu.weight=59", "memory.max=100663296", "pids.max=16"]
    );
    let status = rig.status(&id).await.resources.and_then(|r| r.linux).expect("received");
    assert_eq!((status.cpu_quota, status.cpu_period, status.memory_limit_in_bytes), (25_000, 100_000, 96 * MEBI));
    let bomb = "i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done";
    let _refused = rig.exec(&id, bomb).await;
    let count: u32 = file(&id, "pids.current").parse().expect("a number");
    assert!((4..=16).contains(&count), "{count}");
    rig.remove_all("limits").await;
    assert!(!group(&id).exists() && !group(&sandbox).exists());
}

async fn a_group_is_killed_at_once(mut rig: Fixture) {
    rig.take_inventory();
    let pids = NamespaceMode::Node;
    let sandbox = rig.run(&pod(&rig, "k", pids)).await.expect("runs");
    // AC-09a-X15: without a PID namespace of its own, leftover processes live on unless their cgroup is killed.
    let leaver = container("leaver", "setsid sleep 1000 & (sleep 1000 & sleep 1000) & sleep 0.3; exit 4", pids);
    let id = rig.running(&sandbox, &leaver).await;
    assert_eq!(rig.exited(&id).await.exit_code, 4);
    let bomb = "f() { f & f & sleep 1000; }; trap '' TERM; f";
    let resources = LinuxContainerResources { unified: unified(&[("pids.max", "200")]), ..Default::default() };
    let id = rig.running(&sandbox, &limited(container("bomb", bomb, pids), resources)).await;
    rig.stop_container(&id, 1).await.expect("stops");
    assert_eq!(rig.status(&id).await.exit_code, 137);
    rig.remove_all("bomb").await;
    rig.nothing_left("bomb").await;
    rig.no_leaks();
}

async fn a_kill_for_want_of_memory_takes_the_group(rig: Fixture) {
    let sandbox = rig.run(&pod(&rig, "m", Pids::Container)).await.expect("runs");
    let eats = "tail /dev/zero";
    for (name, script, takes_all, expected) in [
        ("all", format!("{eats} & while :; do sleep 0.1; done"), "1", (137, "OOMKilled")),
        ("child", format!("{eats}; exit $?"), "0", (137, "OOMKilled")),
        ("copes", format!("{eats}; exit 0"), "0", (0, "Completed")),
    ] {
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: 24 * MEBI,
            unified: unified(&[("memory.oom.group", takes_all)]),
            ..Default::default()
        };
        let id = rig.running(&sandbox, &limited(container(name, &script, Pids::Container), resources)).await;
        let status = rig.exited(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), expected, "{name}");
    }
    rig.remove_all("memory").await;
}

async fn what_is_killed_leaves_nothing_behind(mut rig: Fixture) {
    steps::kill_at_each(&mut rig, &["run.shim", "start.launched", "remove.group"], steps::Aftermath::Retried).await;
    let sandbox = rig.run(&pod(&rig, "s", Pids::Container)).await.expect("runs");
    let id = rig.create(&sandbox, &container("c", WAITS, Pids::Container)).await.expect("made");
    rig.arm("shim.started", "kill");
    let _lost = rig.start_container(&id).await;
    // AC-09-E3
    rig.until_not_ready(&sandbox).await;
    let status = rig.exited(&id).await;
    assert!([128, 255].contains(&status.exit_code), "{status:?}");
    assert_eq!(status.state(), ContainerState::ContainerExited);
    rig.remove_all("a shim").await;
    rig.nothing_left("a shim").await;
    rig.no_leaks();
}
