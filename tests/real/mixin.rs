//! Queries of public dashboards, rules, and alerts (kubernetes-mixin, prometheus-adapter).
//!
//! Every query on a kubelet and its cAdvisor returns data while a pod works, or is listed with the reason why it
//! cannot.

use std::{collections::BTreeMap, path::Path};

use serde_json::json;

use crate::{
    node::{UNTIL_STOPPED, shell},
    prometheus::ScrapedNode,
};
use berth_testkit::{
    api_server::{SimpleFault, reviews::ACCESSES},
    process::manifest_of,
};

/// Expected result of a query.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpectedResult {
    /// Series.
    Data,
    /// Series if this kernel counts disk I/O per cgroup: with cgroup v1, new kernels do so only for groups with a
    /// limit.
    DataIfCounted,
    /// Nothing, with the reason.
    Nothing(&'static str),
}
use ExpectedResult::{Data, DataIfCounted, Nothing};

/// `K` is replaced by the selector of `/metrics`, `C` by that of `/metrics/cadvisor`, `D` by disks, `R` by the window.
const QUERIES: &[(&str, &str, ExpectedResult)] = &[
    // Dashboard "Kubelet" (spec 08 §9.2).
    ("running kubelets", "sum(kubelet_node_name{K}) == 1", Data),
    ("running pods", "sum(kubelet_running_pods{K}) > 0", Data),
    ("running containers", "sum(kubelet_running_containers{K,container_state=\"running\"}) > 0", Data),
    ("actual volumes", "sum(volume_manager_total_volumes{K,state=\"actual_state_of_world\"}) > 0", Data),
    ("desired volumes", "sum(volume_manager_total_volumes{K,state=\"desired_state_of_world\"}) > 0", Data),
    (
        "config errors",
        "sum(rate(kubelet_node_config_error{K}[R]))",
        Nothing("went with dynamic configuration in v1.24; the reference has none either"),
    ),
    ("operations", "sum by (operation_type, instance)(rate(kubelet_runtime_operations_total{K}[R])) > 0", Data),
    ("operation errors", "sum by (operation_type)(rate(kubelet_runtime_operations_errors_total{K}[R]))", Data),
    (
        "operation p99",
        "histogram_quantile(0.99, sum by (operation_type, le)(rate(kubelet_runtime_operations_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    ("pod starts", "sum by (instance)(rate(kubelet_pod_start_duration_seconds_count{K}[R]))", Data),
    ("pod workers", "sum by (instance)(rate(kubelet_pod_worker_duration_seconds_count{K}[R]))", Data),
    (
        "pod start p99",
        "histogram_quantile(0.99, sum by (instance, le)(rate(kubelet_pod_start_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    (
        "pod worker p99",
        "histogram_quantile(0.99, sum by (instance, le)(rate(kubelet_pod_worker_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    (
        "storage operations",
        "sum by (instance, operation_name, volume_plugin)(rate(storage_operation_duration_seconds_count{K}[R]))",
        Data,
    ),
    (
        "storage errors",
        "sum by (operation_name)(rate(storage_operation_errors_total{K}[R]))",
        Nothing("became the label `status` of the operations in v1.21; the reference has none either"),
    ),
    (
        "storage p99",
        "histogram_quantile(0.99, sum by (operation_name, volume_plugin, le)(rate(storage_operation_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    ("cgroup operations", "sum by (operation_type)(rate(kubelet_cgroup_manager_duration_seconds_count{K}[R]))", Data),
    (
        "cgroup p99",
        "histogram_quantile(0.99, sum by (operation_type, le)(rate(kubelet_cgroup_manager_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    ("relists", "sum by (instance)(rate(kubelet_pleg_relist_duration_seconds_count{K}[R]))", Data),
    (
        "relist interval p99",
        "histogram_quantile(0.99, sum by (instance, le)(rate(kubelet_pleg_relist_interval_seconds_bucket{K}[R])))",
        Data,
    ),
    (
        "relist p99",
        "histogram_quantile(0.99, sum by (instance, le)(rate(kubelet_pleg_relist_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    ("RPC 2xx", "sum(rate(rest_client_requests_total{K,code=~\"2..\"}[R]))", Data),
    ("RPC 3xx", "sum(rate(rest_client_requests_total{K,code=~\"3..\"}[R]))", Nothing("no API server redirects")),
    ("RPC 4xx", "sum(rate(rest_client_requests_total{K,code=~\"4..\"}[R]))", Data),
    ("RPC 5xx", "sum(rate(rest_client_requests_total{K,code=~\"5..\"}[R]))", Data),
    (
        "request p99",
        "histogram_quantile(0.99, sum by (instance, verb, le)(rate(rest_client_request_duration_seconds_bucket{K}[R])))",
        Data,
    ),
    ("memory", "process_resident_memory_bytes{K} > 0", Data),
    ("CPU", "rate(process_cpu_seconds_total{K}[R]) > 0", Data),
    ("goroutines", "go_goroutines{K} > 0", Data), // there are no goroutines: the value counts tasks
    // Alerts and rules on kubelet's own series (§9.1).
    (
        "relist quantile rule",
        "histogram_quantile(0.99, sum by (cluster, instance, le)(rate(kubelet_pleg_relist_duration_seconds_bucket{K}[R])) \
         * on (cluster, instance) group_left (node) max by (cluster, instance, node)(kubelet_node_name{K}))",
        Data,
    ),
    (
        "too many pods",
        "max by (cluster, instance)(kubelet_running_pods{K} > 0) \
         * on (cluster, instance) group_left (node) max by (cluster, instance, node)(kubelet_node_name{K})",
        Data,
    ),
    ("versions", "count by (git_version)(kubernetes_build_info{K,git_version=~\"v1.36.*\"})", Data),
    (
        "evictions",
        "sum by (eviction_signal)(rate(kubelet_evictions{K}[R]))",
        Nothing("empty until something is evicted, as in the reference"),
    ),
    (
        "client certificate",
        "kubelet_certificate_manager_client_ttl_seconds{K}",
        Nothing("rotateCertificates is off; the reference has none then either"),
    ),
    (
        "server certificate",
        "kubelet_certificate_manager_server_ttl_seconds{K}",
        Nothing("serverTLSBootstrap is off; the reference has none then either"),
    ),
    (
        "volume space",
        "kubelet_volume_stats_available_bytes{K} / kubelet_volume_stats_capacity_bytes{K}",
        Nothing("only of claims, and there are no claims without an API server"),
    ),
    (
        "volume inodes",
        "kubelet_volume_stats_inodes_free{K} / kubelet_volume_stats_inodes{K}",
        Nothing("only of claims, and there are no claims without an API server"),
    ),
    ("health", "kubernetes_healthcheck{cluster=\"test\",metrics_path=\"/metrics/slis\"} == 1", Data),
    // Rules, compute and network dashboards on cAdvisor's series (§9.3).
    (
        "CPU rule",
        "sum by (cluster, namespace, pod, container)(rate(container_cpu_usage_seconds_total{C,image!=\"\",container=\"main\"}[R])) > 0",
        Data,
    ),
    ("working set rule", "container_memory_working_set_bytes{C,image!=\"\",container=\"main\"} > 0", Data),
    ("RSS rule", "container_memory_rss{C,image!=\"\",container=\"main\"} > 0", Data),
    ("cache rule", "container_memory_cache{C,image!=\"\",container=\"main\"} > 0", Data),
    ("swap rule", "container_memory_swap{C,image!=\"\",container=\"main\"}", Data),
    (
        "throttling",
        "sum by (container)(increase(container_cpu_cfs_throttled_periods_total{C,container!=\"\"}[R])) \
         / sum by (container)(increase(container_cpu_cfs_periods_total{C,container!=\"\"}[R])) > 0.25",
        Data,
    ),
    ("usage", "sum by (pod)(container_memory_usage_bytes{C,pod=~\"mixed.*\",container!=\"\"}) > 0", Data),
    ("received", "sum by (pod)(rate(container_network_receive_bytes_total{C,pod=~\"mixed.*\"}[R])) > 0", Data),
    ("sent", "sum by (pod)(rate(container_network_transmit_bytes_total{C,pod=~\"mixed.*\"}[R])) > 0", Data),
    ("packets in", "sum by (pod)(rate(container_network_receive_packets_total{C,pod=~\"mixed.*\"}[R])) > 0", Data),
    ("packets out", "sum by (pod)(rate(container_network_transmit_packets_total{C,pod=~\"mixed.*\"}[R])) > 0", Data),
    ("drops in", "sum by (pod)(rate(container_network_receive_packets_dropped_total{C,pod=~\"mixed.*\"}[R]))", Data),
    ("drops out", "sum by (pod)(rate(container_network_transmit_packets_dropped_total{C,pod=~\"mixed.*\"}[R]))", Data),
    (
        "network once a pod",
        "count by (pod)(container_network_receive_bytes_total{C,pod=~\"mixed.*\",interface=\"eth0\"}) == 1",
        Data,
    ),
    ("OOM kills", "sum by (container)(rate(container_oom_events_total{C,container=\"main\"}[R]))", Data),
    ("start time", "container_start_time_seconds{C,container=\"main\"} > 1.6e9", Data),
    ("machine", "machine_cpu_cores{C} > 0 and machine_memory_bytes{C} > 0", Data),
    ("file systems", "container_fs_usage_bytes{C,id=\"/\"} / container_fs_limit_bytes{C,id=\"/\"} > 0", Data),
    ("writes", "ceil(sum by (pod)(rate(container_fs_writes_total{C,D,container!=\"\"}[R]))) > 0", DataIfCounted),
    (
        "bytes written",
        "sum by (container)(rate(container_fs_writes_bytes_total{C,D,container!=\"\"}[R])) > 0",
        DataIfCounted,
    ),
    ("reads", "sum by (container)(rate(container_fs_reads_total{C,D,container!=\"\"}[R]))", DataIfCounted),
    ("bytes read", "sum by (container)(rate(container_fs_reads_bytes_total{C,D,container!=\"\"}[R]))", DataIfCounted),
    // prometheus-adapter's two queries, and metrics-server's page (§9.4).
    ("adapter CPU", "sum by (pod)(rate(container_cpu_usage_seconds_total{container!=\"\",pod!=\"\"}[R])) > 0", Data),
    ("adapter memory", "sum by (pod)(container_memory_working_set_bytes{container!=\"\",pod!=\"\"}) > 0", Data),
    ("node", "rate(node_cpu_usage_seconds_total{metrics_path=\"/metrics/resource\"}[R]) > 0", Data),
];

fn filled(query: &str) -> String {
    let kubelet = "cluster=\"test\",job=\"kubelet\",metrics_path=\"/metrics\"";
    let cadvisor = "cluster=\"test\",job=\"kubelet\",metrics_path=\"/metrics/cadvisor\"";
    let disks = "device=~\"(/dev.+)|mmcblk.p.+|nvme.+|rbd.+|sd.+|vd.+|xvd.+|dm-.+|md.+|dasd.+\"";
    query
        .replace("{K", &format!("{{{kubelet}"))
        .replace("{C", &format!("{{{cadvisor}"))
        .replace(",D,", &format!(",{disks},"))
        .replace("[R]", "[20s]")
}

/// A container that uses up its CPU limit, and does disk and network I/O.
fn load() -> serde_json::Value {
    let work = "while true; do i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; \
                dd if=/dev/zero of=/cache/file bs=64k count=4 conv=fsync 2>/dev/null; done & ";
    let mut main = shell("main", &format!("{work}{UNTIL_STOPPED}"));
    main["resources"] = json!({"limits": {"cpu": "100m", "memory": "64Mi"}});
    main["volumeMounts"] = json!([{"name": "cache", "mountPath": "/cache"}]);
    let serve = format!("mkdir /www; echo hello > /www/index.html; httpd -p 8080 -h /www; {UNTIL_STOPPED}");
    let spec = json!({
        "terminationGracePeriodSeconds": 2,
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "containers": [main, shell("web", &serve)],
    });
    manifest_of("mixed", spec)
}

/// Whether the kernel reports disk I/O of a cgroup.
fn counts_disks(group: &Path) -> bool {
    let content = |file: &str| std::fs::read_to_string(group.join(file)).unwrap_or_default();
    content("io.stat").contains("wbytes=") || content("blkio.throttle.io_service_bytes_recursive").contains("Write")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_public_dashboards_ask_returns_data() {
    // AC-08-22
    let test = "what_public_dashboards_ask_returns_data";
    let troubles = [SimpleFault::Status(500, None), SimpleFault::Status(403, None)];
    let Some(site) = ScrapedNode::start(test, |api| api.trouble(ACCESSES, troubles)).await else { return };
    let pod = site.node.run(&load()).await;
    // Not every runtime returns an error by itself.
    let broken = json!({"containers": [{"name": "main", "command": ["/no/such/program"]}]});
    site.node.home.put_pod(&manifest_of("broken", broken));
    let broken = site.node.agent.until_pod("broken", "shown", |_| true).await;
    let address = pod["status"]["podIP"].as_str().expect("an address").to_owned();
    let talk = tokio::spawn(async move {
        loop {
            if let Ok(mut stream) = tokio::net::TcpStream::connect((&*address, 8080)).await {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                let _ = stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await; // the outcome does not matter
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    });
    let counts = site.node.cgroups(&pod).iter().any(|group| counts_disks(group));
    let has_data = |comes| comes == Data || (comes == DataIfCounted && counts);
    let expected: BTreeMap<&str, String> =
        QUERIES.iter().filter(|row| has_data(row.2)).map(|(name, query, _)| (*name, filled(query))).collect();
    site.prometheus.all_return(&expected).await;
    for (name, query, comes) in QUERIES.iter().filter(|row| !has_data(row.2)) {
        let reason = if let Nothing(reason) = comes { reason } else { "the kernel does not count" };
        let found = site.prometheus.series(&filled(query)).await;
        assert!(found.is_empty(), "{name} returns data, though: {reason}: {found:#?}");
    }
    talk.abort();
    site.node.remove(&broken).await;
    site.node.remove(&pod).await;
}
