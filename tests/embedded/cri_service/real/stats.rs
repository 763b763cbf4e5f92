//! CRI statistics of real containers. Spec 09a §5, 09 §11.3.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use berth_proto::cri;

use super::network::with_network;
use berth_testkit::embedded::{
    fixture::in_network_namespace,
    in_process::{Daemon, container, daemon, pod},
};

/// Metrics that critest treats as optional: a kernel, or a machine without disk quotas, may not provide them.
const OPTIONAL: [&str; 5] = [
    "container_blkio_device_usage_total",
    "container_fs_reads_bytes_total",
    "container_fs_reads_total",
    "container_fs_writes_bytes_total",
    "container_fs_writes_total",
];

fn value(number: Option<cri::UInt64Value>) -> u64 {
    number.expect("known").value
}

#[test]
fn container_usage_is_reported() {
    in_network_namespace("container_usage_is_reported", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(with_network(pod(place.path(), "a"))).await;
        let mut config = container("c", "while :; do :; done");
        config.linux.as_mut().expect("there").resources = Some(cri::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 20_000,
            cpu_shares: 1024,
            memory_limit_in_bytes: 64 << 20,
            memory_swap_limit_in_bytes: 64 << 20,
            ..Default::default()
        });
        let id = daemon.start(&sandbox, config).await;
        let (_, code) = daemon.exec(&id, "head -c 3000000 /dev/zero > /written; ping -c 1 -w 1 10.87.0.1; sync").await;
        assert_eq!(code, 0);
        let stats = async || {
            let request = cri::ContainerStatsRequest { container_id: id.clone() };
            daemon
                .calls
                .rpc
                .clone()
                .container_stats(request)
                .await
                .expect("received")
                .into_inner()
                .stats
                .expect("stats")
        };
        let (first, begun) = (stats().await, Instant::now());
        let (cpu, memory) = (first.cpu.expect("known"), first.memory.expect("known"));
        assert!(value(cpu.usage_core_nano_seconds) > 0 && cpu.usage_nano_cores.is_none(), "{cpu:?}");
        assert!((1..64 << 20).contains(&value(memory.working_set_bytes)), "{memory:?}");
        assert_eq!(value(memory.available_bytes) + value(memory.working_set_bytes), 64 << 20);
        assert!(value(memory.rss_bytes) > 0 && value(memory.page_faults) > 0);
        let written = first.writable_layer.expect("counted");
        assert!((3_000_000..4_000_000).contains(&value(written.used_bytes)), "{written:?}");
        assert!(value(written.inodes_used) >= 2);
        // A rate needs two samples some time apart.
        let rate = loop {
            assert!(begun.elapsed() < Duration::from_secs(10), "no rate");
            if let Some(rate) = stats().await.cpu.and_then(|cpu| cpu.usage_nano_cores) {
                break rate.value;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert!((50_000_000..400_000_000).contains(&rate), "a fifth of a core: {rate}");
        let request = cri::PodSandboxStatsRequest { pod_sandbox_id: sandbox.clone() };
        let pod_stats = daemon.calls.rpc.clone().pod_sandbox_stats(request).await.expect("received").into_inner().stats;
        let linux = pod_stats.and_then(|stats| stats.linux).expect("of Linux");
        let link = linux.network.and_then(|network| network.default_interface).expect("eth0");
        assert!(link.name == "eth0" && value(link.rx_bytes) > 0 && value(link.tx_bytes) > 0, "{link:?}");
        assert!(value(linux.process.expect("known").process_count) >= 1);
        assert!(value(linux.cpu.and_then(|cpu| cpu.usage_core_nano_seconds)) > 0 && linux.containers.len() == 1);
        assert!(value(linux.memory.expect("known").working_set_bytes) > 0);
        every_descriptor_has_its_value(&daemon, &sandbox).await;
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}

async fn every_descriptor_has_its_value(daemon: &Daemon, sandbox: &str) {
    let described = daemon.calls.rpc.clone().list_metric_descriptors(cri::ListMetricDescriptorsRequest {}).await;
    let response = daemon.calls.rpc.clone().list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest {}).await;
    let pod_metrics = response.expect("received").into_inner().pod_metrics;
    let pod = pod_metrics.into_iter().find(|pod| pod.pod_sandbox_id == sandbox).expect("the pod");
    let of_containers = pod.container_metrics.into_iter().flat_map(|container| container.metrics);
    let mut found: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for metric in pod.metrics.into_iter().chain(of_containers) {
        assert!(metric.value.is_some(), "{metric:?}");
        found.entry(metric.name).or_default().insert(metric.label_values.len());
    }
    for descriptor in described.expect("received").into_inner().descriptors {
        let name = descriptor.name.as_str();
        assert!(!descriptor.help.is_empty() && descriptor.label_keys.len() >= 6, "{descriptor:?}");
        match found.get(name) {
            None => assert!(OPTIONAL.contains(&name), "{name} has no value"),
            Some(labels) => assert_eq!(labels, &BTreeSet::from([descriptor.label_keys.len()]), "{name}"),
        }
    }
}
