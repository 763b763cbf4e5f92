//! State files that do not fit: moved aside on request, unless a pod in them has containers or they are damaged.

use std::sync::Arc;

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::fixture::{
    CPU_FILE, GI, MEMORY_FILE, NONE_CPU, StateDirectory, machine_of, machine_with, pod, static_cpus, with_static_memory,
};
use crate::{
    placement::{PlacementManagerDeps, PlacementPolicies, PlacementSettings, renew_state_files},
    topology::{
        MachineTopology,
        machines::{machine_a, machine_b},
    },
};
use berth_metrics::Registry;
use berth_ports::{DiskStateFile, StateFile};
use berth_types::{ContainerId, PodUid};

/// Renews the files while the runtime has a container of each of these pods.
async fn renew(
    files: &StateDirectory,
    settings: &PlacementSettings,
    machine: MachineTopology,
    pods: &[&str],
) -> Result<(), String> {
    let policies = PlacementPolicies::new(settings, machine).expect("correct settings");
    let file = |name: &str| -> Arc<dyn StateFile> { Arc::new(DiskStateFile::new(files.path(name))) };
    let containers = pods.iter().map(|uid| (ContainerId::from(*uid), (PodUid::from(*uid), "c".to_owned())));
    let deps = PlacementManagerDeps {
        cpu_file: file(CPU_FILE),
        memory_file: file(MEMORY_FILE),
        containers: containers.collect(),
        registry: Registry::new(),
        tasks: TaskTracker::new(),
        shutdown: CancellationToken::new(),
    };
    renew_state_files(&policies, &deps).await
}

#[tokio::test]
async fn a_file_that_no_running_pod_needs_is_moved_aside() {
    let idle = r#"{"policyName":"static","defaultCpuSet":"0-7","checksum":14413152}"#;
    let pinned = r#"{"policyName":"static","defaultCpuSet":"0-3,5-7","entries":{"p":{"c":"4"}},"checksum":0}"#;
    let damaged = r#"{"policyName":"static","defaultCpuSet":"0-7","checksum":1}"#;
    for (case, settings, content, pods, is_moved) in [
        ("from none to static, with pods", static_cpus("1"), NONE_CPU, &["p"][..], true),
        ("from none to static", static_cpus("1"), NONE_CPU, &[], true),
        ("from static to none", PlacementSettings::default(), pinned, &["q"], true),
        ("from static to none, its pod runs", PlacementSettings::default(), pinned, &["q", "p"], false),
        ("a larger reservation", static_cpus("2"), pinned, &[], true),
        ("a larger reservation, its pod runs", static_cpus("2"), pinned, &["p"], false),
        ("it fits", static_cpus("1"), idle, &[], false),
        ("damaged", static_cpus("1"), damaged, &[], false),
        ("empty", static_cpus("1"), "", &[], false),
    ] {
        let files = StateDirectory::new();
        files.write(CPU_FILE, content);
        renew(&files, &settings, machine_of(machine_a()), pods).await.expect("readable");
        let aside = "cpu_manager_state.old";
        let remaining = if is_moved { aside } else { CPU_FILE };
        assert_eq!(files.files(), [remaining], "{case}");
        assert_eq!(files.read(remaining), content, "{case}");
        let started = files.try_start(&settings, machine_of(machine_a())).await;
        assert_eq!(started.is_ok(), is_moved || case == "it fits", "{case}");
        if let Ok(agent) = started {
            agent.stop().await;
        }
    }
}

#[tokio::test]
async fn memory_of_another_machine_is_kept_for_pods_that_run() {
    let settings = with_static_memory(PlacementSettings::default());
    let machine = |gib: u64| machine_with(machine_b(), &[gib * GI, gib * GI]);
    for (pods, is_moved) in [(&["p"][..], false), (&["q"], true)] {
        let files = StateDirectory::new();
        let agent = files.start(&settings, machine(4)).await;
        agent.admit(&pod("p", &["c=1/2Gi"])).expect("3 GiB are free on node 0");
        agent.stop().await;
        let before = files.read(MEMORY_FILE);
        renew(&files, &settings, machine(8), pods).await.expect("readable");
        let remaining = if is_moved { "memory_manager_state.old" } else { MEMORY_FILE };
        assert_eq!(files.files(), [CPU_FILE, remaining], "{pods:?}");
        assert_eq!(files.read(remaining), before, "{pods:?}");
        let started = files.try_start(&settings, machine(8)).await;
        assert_eq!(started.is_ok(), is_moved, "{pods:?}");
        if let Ok(agent) = started {
            agent.stop().await;
        }
    }
}

#[tokio::test]
async fn a_node_without_files_has_nothing_to_renew() {
    let files = StateDirectory::new();
    renew(&files, &static_cpus("1"), machine_of(machine_a()), &[]).await.expect("nothing to read");
    assert!(files.files().is_empty());
    std::fs::create_dir(files.path(CPU_FILE)).expect("a directory");
    let error = renew(&files, &static_cpus("1"), machine_of(machine_a()), &[]).await.expect_err("no file");
    assert!(error.starts_with(&format!("cannot read {}: ", files.path(CPU_FILE).display())), "{error}");
}
