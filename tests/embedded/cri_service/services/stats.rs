//! Statistics and metrics through the CRI services, with fake ports. Spec 09a §5.

use super::*;

fn value(number: Option<cri::UInt64Value>) -> Option<u64> {
    number.map(|number| number.value)
}

impl Fixture {
    async fn stats(&self, id: &str) -> Result<cri::ContainerStats, Status> {
        let request = cri::ContainerStatsRequest { container_id: id.to_owned() };
        self.rpc.clone().container_stats(request).await.map(|reply| reply.into_inner().stats.expect("stats"))
    }

    async fn all_stats(&self, filter: Option<cri::ContainerStatsFilter>) -> Vec<String> {
        let request = cri::ListContainerStatsRequest { filter };
        let reply = self.rpc.clone().list_container_stats(request).await.expect("received").into_inner().stats;
        reply.into_iter().map(|stats| stats.attributes.expect("attributes").id).collect()
    }

    async fn pod_stats(&self, id: &str) -> Result<cri::PodSandboxStats, Status> {
        let request = cri::PodSandboxStatsRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().pod_sandbox_stats(request).await.map(|reply| reply.into_inner().stats.expect("stats"))
    }
}

#[tokio::test]
async fn container_stats_have_usage_and_written_bytes() {
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let (runs, made) = (
        set.create(&sandbox, container("runs")).await.expect("made"),
        set.create(&sandbox, container("made")).await.expect("made"),
    );
    set.start(&runs).await.expect("starts");
    let stats = set.stats(&runs[..13]).await.expect("received");
    let attributes = stats.attributes.expect("attributes");
    assert_eq!((attributes.id, attributes.metadata.expect("metadata").name.as_str()), (runs.clone(), "runs"));
    let (cpu, memory) = (stats.cpu.expect("cpu"), stats.memory.expect("memory"));
    assert!(cpu.timestamp != 0 && memory.timestamp != 0);
    assert_eq!((value(cpu.usage_core_nano_seconds), cpu.usage_nano_cores), (Some(2_000_000_000), None));
    assert_eq!((value(memory.working_set_bytes), memory.available_bytes), (Some(70), None));
    let written = stats.writable_layer.expect("counted");
    assert_eq!((value(written.used_bytes), value(written.inodes_used)), (Some(4096), Some(3)));
    let place = set.runtime.shell.layout.snapshots().display().to_string();
    assert_eq!(written.fs_id.map(|fs| fs.mountpoint), Some(place));
    // A container that does not run has no usage.
    let stats = set.stats(&made).await.expect("received");
    assert_eq!((stats.cpu, stats.memory, stats.swap), (None, None, None));
    assert!(stats.attributes.is_some() && stats.writable_layer.is_some());
    assert_eq!(set.stats("0000").await.expect_err("unknown").code(), Code::NotFound);
    let filter = |id: &str, sandbox: &str| {
        let (id, pod_sandbox_id) = (id.to_owned(), sandbox.to_owned());
        Some(cri::ContainerStatsFilter { id, pod_sandbox_id, ..Default::default() })
    };
    assert_eq!(set.all_stats(None).await, [made.clone(), runs.clone()], "newest first");
    assert_eq!(set.all_stats(filter(&runs[..13], "")).await, std::slice::from_ref(&runs));
    assert_eq!(set.all_stats(filter("", &sandbox[..13])).await.len(), 2);
    assert_eq!(set.all_stats(filter("0000", "")).await, Vec::<String>::new());
    let mut labelled = filter("", "").expect("a filter");
    labelled.label_selector = [("foo".to_owned(), "baz".to_owned())].into();
    assert_eq!(set.all_stats(Some(labelled)).await, Vec::<String>::new());
    let request = cri::StreamContainerStatsRequest { filter: None };
    let stream = set.rpc.clone().stream_container_stats(request).await.expect("received").into_inner();
    let chunks: Vec<_> = stream.map(|chunk| chunk.expect("whole").container_stats.len()).collect().await;
    assert_eq!(chunks, [2]);
}

#[tokio::test]
async fn pods_have_stats_while_they_are_ready() {
    let set = set().await;
    let mut config = pod("a");
    config.linux.as_mut().expect("there").cgroup_parent = "/pods".to_owned();
    let (own, shared) = (set.run(config).await.expect("runs"), set.run(pod("b")).await.expect("runs"));
    for sandbox in [&own, &shared] {
        for name in ["c", "d"] {
            let id = set.create(sandbox, container(name)).await.expect("made");
            set.start(&id).await.expect("starts");
        }
    }
    let stats = set.pod_stats(&own[..13]).await.expect("received");
    let attributes = stats.attributes.expect("attributes");
    assert_eq!((attributes.id, attributes.labels["app"].as_str()), (own.clone(), "a"));
    let linux = stats.linux.expect("of Linux");
    let usage =
        |linux: &cri::LinuxPodSandboxStats| value(linux.cpu.as_ref().and_then(|cpu| cpu.usage_core_nano_seconds));
    assert_eq!((usage(&linux), linux.containers.len()), (Some(2_000_000_000), 2), "that of its group");
    assert_eq!(value(linux.process.and_then(|process| process.process_count)), Some(4));
    assert_eq!(linux.network, None, "there is no such namespace");
    let linux = set.pod_stats(&shared).await.expect("received").linux.expect("of Linux");
    assert_eq!(usage(&linux), Some(6_000_000_000), "its own and its containers', for others share the group above");
    set.stop_pod(&shared).await.expect("stops");
    assert_eq!(set.pod_stats(&shared).await.expect_err("not ready").code(), Code::Unavailable);
    assert_eq!(set.pod_stats("0000").await.expect_err("unknown").code(), Code::NotFound);
    let request = cri::ListPodSandboxStatsRequest { filter: None };
    let listed = set.rpc.clone().list_pod_sandbox_stats(request).await.expect("received").into_inner().stats;
    let ids: Vec<_> = listed.into_iter().filter_map(|stats| stats.attributes).map(|attributes| attributes.id).collect();
    assert_eq!(ids, std::slice::from_ref(&own));
    let metrics = set.rpc.clone().list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest {}).await;
    let metrics = metrics.expect("received").into_inner().pod_metrics;
    assert_eq!((metrics.len(), metrics[0].pod_sandbox_id.as_str(), metrics[0].container_metrics.len()), (1, &*own, 2));
    let one = &metrics[0].container_metrics[0].metrics;
    let usage = one.iter().find(|metric| metric.name == "container_cpu_usage_seconds_total").expect("received");
    assert_eq!((value(usage.value), usage.label_values.len()), (Some(2), 7));
    assert_eq!((usage.label_values[5].as_str(), usage.label_values[6].as_str()), ("a", "total"));
}
