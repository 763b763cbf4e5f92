//! The `/metrics` page: every family by name, type, and labels, in valid exposition format.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::json;

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{Agent, manifest, manifest_of, skips},
    scripted_cri::{Behaviour, Fault},
};

/// Bucket bounds by the names of spec 08 §3.
const DEF: &str = "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 +Inf";
const PODSTART: &str = "0.5 1 2 3 4 5 6 8 10 20 30 45 60 120 180 240 300 360 480 600 900 1200 1800 2700 3600 +Inf";
const PULL: &str = "1 5 10 20 30 60 120 180 240 300 360 480 600 900 1200 1800 2700 3600 +Inf";
const STATUS: &str = "0.01 0.05 0.1 0.5 1 5 10 20 30 45 60 +Inf";
const RUNTIME: &str = "0.005 0.0125 0.03125 0.078125 0.1953125 0.48828125 1.220703125 3.0517578125 7.62939453125 \
                       19.073486328125 47.6837158203125 119.20928955078125 298.0232238769531 745.0580596923828 +Inf";
const STORAGE: &str = "0.1 0.25 0.5 1 2.5 5 10 15 25 50 120 300 600 +Inf";
const COUNT5: &str = "1 2 4 8 16 +Inf";
const TOPO: &str = "0.05 0.1 0.2 0.4 0.8 1.6 3.2 6.4 12.8 25.6 51.2 102.4 204.8 409.6 819.2 +Inf";

/// Families without labels, present from the start. Name, type or buckets, stability.
const PLAIN: &[(&str, &str, &str)] = &[
    ("disabled_metrics_total", "counter", "[BETA] "),
    ("hidden_metrics_total", "counter", "[BETA] "),
    ("kubelet_cgroup_version", "gauge", "[ALPHA] "),
    ("kubelet_containers_per_pod_count", COUNT5, "[ALPHA] "),
    ("kubelet_cpu_manager_exclusive_cpu_allocation_count", "gauge", "[ALPHA] "),
    ("kubelet_cpu_manager_pinning_errors_total", "counter", "[ALPHA] "),
    ("kubelet_cpu_manager_pinning_requests_total", "counter", "[ALPHA] "),
    ("kubelet_cpu_manager_shared_pool_size_millicores", "gauge", "[ALPHA] "),
    ("kubelet_evented_pleg_connection_error_count", "counter", "[ALPHA] "),
    ("kubelet_evented_pleg_connection_latency_seconds", DEF, "[ALPHA] "),
    ("kubelet_evented_pleg_connection_success_count", "counter", "[ALPHA] "),
    ("kubelet_first_network_pod_start_sli_duration_seconds", "gauge", "[INTERNAL] "),
    ("kubelet_graceful_shutdown_end_time_seconds", "gauge", "[ALPHA] "),
    ("kubelet_graceful_shutdown_start_time_seconds", "gauge", "[ALPHA] "),
    ("kubelet_http_panics_total", "counter", "[ALPHA] "),
    ("kubelet_imagemanager_inmemory_pulledrecords_usage_percent", "gauge", "[ALPHA] "),
    ("kubelet_imagemanager_inmemory_pullintents_usage_percent", "gauge", "[ALPHA] "),
    ("kubelet_imagemanager_ondisk_pulledrecords", "gauge", "[ALPHA] "),
    ("kubelet_imagemanager_ondisk_pullintents", "gauge", "[ALPHA] "),
    ("kubelet_lifecycle_handler_http_fallbacks_total", "counter", "[ALPHA] "),
    ("kubelet_managed_ephemeral_containers", "gauge", "[ALPHA] "),
    ("kubelet_memory_manager_pinning_errors_total", "counter", "[ALPHA] "),
    ("kubelet_memory_manager_pinning_requests_total", "counter", "[ALPHA] "),
    ("kubelet_mirror_pods", "gauge", "[ALPHA] "),
    ("kubelet_image_volume_mounted_errors_total", "counter", "[BETA] "),
    ("kubelet_image_volume_mounted_succeed_total", "counter", "[BETA] "),
    ("kubelet_image_volume_requested_total", "counter", "[BETA] "),
    ("kubelet_node_startup_duration_seconds", "gauge", "[ALPHA] "),
    ("kubelet_node_startup_post_registration_duration_seconds", "gauge", "[ALPHA] "),
    ("kubelet_node_startup_pre_kubelet_duration_seconds", "gauge", "[ALPHA] "),
    ("kubelet_node_startup_pre_registration_duration_seconds", "gauge", "[ALPHA] "),
    ("kubelet_node_startup_registration_duration_seconds", "gauge", "[ALPHA] "),
    ("kubelet_orphan_pod_cleaned_volumes", "gauge", "[ALPHA] "),
    ("force_cleaned_failed_volume_operation_errors_total", "counter", "[ALPHA] "),
    ("force_cleaned_failed_volume_operations_total", "counter", "[ALPHA] "),
    ("reconstruct_volume_operations_errors_total", "counter", "[ALPHA] "),
    ("reconstruct_volume_operations_total", "counter", "[ALPHA] "),
    ("kubelet_orphan_pod_cleaned_volumes_errors", "gauge", "[ALPHA] "),
    ("kubelet_orphaned_runtime_pods_total", "counter", "[ALPHA] "),
    ("kubelet_pleg_discard_events", "counter", "[ALPHA] "),
    ("kubelet_pleg_last_seen_seconds", "gauge", "[ALPHA] "),
    ("kubelet_pleg_pod_relist_duration_seconds", DEF, "[ALPHA] "),
    ("kubelet_pleg_relist_duration_seconds", DEF, "[ALPHA] "),
    ("kubelet_pleg_relist_interval_seconds", DEF, "[ALPHA] "),
    ("kubelet_pod_in_progress_resizes", "gauge", "[ALPHA] "),
    ("kubelet_pod_start_duration_seconds", PODSTART, "[ALPHA] "),
    ("kubelet_pod_status_sync_duration_seconds", STATUS, "[ALPHA] "),
    ("kubelet_pod_worker_start_duration_seconds", DEF, "[ALPHA] "),
    ("kubelet_running_pods", "gauge", "[ALPHA] "),
    ("kubelet_sleep_action_terminated_early_total", "counter", "[ALPHA] "),
    ("kubelet_started_pods_errors_total", "counter", "[ALPHA] "),
    ("kubelet_started_pods_total", "counter", "[ALPHA] "),
    ("kubelet_started_user_namespaced_pods_errors_total", "counter", "[ALPHA] "),
    ("kubelet_started_user_namespaced_pods_total", "counter", "[ALPHA] "),
    ("kubelet_topology_manager_admission_duration_ms", TOPO, "[ALPHA] "),
    ("kubelet_topology_manager_admission_errors_total", "counter", "[ALPHA] "),
    ("kubelet_topology_manager_admission_requests_total", "counter", "[ALPHA] "),
    ("go_goroutines", "gauge", ""),
    ("process_cpu_seconds_total", "counter", ""),
    ("process_max_fds", "gauge", ""),
    ("process_network_receive_bytes_total", "counter", ""),
    ("process_network_transmit_bytes_total", "counter", ""),
    ("process_open_fds", "gauge", ""),
    ("process_resident_memory_bytes", "gauge", ""),
    ("process_start_time_seconds", "gauge", ""),
    ("process_virtual_memory_bytes", "gauge", ""),
    ("process_virtual_memory_max_bytes", "gauge", ""),
];

/// Families with labels, present after the first change. Name, type or buckets, stability, labels in order.
const LABELLED: &[(&str, &str, &str, &[&str])] = &[
    ("dra_resource_claims_in_use", "gauge", "[ALPHA] ", &["driver_name"]),
    ("kubelet_active_pods", "gauge", "[ALPHA] ", &["static"]),
    ("kubelet_restarted_pods_total", "counter", "[ALPHA] ", &["static"]),
    ("kubelet_admission_rejections_total", "counter", "[ALPHA] ", &["reason"]),
    ("kubelet_cgroup_manager_duration_seconds", DEF, "[ALPHA] ", &["operation_type"]),
    ("kubelet_desired_pods", "gauge", "[ALPHA] ", &["static"]),
    ("kubelet_http_inflight_requests", "gauge", "[ALPHA] ", &["long_running", "method", "path", "server_type"]),
    ("kubelet_http_requests_duration_seconds", DEF, "[ALPHA] ", &["long_running", "method", "path", "server_type"]),
    ("kubelet_http_requests_total", "counter", "[ALPHA] ", &["long_running", "method", "path", "server_type"]),
    (
        "kubelet_image_manager_ensure_image_requests_total",
        "counter",
        "[ALPHA] ",
        &["present_locally", "pull_policy", "pull_required"],
    ),
    ("kubelet_container_log_filesystem_used_bytes", "gauge", "[ALPHA] ", &["container", "namespace", "pod", "uid"]),
    ("kubelet_image_pull_duration_seconds", PULL, "[ALPHA] ", &["image_size_in_bytes"]),
    ("kubelet_imagemanager_image_mustpull_checks_total", "counter", "[ALPHA] ", &["result"]),
    ("kubelet_metrics_provider", "gauge", "[ALPHA] ", &["provider"]),
    ("kubelet_node_name", "gauge", "[ALPHA] ", &["node"]),
    ("kubelet_pod_worker_duration_seconds", DEF, "[ALPHA] ", &["operation_type"]),
    ("kubelet_run_podsandbox_duration_seconds", DEF, "[ALPHA] ", &["runtime_handler"]),
    ("kubelet_run_podsandbox_errors_total", "counter", "[ALPHA] ", &["runtime_handler"]),
    ("kubelet_running_containers", "gauge", "[ALPHA] ", &["container_state"]),
    ("kubelet_runtime_operations_duration_seconds", RUNTIME, "[ALPHA] ", &["operation_type"]),
    ("kubelet_runtime_operations_errors_total", "counter", "[ALPHA] ", &["operation_type"]),
    ("kubelet_runtime_operations_total", "counter", "[ALPHA] ", &["operation_type"]),
    ("kubelet_started_containers_errors_total", "counter", "[ALPHA] ", &["code", "container_type"]),
    ("kubelet_started_containers_total", "counter", "[ALPHA] ", &["container_type"]),
    ("kubelet_terminated_containers_total", "counter", "[ALPHA] ", &["container_type", "exit_code", "reason"]),
    ("kubelet_working_pods", "gauge", "[ALPHA] ", &["config", "lifecycle", "static"]),
    (
        "kubernetes_build_info",
        "gauge",
        "[BETA] ",
        &[
            "build_date",
            "compiler",
            "git_commit",
            "git_tree_state",
            "git_version",
            "go_version",
            "major",
            "minor",
            "platform",
        ],
    ),
    ("kubernetes_feature_enabled", "gauge", "[BETA] ", &["name", "stage"]),
    ("registered_metrics_total", "counter", "[BETA] ", &["deprecated_version", "stability_level"]),
    (
        "storage_operation_duration_seconds",
        STORAGE,
        "[ALPHA] ",
        &["migrated", "operation_name", "status", "volume_plugin"],
    ),
    ("volume_manager_total_volumes", "gauge", "[ALPHA] ", &["plugin_name", "state"]),
    ("volume_operation_total_seconds", STORAGE, "[ALPHA] ", &["operation_name", "plugin_name"]),
];

/// Name, labels, value.
type Series = (String, Vec<(String, String)>, f64);

/// One metric family of the page.
#[derive(Debug, Default)]
struct Family {
    help: String,
    kind: String,
    /// In page order.
    series: Vec<Series>,
}

/// Parses the page as a strict scraper does.
fn parse(page: &str) -> BTreeMap<String, Family> {
    assert!(page.ends_with('\n') && !page.contains("# EOF"), "ends with a newline, and is no OpenMetrics");
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap_or((rest, ""));
            assert!(*name > *current, "{name} follows {current}: not sorted, or twice");
            current = name.to_owned();
            families.insert(current.clone(), Family { help: help.to_owned(), ..Family::default() });
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            let family = families.get_mut(name).expect("help comes first");
            assert!(name == current && family.kind.is_empty() && family.series.is_empty(), "{line}");
            kind.clone_into(&mut family.kind);
        } else {
            let (name, labels, value) = series(line);
            let family = families.get_mut(&current).expect("help comes first");
            let suffixes: &[&str] = if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            assert!(suffixes.iter().any(|suffix| name == format!("{current}{suffix}")), "{line} below {current}");
            family.series.push((name, labels, value));
        }
    }
    families
}

fn series(line: &str) -> Series {
    let (head, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line}"));
    let value = value.replace("Inf", "inf").parse().unwrap_or_else(|_| panic!("no number: {line}"));
    let Some((name, labels)) = head.split_once('{') else { return (head.to_owned(), Vec::new(), value) };
    let mut labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("no end of labels: {line}"));
    let mut found = Vec::new();
    while !labels.is_empty() {
        let (label, rest) = labels.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
        let end = rest.match_indices('"').map(|(at, _)| at).find(|at| !rest[..*at].ends_with('\\'));
        let end = end.unwrap_or_else(|| panic!("no end of value: {line}"));
        found.push((label.to_owned(), rest[..end].to_owned()));
        labels = rest[end + 1..].trim_start_matches(',');
    }
    (name.to_owned(), found, value)
}

/// Asserts the invariants of every family.
fn check_form(name: &str, family: &Family) {
    assert!(!family.help.is_empty() && !family.kind.is_empty(), "{name}: {family:?}");
    assert!(!family.series.is_empty(), "{name} has no series and should not be there");
    let mut seen = BTreeSet::new();
    for (series, labels, _) in &family.series {
        assert!(seen.insert((series, labels)), "{series}{labels:?} is there twice");
        let names: Vec<&String> = labels.iter().map(|(label, _)| label).filter(|label| *label != "le").collect();
        assert!(names.is_sorted(), "{series}{labels:?}: labels are not sorted");
    }
    if family.kind != "histogram" {
        let order: Vec<_> = family.series.iter().map(|(_, labels, _)| labels).collect();
        assert!(order.is_sorted(), "{name}: series are not sorted");
        return;
    }
    let of = |suffix: &'static str| family.series.iter().filter(move |(series, ..)| series.ends_with(suffix));
    for (_, labels, count) in of("_count") {
        let buckets: Vec<f64> = of("_bucket")
            .filter(|(_, own, _)| own.iter().filter(|(label, _)| label != "le").eq(labels))
            .map(|(.., value)| *value)
            .collect();
        assert!(buckets.is_sorted() && buckets.last() == Some(count), "{name}{labels:?}: {buckets:?}");
    }
}

fn check_kind(name: &str, family: &Family, kind: &str, stability: &str) {
    assert!(
        family.help.starts_with(stability) && (stability.is_empty() != family.help.starts_with('[')),
        "{name}: {}",
        family.help
    );
    if matches!(kind, "gauge" | "counter") {
        assert_eq!(family.kind, kind, "{name}");
        return;
    }
    assert_eq!(family.kind, "histogram", "{name}");
    let first: Vec<_> = family.series.iter().map(|(_, labels, _)| labels).filter_map(|labels| labels.last()).collect();
    let bounds: Vec<&str> = first.iter().filter(|(label, _)| label == "le").map(|(_, bound)| bound.as_str()).collect();
    let expected: Vec<&str> = kind.split_whitespace().collect();
    assert_eq!(bounds.get(..expected.len()), Some(expected.as_slice()), "{name}");
}

async fn scrape(agent: &Agent) -> BTreeMap<String, Family> {
    let families = parse(&agent.metrics().await);
    families.iter().for_each(|(name, family)| check_form(name, family));
    families
}

fn value(families: &BTreeMap<String, Family>, name: &str, wanted: &[(&str, &str)]) -> f64 {
    let matches = |labels: &[(String, String)]| {
        wanted.iter().all(|(label, value)| labels.iter().any(|(own, is)| own == label && is == value))
    };
    let family = name.strip_suffix("_count").unwrap_or(name);
    let series = families.get(name).or_else(|| families.get(family)).map(|family| family.series.iter());
    let found = series.into_iter().flatten().find(|(own, labels, _)| own == name && matches(labels));
    found.map_or(0.0, |(.., value)| *value)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_agent_shows_what_it_will_count() {
    if skips("a_fresh_agent_shows_what_it_will_count") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let agent = runtime.home().start().await;
    // AC-08-1
    let answer = agent.get("/metrics").await.expect("an answer");
    let head = answer.head.to_lowercase();
    assert_eq!(answer.status, 200);
    let kind = "content-type: text/plain; version=0.0.4; charset=utf-8; escaping=underscores";
    assert!(head.contains(kind) && head.contains("process-start-time-unix: "), "{head}");
    // AC-08-4
    agent.until("the first sweep", async || agent.metrics().await.contains("kubelet_working_pods{")).await;
    let families = scrape(&agent).await;
    for (name, kind, stability) in PLAIN {
        let family = families.get(*name).unwrap_or_else(|| panic!("{name} is not there"));
        check_kind(name, family, kind, stability);
    }
    assert_eq!(families["kubelet_working_pods"].series.len(), 15);
    assert!(families["kubelet_working_pods"].series.iter().all(|(.., value)| *value == 0.0));
    assert_eq!(value(&families, "kubelet_node_name", &[("node", "test-node")]), 1.0);
    let version = &families["kubernetes_build_info"].series[0].1;
    assert!(version.iter().any(|(label, is)| label == "git_version" && is.starts_with("v1.36.")), "{version:?}");
    let absent = ["kubelet_evictions", "kubelet_preemptions", "kubelet_cri_losing_support", "version_info"];
    // AC-08-19
    let certificates =
        ["kubelet_certificate_manager_client_ttl_seconds", "kubelet_certificate_manager_server_ttl_seconds"];
    for absent in absent.into_iter().chain(certificates) {
        assert!(!families.contains_key(absent), "{absent} has nothing to show");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eventful_life_moves_every_family() {
    if skips("an_eventful_life_moves_every_family") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    runtime.cri.behave("done-test-node/main", [Behaviour::exits(0, Duration::ZERO)]);
    let refusal = || Fault::Error(tonic::Code::Unknown, "no".into());
    runtime.cri.fault("create_container", "unlucky", refusal(), Some(1));
    runtime.cri.fault("run_podsandbox", "homeless", refusal(), Some(1));
    let home = runtime.home();
    home.put_pod(&manifest("one"));
    let agent = home.start().await;
    agent.until_ready("one").await;
    agent.until("it is counted", async || agent.metric("kubelet_running_pods").await == Some(1.0)).await;
    // AC-08-5
    let families = scrape(&agent).await;
    let container = [("container_type", "container")];
    assert_eq!(value(&families, "kubelet_started_pods_total", &[]), 1.0);
    assert_eq!(value(&families, "kubelet_started_containers_total", &container), 1.0);
    assert_eq!(value(&families, "kubelet_pod_start_duration_seconds_count", &[]), 1.0);
    assert_eq!(value(&families, "kubelet_running_containers", &[("container_state", "running")]), 1.0);
    assert_eq!(value(&families, "kubelet_containers_per_pod_count_count", &[]), 1.0);

    home.put_pod(&manifest_of("done", json!({"containers": [{"name": "main"}], "restartPolicy": "Never"})));
    let mounts = json!([{"name": "cache", "mountPath": "/cache"}]);
    home.put_pod(&manifest_of(
        "pulls",
        json!({
            "volumes": [{"name": "cache", "emptyDir": {}}],
            "containers": [{"name": "main", "image": "example.com/new:1", "volumeMounts": mounts}],
        }),
    ));
    let wants = json!({"requests": {"cpu": "4000"}});
    home.put_pod(&manifest_of("greedy", json!({"containers": [{"name": "main", "resources": wants}]})));
    home.put_pod(&manifest("unlucky"));
    home.put_pod(&manifest("homeless"));
    agent.until_pod("done", "done", |pod| pod["status"]["phase"] == "Succeeded").await;
    agent.until_pod("greedy", "refused", |pod| pod["status"]["phase"] == "Failed").await;
    for name in ["pulls", "unlucky", "homeless"] {
        agent.until_ready(name).await;
    }
    agent.until("all is counted", async || agent.metric("kubelet_running_pods").await == Some(4.0)).await;
    // Log sizes are measured in the background.
    let logs = "kubelet_container_log_filesystem_used_bytes";
    agent.until("logs were measured", async || agent.metrics().await.contains(logs)).await;
    let families = scrape(&agent).await;
    for (name, kind, stability, labels) in LABELLED {
        let family = families.get(*name).unwrap_or_else(|| panic!("{name} is not there"));
        check_kind(name, family, kind, stability);
        for (series, own, _) in &family.series {
            let own: Vec<&str> = own.iter().map(|(label, _)| label.as_str()).filter(|label| *label != "le").collect();
            assert_eq!(own, *labels, "{series}");
        }
    }
    // AC-08-6
    let completed = [("container_type", "container"), ("exit_code", "0"), ("reason", "Completed")];
    assert_eq!(value(&families, "kubelet_terminated_containers_total", &completed), 1.0);
    let code = [("container_type", "container"), ("code", "CreateContainerError")];
    assert_eq!(value(&families, "kubelet_started_containers_errors_total", &code), 1.0);
    assert_eq!(value(&families, "kubelet_started_pods_errors_total", &[]), 1.0);
    assert_eq!(value(&families, "kubelet_pod_start_duration_seconds_count", &[]), 4.0);
    let known: BTreeSet<&str> = PLAIN.iter().map(|row| row.0).chain(LABELLED.iter().map(|row| row.0)).collect();
    let ours = |name: &str| name.starts_with("berth_");
    let unknown: Vec<&String> = families.keys().filter(|name| !known.contains(name.as_str()) && !ours(name)).collect();
    assert!(unknown.is_empty(), "families that the table does not know: {unknown:?}");

    // AC-08-7
    home.remove("done.json");
    let exited = "kubelet_running_containers{container_state=\"exited\"}";
    agent.until("no exited container is left", async || agent.metric(exited).await.unwrap_or(0.0) == 0.0).await;
}

/// `--machine-id-file`, `--boot-id-file`, and `showHiddenMetricsForVersion` have an effect, without a warning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_have_the_configured_ids_and_hidden_families() {
    if skips("pages_have_the_configured_ids_and_hidden_families") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"showHiddenMetricsForVersion": "1.35"}));
    let [machine, boot] = ["machine-1", "boot-1"].map(|id| home.path().join(id));
    for (path, id) in [(&machine, "machine-1\n"), (&boot, "boot-1\n")] {
        std::fs::write(path, id).expect("written");
    }
    let machine = format!("--machine-id-file=/none,{}", machine.display());
    let home = home.flag(machine).flag(format!("--boot-id-file={}", boot.display()));
    let agent = home.start().await;
    let page = agent.get("/metrics/cadvisor").await.expect("a page").body;
    assert!(page.contains("machine_memory_bytes{boot_id=\"boot-1\",machine_id=\"machine-1\","), "{page}");
    let page = agent.get("/metrics/resource").await.expect("a page").body;
    assert!(page.contains("\nscrape_error ") && page.contains("\n# TYPE scrape_error gauge\n"), "{page}");
    agent.until_log("Hidden metrics(scrape_error) have been manually overridden").await;
    assert!(!agent.log().contains("Setting has no effect"), "{}", agent.log_end());
}
