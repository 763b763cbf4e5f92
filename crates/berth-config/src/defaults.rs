//! Default values of the configuration. Pure. Spec 01 §3.4, §4.
//!
//! Fields that upstream keeps behind a pointer are filled only when absent; for the others, zero and empty count as
//! absent too, so `port: 0` is 10250.

use std::collections::BTreeMap;

use super::{
    GoDuration,
    fields::{API_VERSION, FlushFrequency, KIND, KubeletConfiguration, LoggingConfiguration},
    gates::{FeatureGates, GateError},
    json_decoder::PresentFields,
};

/// The gates of the configuration cannot be set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("failed to merge global and in-flight KubeletConfiguration while setting defaults, error: {0}")]
pub struct DefaultsError(#[from] pub GateError);

/// Default hard eviction thresholds of a configuration file.
const EVICTION_HARD: [(&str, &str); 5] = [
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
];

/// Fills in unset fields. `gates` are those of the process; the configuration's own gates are applied on top.
///
/// # Errors
/// The configuration sets an unknown gate, or changes a locked one.
pub fn fill(c: &mut KubeletConfiguration, present: &PresentFields, gates: &FeatureGates) -> Result<(), DefaultsError> {
    let mut gates = gates.clone();
    gates.set_from_map(&c.feature_gates)?;
    c.kind = KIND.to_owned();
    c.api_version = API_VERSION.to_owned();
    fill_node(c, present);
    fill_server(c, present);
    fill_pods(c, present);
    fill_images(c, present);
    fill_resources(c, present);
    fill_logging(&mut c.logging);
    if gates.enabled("KubeletCrashLoopBackOffMax") && c.crash_loop_back_off.max_container_restart_period.is_none() {
        c.crash_loop_back_off.max_container_restart_period = Some(GoDuration::from_secs(300));
    }
    if gates.enabled("KubeletEnsureSecretPulledImages") {
        text(&mut c.image_pull_credentials_verification_policy, "NeverVerifyPreloadedImages");
    }
    Ok(())
}

/// Returns the configuration of an empty file: all defaults except hard eviction thresholds.
pub fn defaults() -> KubeletConfiguration {
    let mut c = KubeletConfiguration::default();
    fill(&mut c, &PresentFields::default(), &FeatureGates::new()).expect("an empty gate map changes no locked gate");
    c
}

/// Fills in the hard eviction thresholds of the main file (spec 01 §3.2): all defaults if the file sets none, and the
/// missing signals if the file requests to merge the defaults.
pub fn fill_hard_eviction(c: &mut KubeletConfiguration, named: bool) {
    if named && !c.merge_default_eviction_settings {
        return;
    }
    for (signal, threshold) in EVICTION_HARD {
        c.eviction_hard.entry(signal.to_owned()).or_insert_with(|| threshold.to_owned());
    }
}

/// Returns the default hard eviction thresholds.
pub fn hard_eviction() -> BTreeMap<String, String> {
    EVICTION_HARD.iter().map(|(signal, threshold)| ((*signal).to_owned(), (*threshold).to_owned())).collect()
}

/// Applies the reference's legacy defaults without a configuration file (spec 01 §3.1), which permit anonymous access.
pub fn legacy_overrides(c: &mut KubeletConfiguration) {
    c.authentication.anonymous.enabled = true;
    c.authentication.webhook.enabled = false;
    c.authorization.mode = "AlwaysAllow".to_owned();
    c.read_only_port = 10_255;
}

fn text(field: &mut String, default: &str) {
    if field.is_empty() {
        default.clone_into(field);
    }
}

fn number<T: Default + PartialEq>(field: &mut T, default: T) {
    if *field == T::default() {
        *field = default;
    }
}

fn seconds(field: &mut GoDuration, default: i64) {
    number(field, GoDuration::from_secs(default));
}

/// Fills a field that upstream keeps behind a pointer, if it is absent.
fn absent<T>(present: &PresentFields, path: &str, field: &mut T, default: T) {
    if !present.has(path) {
        *field = default;
    }
}

fn fill_node(c: &mut KubeletConfiguration, present: &PresentFields) {
    seconds(&mut c.sync_frequency, 60);
    seconds(&mut c.file_check_frequency, 20);
    seconds(&mut c.http_check_frequency, 20);
    absent(present, "oomScoreAdj", &mut c.oom_score_adj, -999);
    if c.node_status_report_frequency.is_zero() {
        // A file that sets only the update frequency keeps the behavior from before there were two frequencies.
        let follows = !c.node_status_update_frequency.is_zero();
        c.node_status_report_frequency =
            if follows { c.node_status_update_frequency } else { GoDuration::from_secs(300) };
    }
    seconds(&mut c.node_status_update_frequency, 10);
    number(&mut c.node_lease_duration_seconds, 40);
    absent(present, "nodeStatusMaxImages", &mut c.node_status_max_images, 50);
    number(&mut c.max_open_files, 1_000_000);
    text(&mut c.content_type, "application/vnd.kubernetes.protobuf");
    absent(present, "kubeAPIQPS", &mut c.kube_api_qps, 50);
    number(&mut c.kube_api_burst, 100);
    absent(present, "eventRecordQPS", &mut c.event_record_qps, 50);
    number(&mut c.event_burst, 100);
    absent(present, "registerNode", &mut c.register_node, true);
    text(&mut c.config_map_and_secret_change_detection_strategy, "Watch");
}

fn fill_server(c: &mut KubeletConfiguration, present: &PresentFields) {
    absent(present, "enableServer", &mut c.enable_server, true);
    text(&mut c.address, "0.0.0.0");
    number(&mut c.port, 10_250);
    absent(present, "authentication.anonymous.enabled", &mut c.authentication.anonymous.enabled, false);
    absent(present, "authentication.webhook.enabled", &mut c.authentication.webhook.enabled, true);
    seconds(&mut c.authentication.webhook.cache_ttl, 120);
    text(&mut c.authorization.mode, "Webhook");
    seconds(&mut c.authorization.webhook.cache_authorized_ttl, 300);
    seconds(&mut c.authorization.webhook.cache_unauthorized_ttl, 30);
    absent(present, "enableDebuggingHandlers", &mut c.enable_debugging_handlers, true);
    absent(present, "healthzPort", &mut c.healthz_port, 10_248);
    text(&mut c.healthz_bind_address, "127.0.0.1");
    seconds(&mut c.streaming_connection_idle_timeout, 4 * 3600);
    absent(present, "enableSystemLogHandler", &mut c.enable_system_log_handler, true);
    absent(present, "enableProfilingHandler", &mut c.enable_profiling_handler, true);
    absent(present, "enableDebugFlagsHandler", &mut c.enable_debug_flags_handler, true);
}

fn fill_pods(c: &mut KubeletConfiguration, present: &PresentFields) {
    number(&mut c.max_pods, 110);
    if !present.has("podPidsLimit") || c.pod_pids_limit < 0 {
        c.pod_pids_limit = -1;
    }
    absent(present, "resolvConf", &mut c.resolv_conf, "/etc/resolv.conf".to_owned());
    text(&mut c.pod_logs_dir, "/var/log/pods");
    text(&mut c.container_log_max_size, "10Mi");
    absent(present, "containerLogMaxFiles", &mut c.container_log_max_files, 5);
    absent(present, "containerLogMaxWorkers", &mut c.container_log_max_workers, 1);
    absent(present, "containerLogMonitorInterval", &mut c.container_log_monitor_interval, GoDuration::from_secs(10));
    seconds(&mut c.runtime_request_timeout, 120);
    text(&mut c.container_runtime_endpoint, "unix:///run/containerd/containerd.sock");
    text(&mut c.hairpin_mode, "promiscuous-bridge");
    absent(present, "seccompDefault", &mut c.seccomp_default, false);
    seconds(&mut c.volume_stats_agg_period, 60);
    text(&mut c.volume_plugin_dir, "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/");
    absent(present, "enableControllerAttachDetach", &mut c.enable_controller_attach_detach, true);
    absent(present, "makeIPTablesUtilChains", &mut c.make_iptables_util_chains, true);
    absent(present, "iptablesMasqueradeBit", &mut c.iptables_masquerade_bit, 14);
    absent(present, "iptablesDropBit", &mut c.iptables_drop_bit, 15);
}

fn fill_images(c: &mut KubeletConfiguration, present: &PresentFields) {
    absent(present, "registryPullQPS", &mut c.registry_pull_qps, 5);
    number(&mut c.registry_burst, 10);
    seconds(&mut c.image_minimum_gc_age, 120);
    absent(present, "imageGCHighThresholdPercent", &mut c.image_gc_high_threshold_percent, 85);
    absent(present, "imageGCLowThresholdPercent", &mut c.image_gc_low_threshold_percent, 80);
    let serial = c.max_parallel_image_pulls.is_none_or(|pulls| pulls < 2);
    absent(present, "serializeImagePulls", &mut c.serialize_image_pulls, serial);
}

fn fill_resources(c: &mut KubeletConfiguration, present: &PresentFields) {
    absent(present, "cgroupsPerQOS", &mut c.cgroups_per_qos, true);
    text(&mut c.cgroup_driver, "cgroupfs");
    text(&mut c.cpu_manager_policy, "none");
    seconds(&mut c.cpu_manager_reconcile_period, 10);
    text(&mut c.memory_manager_policy, "None");
    text(&mut c.topology_manager_policy, "none");
    text(&mut c.topology_manager_scope, "container");
    absent(present, "cpuCFSQuota", &mut c.cpu_cfs_quota, true);
    absent(present, "cpuCFSQuotaPeriod", &mut c.cpu_cfs_quota_period, GoDuration::from_millis(100));
    seconds(&mut c.eviction_pressure_transition_period, 300);
    absent(present, "failSwapOn", &mut c.fail_swap_on, true);
    absent(present, "failCgroupV1", &mut c.fail_cgroup_v1, true);
    absent(present, "enforceNodeAllocatable", &mut c.enforce_node_allocatable, vec!["pods".to_owned()]);
    absent(present, "localStorageCapacityIsolation", &mut c.local_storage_capacity_isolation, true);
    if c.memory_throttling_factor.is_none() {
        c.memory_throttling_factor = Some(0.9);
    }
    text(&mut c.memory_reservation_policy, "None");
}

fn fill_logging(logging: &mut LoggingConfiguration) {
    text(&mut logging.format, "text");
    if logging.flush_frequency.duration.is_zero() {
        logging.flush_frequency = FlushFrequency { duration: GoDuration::from_secs(5), as_string: true };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_decoder::{Names, decode};
    use serde_json::{Value, json};

    fn filled(document: &Value) -> KubeletConfiguration {
        let typed = decode::<KubeletConfiguration>(document, Names::Exact).expect("well typed");
        let mut config = typed.value;
        fill(&mut config, &typed.present, &FeatureGates::new()).expect("no locked gate");
        config
    }

    #[test]
    fn zero_counts_as_unset_only_where_there_is_no_pointer() {
        let config = filled(&json!({
            "port": 0, "maxPods": 0, "syncFrequency": "0s", "address": "", "registryBurst": 0,
            "healthzPort": 0, "registryPullQPS": 0, "enableServer": false, "resolvConf": "", "oomScoreAdj": 0,
            "enforceNodeAllocatable": [], "podPidsLimit": -7, "cpuCFSQuotaPeriod": "0s",
        }));
        assert_eq!((config.port, config.max_pods, config.registry_burst), (10_250, 110, 10));
        assert_eq!((config.sync_frequency.to_string(), config.address.as_str()), ("1m0s".to_owned(), "0.0.0.0"));
        assert_eq!((config.healthz_port, config.registry_pull_qps, config.oom_score_adj), (0, 0, 0));
        assert!(!config.enable_server && config.resolv_conf.is_empty() && config.enforce_node_allocatable.is_empty());
        assert_eq!((config.pod_pids_limit, config.cpu_cfs_quota_period), (-1, GoDuration::ZERO));
    }

    #[test]
    fn some_defaults_follow_other_fields() {
        for (document, report, serial) in [
            (json!({}), "5m0s", true),
            (json!({"nodeStatusUpdateFrequency": "7s"}), "7s", true),
            (json!({"nodeStatusUpdateFrequency": "7s", "nodeStatusReportFrequency": "1m"}), "1m0s", true),
            (json!({"maxParallelImagePulls": 1}), "5m0s", true),
            (json!({"maxParallelImagePulls": 2}), "5m0s", false),
            (json!({"maxParallelImagePulls": 2, "serializeImagePulls": true}), "5m0s", true),
        ] {
            let config = filled(&document);
            assert_eq!(config.node_status_report_frequency.to_string(), report, "{document}");
            assert_eq!(config.serialize_image_pulls, serial, "{document}");
        }
    }

    #[test]
    fn gates_of_the_configuration_decide_defaults_too() {
        let config = filled(
            &json!({"featureGates": {"KubeletCrashLoopBackOffMax": false, "KubeletEnsureSecretPulledImages": false}}),
        );
        assert_eq!(config.crash_loop_back_off.max_container_restart_period, None);
        assert_eq!(config.image_pull_credentials_verification_policy, "");
        let mut locked = KubeletConfiguration::default();
        locked.feature_gates.insert("NodeSwap".to_owned(), false);
        let error = fill(&mut locked, &PresentFields::default(), &FeatureGates::new()).expect_err("AC-01-20");
        assert_eq!(
            error.to_string(),
            "failed to merge global and in-flight KubeletConfiguration while setting defaults, error: cannot set \
             feature gate NodeSwap to false, feature is locked to true"
        );
    }

    #[test]
    fn hard_eviction_is_the_file_s_or_the_default_or_both() {
        let hard = |named: Option<Value>, merge: bool| {
            let mut document = json!({"mergeDefaultEvictionSettings": merge});
            let is_named = named.is_some();
            if let Some(named) = named {
                document["evictionHard"] = named;
            }
            let mut config = filled(&document);
            fill_hard_eviction(&mut config, is_named);
            config.eviction_hard
        };
        assert_eq!(hard(None, false), hard_eviction());
        assert_eq!(hard(Some(json!({})), false), BTreeMap::new());
        assert_eq!(hard(Some(json!({"memory.available": "200Mi"})), false).len(), 1);
        let merged = hard(Some(json!({"memory.available": "200Mi"})), true);
        assert_eq!((merged.len(), merged["memory.available"].as_str()), (5, "200Mi"));
    }
}
