//! State files at the start: fresh, restored, damaged, of another policy, or of another machine.

use super::fixture::{
    CPU_FILE, FakeNode, GI, MEMORY_FILE, NONE_CPU, NONE_MEMORY, StateDirectory, machine_of, machine_with, pod,
    static_cpus, with_option, with_static_memory,
};
use crate::{
    placement::PlacementSettings,
    topology::{
        MachineTopology,
        machines::{machine, machine_a, machine_b},
    },
};
use berth_ports::{ContainerPlacement, ContainerPlacements};

/// Starts with these contents, which must fail and leave the files as they are.
async fn refused(
    settings: &PlacementSettings,
    machine: MachineTopology,
    contents: &[(&str, &str)],
) -> (StateDirectory, String) {
    let files = StateDirectory::new();
    for (file, content) in contents {
        files.write(file, content);
    }
    let error = files.try_start(settings, machine).await.err().expect("the start fails");
    let mut names: Vec<String> = contents.iter().map(|(file, _)| (*file).to_owned()).collect();
    names.sort();
    assert_eq!(files.files(), names, "{error}");
    for (file, content) in contents {
        assert_eq!(files.read(file), *content, "{error}");
    }
    (files, error)
}

#[tokio::test]
async fn a_fresh_node_gets_the_files_of_the_reference() {
    let static_32 = r#"{"policyName":"static","defaultCpuSet":"0-31","checksum":3540042759}"#;
    for (settings, expected, shared) in [
        // AC-06-4
        (PlacementSettings::default(), NONE_CPU, ""),
        // AC-06-6
        (static_cpus("1"), static_32, "0-31"),
    ] {
        let files = StateDirectory::new();
        // The second start reads the files of the first.
        for _ in 0..2 {
            let agent = files.start(&settings, machine_of(machine(1, 1, 16, 2))).await;
            // AC-06-7
            assert_eq!((files.read(CPU_FILE).as_str(), files.read(MEMORY_FILE).as_str()), (expected, NONE_MEMORY));
            assert_eq!(agent.cpus(&pod("p", &["c=500m"]), "c"), shared);
            agent.stop().await;
        }
        assert_eq!(files.files(), [CPU_FILE, MEMORY_FILE]);
    }
}

#[tokio::test]
async fn without_policies_containers_are_unrestricted() {
    let files = StateDirectory::new();
    let agent = files.start(&PlacementSettings::default(), machine_of(machine_a())).await;
    let pinned = pod("p", &["c=2"]);
    agent.admit(&pinned).expect("nothing to allocate");
    let placement = agent.manager.prepare(pinned.uid(), "c").await;
    assert_eq!(placement, Ok(ContainerPlacement::default()));
    assert_eq!((agent.shared().as_str(), files.read(CPU_FILE).as_str()), ("0-7", NONE_CPU));
    assert!(agent.manager.allocatable().cpus.is_empty());
    agent.stop().await;
}

#[tokio::test]
async fn strictly_reserved_cpus_are_not_in_the_file() {
    // AC-06b-15
    let files = StateDirectory::new();
    let settings = with_option(static_cpus("1"), "strict-cpu-reservation");
    for _ in 0..2 {
        let agent = files.start(&settings, machine_of(machine_a())).await;
        assert!(files.read(CPU_FILE).starts_with(r#"{"policyName":"static","defaultCpuSet":"1-7","checksum":"#));
        assert_eq!(agent.cpus(&pod("best-effort", &["c=0"]), "c"), "1-7");
        agent.stop().await;
    }
    let error = files.try_start(&static_cpus("1"), machine_of(machine_a())).await.err().expect("another option");
    assert!(error.ends_with(r#"not all reserved cpus: "0" are present in defaultCpuSet: "1-7""#), "{error}");
}

#[tokio::test]
async fn cpu_files_that_cannot_be_restored_stop_the_start() {
    let half = NONE_CPU.trim_end_matches(r#":1353318690}"#);
    let old = r#"{"policyName":"static","defaultCpuSet":"0","entries":{"id":"1-7"},"checksum":0}"#;
    for (settings, content, expected) in [
        // AC-06-5
        (
            PlacementSettings::default(),
            r#"{"policyName":"none","defaultCpuSet":"","checksum":1}"#,
            "checkpoint is corrupted, please drain",
        ),
        (
            static_cpus("1"),
            r#"{"policyName":"static","defaultCpuSet":"0-7","checksum":14413153}"#,
            "checkpoint is corrupted, please drain",
        ),
        (
            static_cpus("1"),
            NONE_CPU,
            r#"configured policy "static" differs from state checkpoint policy "none", please drain"#,
        ),
        // AC-06b-16
        (
            PlacementSettings::default(),
            r#"{"policyName":"static","defaultCpuSet":"0-7","checksum":14413152}"#,
            r#"configured policy "none" differs from state checkpoint policy "static", please drain"#,
        ),
        (
            static_cpus("1"),
            r#"{"policyName":"static","defaultCpuSet":"x","checksum":0}"#,
            r#"could not parse default cpu set "x": "#,
        ),
        (
            static_cpus("1"),
            r#"{"policyName":"static","defaultCpuSet":"0","entries":{"p":{"c":"1-"}},"checksum":0}"#,
            r#"could not parse cpuset "1-" for container "c" in pod "p": "#,
        ),
        // Entries of the oldest format name containers that the runtime does not know.
        (static_cpus("1"), old, "containerID 'id' not found in initial containers list"),
        (static_cpus("1"), "", "cannot be decoded: "),
        (PlacementSettings::default(), half, "cannot be decoded: "),
        (PlacementSettings::default(), "[]", "cannot be decoded: "),
    ] {
        let (files, error) = refused(&settings, machine_of(machine_a()), &[(CPU_FILE, content)]).await;
        let start = "start cpu manager error: could not restore state from checkpoint: ";
        let end = format!(
            ", please drain this node and delete the CPU manager checkpoint file \"{}\" before restarting Kubelet",
            files.path(CPU_FILE).display()
        );
        assert!(error.starts_with(start) && error.ends_with(&end) && error.contains(expected), "{content}: {error}");
    }
}

#[tokio::test]
async fn cpu_files_of_another_machine_or_reservation_stop_the_start() {
    for (reserved, machine, content, expected) in [
        // AC-06b-14
        (
            "2",
            machine_b(),
            r#"{"policyName":"static","defaultCpuSet":"0-1","checksum":0}"#,
            r#"not all reserved cpus: "0,6" are present in defaultCpuSet: "0-1""#,
        ),
        // CPUs that this machine does not have, or that were offline.
        (
            "1",
            machine_a(),
            r#"{"policyName":"static","defaultCpuSet":"0-7","entries":{"p":{"c":"8"}},"checksum":0}"#,
            r#"current set of available CPUs "0-7" doesn't match with CPUs in state "0-8""#,
        ),
        (
            "1",
            machine_a(),
            r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":611748604}"#,
            r#"current set of available CPUs "0-7" doesn't match with CPUs in state "0-3""#,
        ),
        // The reservation has grown.
        (
            "2",
            machine_a(),
            r#"{"policyName":"static","defaultCpuSet":"0-3,5-7","entries":{"p":{"c":"4"}},"checksum":0}"#,
            r#"not all reserved cpus: "0,4" are present in defaultCpuSet: "0-3,5-7""#,
        ),
        (
            "1",
            machine_a(),
            r#"{"policyName":"static","defaultCpuSet":"0-7","entries":{"p":{"c":"4"}},"checksum":0}"#,
            r#"pod: p, container: c cpuset: "4" overlaps with default cpuset "0-7""#,
        ),
        (
            "1",
            machine_a(),
            r#"{"policyName":"static","defaultCpuSet":"","entries":{"p":{"c":"0-7"}},"checksum":0}"#,
            "default cpuset cannot be empty",
        ),
    ] {
        let (_, error) = refused(&static_cpus(reserved), machine_of(machine), &[(CPU_FILE, content)]).await;
        let start = "start cpu manager error: static policy invalid state, please drain node and remove policy state \
                     file: ";
        assert_eq!(error, format!("{start}{expected}"));
    }
}

#[tokio::test]
async fn memory_files_that_cannot_be_restored_stop_the_start() {
    let settings = with_static_memory(PlacementSettings::default());
    for (settings, content, expected) in [
        (
            settings.clone(),
            r#"{"policyName":"Static","machineState":{},"checksum":1}"#,
            "checkpoint is corrupted, please drain",
        ),
        (
            settings.clone(),
            NONE_MEMORY,
            r#"[memorymanager] configured policy "Static" differs from state checkpoint policy "None", please drain"#,
        ),
        (
            PlacementSettings::default(),
            r#"{"policyName":"Static","machineState":{},"checksum":0}"#,
            r#"[memorymanager] configured policy "None" differs from state checkpoint policy "Static", please drain"#,
        ),
        (settings.clone(), "", "cannot be decoded: "),
        (PlacementSettings::default(), NONE_MEMORY.trim_end_matches('}'), "cannot be decoded: "),
    ] {
        // The CPU manager's file is read before: its content is not changed either.
        let contents = [(CPU_FILE, NONE_CPU), (MEMORY_FILE, content)];
        let (files, error) = refused(&settings, machine_of(machine_b()), &contents).await;
        let start = "start memory manager error: could not restore state from checkpoint: ";
        let end = format!(
            ", please drain this node and delete the memory manager checkpoint file \"{}\" before restarting Kubelet",
            files.path(MEMORY_FILE).display()
        );
        assert!(error.starts_with(start) && error.ends_with(&end) && error.contains(expected), "{content}: {error}");
    }
}

#[tokio::test]
async fn other_memory_stops_the_start_only_if_containers_have_some() {
    let (files, settings) = (StateDirectory::new(), with_static_memory(PlacementSettings::default()));
    let machine = |gib: u64| machine_with(machine_b(), &[gib * GI, gib * GI]);
    files.start(&settings, machine(8)).await.stop().await;
    let agent = files.start(&settings, machine(4)).await;
    agent.admit(&pod("p", &["c=1/2Gi"])).expect("3 GiB are free on node 0");
    agent.stop().await;
    let error = files.try_start(&settings, machine(8)).await.err().expect("another machine");
    assert_eq!(
        error,
        "start memory manager error: [memorymanager] the expected machine state is different from the real one"
    );
    let agent = files.start(&settings, machine(4)).await;
    assert_eq!(agent.manager.memory(&"p".into(), "c").len(), 1);
    agent.stop().await;
}

#[tokio::test]
async fn files_that_cannot_be_read_or_written_stop_the_start() {
    let files = StateDirectory::new();
    std::fs::create_dir(files.path(CPU_FILE)).expect("a directory");
    let error = files.try_start(&PlacementSettings::default(), machine_of(machine_a())).await.err().expect("no file");
    let expected = format!("start cpu manager error: cannot read {}: ", files.path(CPU_FILE).display());
    assert!(error.starts_with(&expected), "{error}");

    let files = StateDirectory::new();
    std::fs::create_dir(files.path(MEMORY_FILE)).expect("a directory");
    let error = files.try_start(&PlacementSettings::default(), machine_of(machine_a())).await.err().expect("no file");
    assert!(error.starts_with("start memory manager error: cannot read "), "{error}");
    assert_eq!(files.files(), [MEMORY_FILE], "the CPU manager has written nothing");
}

/// Nobody admits such a pod again: the first set of active pods releases it.
#[tokio::test(start_paused = true)]
async fn entries_of_pods_that_are_gone_are_released_once_the_sources_are_ready() {
    let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
    let entries = r#""entries":{"gone":{"c":"1,5"},"stays":{"c":"2,6"}}"#;
    files.write(CPU_FILE, &format!(r#"{{"policyName":"static","defaultCpuSet":"0,3-4,7",{entries},"checksum":0}}"#));
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    let changed = agent.reconcile(&node);
    node.lose_sources();
    agent.next_pass().await;
    agent.next_pass().await;
    assert_eq!(agent.shared(), "0,3-4,7");
    let stays = pod("stays", &["c=2"]);
    node.activate(&[&stays]);
    changed.send(()).expect("the reconciler runs");
    agent.next_pass().await;
    assert_eq!((agent.shared().as_str(), agent.cpus(&stays, "c").as_str()), ("0-1,3-5,7", "2,6"));
    agent.stop().await;
    assert!(!files.read(CPU_FILE).contains("gone"));
}

/// Memory that the reference kubelet has assigned.
#[tokio::test]
async fn a_memory_file_of_the_reference_is_restored_and_written_unchanged() {
    let files = StateDirectory::new();
    let uid = "681eca58-a216-4ec4-a57b-941cad3c4e0f";
    let node = |sizes: [u64; 5]| {
        let names = ["total", "systemReserved", "allocatable", "reserved", "free"];
        let sizes: Vec<String> =
            names.iter().zip(sizes).map(|(name, gib)| format!(r#""{name}":{}"#, gib * GI)).collect();
        let memory = format!(r#""memory":{{{}}}"#, sizes.join(","));
        format!(r#"{{"numberOfAssignments":1,"memoryMap":{{{memory}}},"cells":[0,1]}}"#)
    };
    let nodes = format!(r#""0":{},"1":{}"#, node([5, 1, 4, 4, 0]), node([4, 0, 4, 2, 2]));
    let block = format!(r#"[{{"numaAffinity":[0,1],"type":"memory","size":{}}}]"#, 6 * GI);
    let entries = format!(r#""{uid}":{{"main":{block}}}"#);
    let state = format!(r#""policyName":"Static","machineState":{{{nodes}}},"entries":{{{entries}}}"#);
    let content = format!(r#"{{{state},"checksum":713994004}}"#);
    files.write(MEMORY_FILE, &content);
    let machine = machine_with(machine_b(), &[5 * GI, 4 * GI]);
    let agent = files.start(&with_static_memory(PlacementSettings::default()), machine).await;
    let owner = pod(uid, &["main=1/6Gi"]);
    agent.admit(&owner).expect("it has its memory");
    assert_eq!(agent.manager.placement(owner.uid(), "main").memory_nodes, "0,1");
    agent.stop().await;
    assert_eq!(files.read(MEMORY_FILE), content);
}

/// A file that the reference kubelet has written.
#[tokio::test]
async fn a_file_of_the_reference_is_restored_and_written_unchanged() {
    let files = StateDirectory::new();
    let (first, second) = ("681eca58-a216-4ec4-a57b-941cad3c4e0f", "088fe178-cec9-4eb9-ba3c-cf45cba46371");
    let entries = format!(r#"{{"{second}":{{"qos-demo-ctr":"1,9"}},"{first}":{{"qos-demo-ctr":"2-3,10-11"}}}}"#);
    let pool = r#""policyName":"static","defaultCpuSet":"0,4-8,12-15""#;
    let content = format!(r#"{{{pool},"entries":{entries},"checksum":2993692383}}"#);
    files.write(CPU_FILE, &content);
    files.write(MEMORY_FILE, NONE_MEMORY);
    let agent = files.start(&static_cpus("1"), machine_of(machine(1, 1, 8, 2))).await;
    let pods = [(first, "2-3,10-11", "4"), (second, "1,9", "2")];
    for (uid, expected, count) in pods {
        let container = format!("qos-demo-ctr={count}");
        let pod = pod(uid, &[container.as_str()]);
        agent.admit(&pod).expect("it has its CPUs");
        assert_eq!(agent.cpus(&pod, "qos-demo-ctr"), expected);
        assert!(agent.manager.placement(pod.uid(), "qos-demo-ctr").has_exclusive_cpus);
    }
    assert_eq!(agent.shared(), "0,4-8,12-15");
    agent.stop().await;
    assert_eq!((files.read(CPU_FILE), files.read(MEMORY_FILE)), (content, NONE_MEMORY.to_owned()));
}
