//! Checkpoint of devices: damaged, of other writers, and on a full disk (spec 06c §1.8, 06 §4.1).

use std::{path::Path, sync::Arc, time::Duration};

use serde_json::json;

use berth_ports::PodDevices;
use berth_testkit::{
    device_plugin::{PluginMethod, SamplePlugin, healthy, on_node},
    port_fakes::MemoryFile,
};

use super::fixture::{Agent, EVER, GPU, Node, container, count, no_options, pod, pod_of};

/// Two pods as the kubelet writes them: entries and lists in random order, one device of two NUMA nodes.
const TWO_PODS: &str = concat!(
    r#"{"Data":{"PodDeviceEntries":[{"PodUID":"f2b1c7d4-7b0a-4f0e-8d39-6a8f2f1f9e22","ContainerName":"main","#,
    r#""ResourceName":"example.com/gpu","DeviceIDs":{"-1":["gpu1"]},"AllocResp":"Ch8KF0VYQU1QTEVfQ09NX0dQVV9ERVZJQ0"#,
    r#"VTEgRncHUxGhoKCS9kZXYvZ3B1MRIJL2Rldi9ncHUxGgJydw=="},{"PodUID":"0d8f6b3e-52c1-4c55-9a1e-3f6f2f6f0a11","#,
    r#""ContainerName":"train","ResourceName":"example.com/gpu","DeviceIDs":{"0":["gpu0"],"1":["gpu3"]},"AllocResp":"#,
    r#""CiQKF0VYQU1QTEVfQ09NX0dQVV9ERVZJQ0VTEglncHUzLGdwdTAaGgoJL2Rldi9ncHUzEgkvZGV2L2dwdTMaAnJ3GhoKCS9kZXYvZ3B1MBIJ"#,
    r#"L2Rldi9ncHUwGgJydw=="},{"PodUID":"0d8f6b3e-52c1-4c55-9a1e-3f6f2f6f0a11","ContainerName":"train","#,
    r#""ResourceName":"example.com/nic","DeviceIDs":{"0":["vf3"],"1":["vf3"]},"AllocResp":"KhUKE2V4YW1wbGUuY29tL25pYz"#,
    r#"12ZjM="}],"RegisteredDevices":{"example.com/gpu":["gpu2","gpu0","gpu3","gpu1"],"#,
    r#""example.com/nic":["vf3","vf1","vf2"]}},"Checksum":3422339894}"#,
);
const TRAIN: &str = "0d8f6b3e-52c1-4c55-9a1e-3f6f2f6f0a11";
const MAIN: &str = "f2b1c7d4-7b0a-4f0e-8d39-6a8f2f1f9e22";
const NIC: &str = "example.com/nic";
/// Admission error while the disk is full.
const DISK_FULL: &str = "failed to write checkpoint file: no storage space";

/// Assignments of [`TWO_PODS`].
fn two_pods() -> Vec<[String; 4]> {
    let train = |resource: &str, id: &str| [TRAIN, "train", resource, id].map(str::to_owned);
    let main = [MAIN, "main", GPU, "gpu1"].map(str::to_owned);
    vec![train(GPU, "gpu0"), train(GPU, "gpu3"), train(NIC, "vf3"), main]
}

/// Starts an agent with this content of the checkpoint, and returns what it has restored: assignments, and number of
/// resources.
async fn restored(content: &[u8]) -> (Vec<[String; 4]>, usize) {
    let node = Node::new();
    std::fs::write(node.checkpoint(), content).expect("written");
    let agent = node.start().await;
    assert!(agent.manager.has_checkpoint());
    let mut owners = agent.owners();
    owners.sort();
    let resources = agent.manager.capacity().borrow().len();
    agent.stop().await;
    (owners, resources)
}

/// A file with devices of the resource `example.com/res`.
fn file(entries: &str, registered: &str, checksum: u32) -> String {
    let registered = format!(r#"{{"example.com/res":{registered}}}"#);
    format!(r#"{{"Data":{{"PodDeviceEntries":{entries},"RegisteredDevices":{registered}}},"Checksum":{checksum}}}"#)
}

fn entry(by_node: &str, response: &str) -> String {
    let names = r#""PodUID":"pod1","ContainerName":"con1","ResourceName":"example.com/res""#;
    format!(r#"[{{{names},"DeviceIDs":{by_node},"AllocResp":{response}}}]"#)
}

#[tokio::test]
async fn a_truncated_or_damaged_checkpoint_starts_without_assignments() {
    // AC-06c-12
    let whole = TWO_PODS.as_bytes();
    assert_eq!(restored(whole).await, (two_pods(), 2));
    let nothing = (Vec::new(), 0);
    for length in [0, 1, 8, 100, whole.len() / 4, whole.len() / 2, whole.len() - 12, whole.len() - 2, whole.len() - 1] {
        assert_eq!(restored(&whole[..length]).await, nothing, "{length} bytes");
    }
    for (case, content) in [
        ("another ID", TWO_PODS.replace("gpu3", "gpu4")),
        ("another order than that of the checksum", TWO_PODS.replace(r#""gpu2","gpu0""#, r#""gpu0","gpu2""#)),
        ("a response that is not Base64", TWO_PODS.replace("CiQKF0VY", "CiQKF0V?")),
        ("zeros after a power failure", "\0".repeat(whole.len())),
        ("twice", format!("{TWO_PODS}{TWO_PODS}")),
    ] {
        assert_ne!(content, TWO_PODS, "{case}");
        assert_eq!(restored(content.as_bytes()).await, nothing, "{case}");
    }
}

#[tokio::test]
async fn a_damaged_checkpoint_is_replaced_by_the_next_write() {
    // AC-06c-12
    let node = Node::new();
    std::fs::write(node.checkpoint(), &TWO_PODS[..TWO_PODS.len() / 2]).expect("written");
    let (mut plugin, agent) = node.start_with_devices(vec![healthy("gpu0"), healthy("gpu1")]).await;
    let owner = pod("owner", 1);
    agent.admit(&owner, &[]).await.expect("devices are free");
    agent.stop().await;
    let agent = node.start().await;
    assert_eq!(agent.owners(), [["owner", "c", GPU, "gpu0"].map(str::to_owned)]);
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    agent.admit(&owner, &[]).await.expect("it keeps its device");
    assert_eq!(count(&plugin, PluginMethod::Allocate), 1);
    agent.stop().await;
}

#[tokio::test]
async fn unknown_fields_of_a_newer_version_are_ignored() {
    let newer = TWO_PODS
        .replace(r#"{"Data":{"#, r#"{"Version":2,"Data":{"Features":["x"],"#)
        .replace(r#","DeviceIDs""#, r#","Claims":[{"Name":"c"}],"DeviceIDs""#);
    assert_eq!(newer.matches("Claims").count(), 3);
    assert_eq!(restored(newer.as_bytes()).await, (two_pods(), 2));
    // A checksum over the new fields: it starts without assignments, but it starts.
    let entries = entry(r#"{"-1":["dev1"]}"#, r#"null,"Claims":null"#);
    let newer = file(&entries, r#"["dev1","dev2"]"#, 1_625_240_457);
    assert_eq!(restored(newer.as_bytes()).await, (Vec::new(), 0));
    let known = file(&entries, r#"["dev1","dev2"]"#, 3_084_563_155);
    assert_eq!(restored(known.as_bytes()).await.0.len(), 1);
}

#[tokio::test]
async fn checkpoints_of_the_kubelet_are_restored() {
    // AC-06c-13, and the verified contents of spec 06 §4.1.
    let two = r#"["dev1","dev2"]"#;
    for (entries, list, checksum, ids) in [
        ("null".to_owned(), two, 2_068_760_492_u32, vec![]),
        ("null".to_owned(), r#"["dev2","dev1"]"#, 3_014_933_578, vec![]),
        (entry(r#"{"-1":["dev1"]}"#, "null"), two, 3_084_563_155, vec!["dev1"]),
        (entry(r#"{"-1":["dev1"]}"#, r#""""#), two, 1_207_807_334, vec!["dev1"]),
        (entry(r#"{"0":["dev1","dev2"]}"#, r#""CgQKABIA""#), two, 3_054_300_064, vec!["dev1", "dev2"]),
    ] {
        let content = file(&entries, list, checksum);
        let expected: Vec<_> =
            ids.into_iter().map(|id| ["pod1", "con1", "example.com/res", id].map(str::to_owned)).collect();
        assert_eq!(restored(content.as_bytes()).await, (expected, 1), "{content}");
    }
}

/// Starts an agent, registers both plugins of [`TWO_PODS`], and waits for their devices.
async fn start_with_both(node: &Node, gpu: &mut SamplePlugin, nic: &mut SamplePlugin) -> Agent {
    let agent = node.start().await;
    for plugin in [gpu, nic] {
        agent.register(plugin).await;
    }
    agent.until_capacity(GPU, (4, 4)).await;
    agent.until_capacity(NIC, (3, 3)).await;
    agent
}

#[tokio::test]
async fn pods_of_the_kubelet_keep_their_devices_without_another_allocation() {
    // AC-06c-10
    let node = Node::new();
    std::fs::write(node.checkpoint(), TWO_PODS).expect("written");
    let (mut gpu, mut nic) = (node.plugin(GPU, no_options()), node.plugin(NIC, no_options()));
    gpu.set_devices(vec![on_node("gpu0", 0), healthy("gpu1"), healthy("gpu2"), on_node("gpu3", 1)]);
    nic.set_devices(vec![healthy("vf1"), healthy("vf2"), on_node("vf3", 0)]);
    let train = pod_of(TRAIN, json!({"containers": [container("train", &[(GPU, 2), (NIC, 1)])]}));
    let main = pod_of(MAIN, json!({"containers": [container("main", &[(GPU, 1)])]}));
    // The second start reads the file that the first one has written.
    for start in 1..=2 {
        let agent = start_with_both(&node, &mut gpu, &mut nic).await;
        assert_eq!(agent.owners(), two_pods(), "start {start}");
        for owner in [&train, &main] {
            agent.admit(owner, &[&train, &main]).await.expect("it keeps its devices");
        }
        assert_eq!((count(&gpu, PluginMethod::Allocate), count(&nic, PluginMethod::Allocate)), (0, 0));
        let options = agent.options(&train, "train").await.expect("allocated");
        assert_eq!(options.envs, [("EXAMPLE_COM_GPU_DEVICES".to_owned(), "gpu3,gpu0".to_owned())]);
        let paths: Vec<&str> = options.devices.iter().map(|device| device.host_path.as_str()).collect();
        assert_eq!(paths, ["/dev/gpu0", "/dev/gpu3"]);
        let cdi: Vec<&str> = options.cdi_devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(cdi, ["example.com/nic=vf3"]);
        agent.stop().await;
    }
    let written = std::fs::read_to_string(node.checkpoint()).expect("written");
    for sorted in [r#""example.com/gpu":["gpu0","gpu1","gpu2","gpu3"]"#, r#""example.com/nic":["vf1","vf2","vf3"]"#] {
        assert!(written.contains(sorted), "{written}");
    }
}

/// A node whose checkpoint is in memory, with a plugin of two devices.
async fn start_in_memory() -> (Node, SamplePlugin, Arc<MemoryFile>, Agent) {
    let (node, file) = (Node::new(), Arc::<MemoryFile>::default());
    let mut plugin = node.plugin(GPU, no_options());
    plugin.set_devices(vec![healthy("d1"), healthy("d2")]);
    let agent = node.start_with(file.clone(), EVER).await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (2, 2)).await;
    (node, plugin, file, agent)
}

#[tokio::test]
async fn a_full_disk_refuses_an_allocation_and_assigns_nothing() {
    let (_node, plugin, file, agent) = start_in_memory().await;
    let first = pod("first", 1);
    agent.admit(&first, &[]).await.expect("a device is free");
    file.refuse_writes(true);
    let second = pod("second", 1);
    assert_eq!(agent.admit(&second, &[&first]).await, Err(DISK_FULL.to_owned()));
    assert_eq!(agent.owners(), [["first", "c", GPU, "d1"].map(str::to_owned)], "other pods keep theirs");
    assert!(agent.devices.allocatable(second.uid()).is_empty());
    // Also when a container is created whose devices are missing.
    assert_eq!(agent.options(&second, "c").await, Err(DISK_FULL.to_owned()));
    assert_eq!(agent.ids(&second, "c"), [] as [String; 0]);
    // A pod that has its devices needs no write.
    agent.admit(&first, &[&first]).await.expect("it has its device");
    file.refuse_writes(false);
    agent.admit(&second, &[&first]).await.expect("the device is free");
    assert_eq!(agent.ids(&second, "c"), ["d2"]);
    assert_eq!(count(&plugin, PluginMethod::Allocate), 4);
    agent.stop().await;
}

#[tokio::test]
async fn devices_are_released_although_the_disk_is_full() {
    let (node, _plugin, file, agent) = start_in_memory().await;
    let (owner, other) = (pod("owner", 2), pod("other", 2));
    agent.admit(&owner, &[]).await.expect("devices are free");
    file.refuse_writes(true);
    agent.devices.release(owner.uid());
    assert!(agent.owners().is_empty());
    assert_eq!(agent.admit(&other, &[&owner]).await, Err(DISK_FULL.to_owned()), "only the write fails");
    file.refuse_writes(false);
    agent.admit(&other, &[&owner]).await.expect("the devices are free");
    agent.stop().await;

    let agent = node.start_with(file, Duration::ZERO).await;
    let expected = ["d1", "d2"].map(|id| ["other", "c", GPU, id].map(str::to_owned));
    assert_eq!(agent.owners(), expected);
    agent.stop().await;
}

/// The directory is mounted into plugins: what they put in the place of the checkpoint must not keep the agent down.
#[tokio::test]
async fn a_checkpoint_that_is_no_regular_file_or_has_grown_starts_without_assignments() {
    let place: [fn(&Path); 4] = [
        |path| std::os::unix::fs::symlink("/dev/zero", path).expect("a link"),
        |path| {
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).expect("a FIFO");
        },
        |path| std::fs::create_dir(path).expect("a directory"),
        |path| std::fs::File::create(path).and_then(|file| file.set_len(4 << 30)).expect("a sparse file"),
    ];
    for put in place {
        let node = Node::new();
        put(&node.checkpoint());
        let agent = node.start().await;
        assert!(agent.owners().is_empty() && agent.manager.has_checkpoint());
        agent.stop().await;
    }
}
