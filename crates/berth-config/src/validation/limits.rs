//! Validation of numeric bounds and related settings. Pure.

use super::{Failures, ValidationInput};
use crate::{
    GoDuration,
    flags::{is_taint_effect, shown_taint},
    names,
    text::{clean_path, quote},
};

/// Applies the rules from the lease to the taints.
pub(super) fn check(subject: ValidationInput<'_>, f: &mut Failures) {
    let ValidationInput { config: c, .. } = subject;
    if c.node_lease_duration_seconds <= 0 {
        f.invalid("nodeLeaseDurationSeconds must be greater than 0");
    }
    if !c.system_cgroups.is_empty() && c.cgroup_root.is_empty() {
        f.invalid("systemCgroups (--system-cgroups) was specified and cgroupRoot (--cgroup-root) was not specified");
    }
    f.not_negative("eventBurst", "event-burst", c.event_burst);
    f.not_negative("eventRecordQPS", "event-qps", c.event_record_qps);
    if c.healthz_port != 0 {
        f.within("healthzPort", "healthz-port", c.healthz_port, (1, 65_535));
    }
    quota_period(subject, f);
    image_gc(subject, f);
    f.within("iptablesDropBit", "iptables-drop-bit", c.iptables_drop_bit, (0, 31));
    f.within("iptablesMasqueradeBit", "iptables-masquerade-bit", c.iptables_masquerade_bit, (0, 31));
    f.not_negative("kubeAPIBurst", "kube-api-burst", c.kube_api_burst);
    f.not_negative("kubeAPIQPS", "kube-api-qps", c.kube_api_qps);
    if c.node_status_max_images < -1 {
        f.invalid(format!(
            "nodeStatusMaxImages (--node-status-max-images) {} must be -1 or greater",
            c.node_status_max_images
        ));
    }
    f.not_negative("maxOpenFiles", "max-open-files", c.max_open_files);
    f.not_negative("maxPods", "max-pods", c.max_pods);
    f.within("oomScoreAdj", "oom-score-adj", c.oom_score_adj, (-1000, 1000));
    f.not_negative("podsPerCore", "pods-per-core", c.pods_per_core);
    f.within("port", "port", c.port, (1, 65_535));
    f.within("readOnlyPort", "read-only-port", c.read_only_port, (0, 65_535));
    f.not_negative("registryBurst", "registry-burst", c.registry_burst);
    f.not_negative("registryPullQPS", "registry-qps", c.registry_pull_qps);
    pulls_and_bootstrap(subject, f);
    taints(subject, f);
}

fn quota_period(ValidationInput { config: c, gates, .. }: ValidationInput<'_>, f: &mut Failures) {
    let period = c.cpu_cfs_quota_period;
    let shown = format!("cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {{{period}}}");
    if !gates.enabled("CustomCPUCFSQuotaPeriod") {
        if period != GoDuration::from_millis(100) {
            f.invalid(format!("{shown} requires feature gate CustomCPUCFSQuotaPeriod"));
        }
    } else if period < GoDuration::from_millis(1) || period > GoDuration::from_secs(1) {
        f.invalid(format!("{shown} must be between 1ms and 1sec, inclusive"));
    }
}

fn image_gc(ValidationInput { config: c, .. }: ValidationInput<'_>, f: &mut Failures) {
    let (high, low) = (c.image_gc_high_threshold_percent, c.image_gc_low_threshold_percent);
    f.within("imageGCHighThresholdPercent", "image-gc-high-threshold", high, (0, 100));
    f.within("imageGCLowThresholdPercent", "image-gc-low-threshold", low, (0, 100));
    if low >= high {
        f.invalid(format!(
            "imageGCLowThresholdPercent (--image-gc-low-threshold) {low} must be less than \
             imageGCHighThresholdPercent (--image-gc-high-threshold) {high}"
        ));
    }
    let (youngest, oldest) = (c.image_minimum_gc_age, c.image_maximum_gc_age);
    if youngest < GoDuration::ZERO {
        f.invalid(format!("imageMinimumGCAge {youngest} must not be negative"));
    }
    if oldest < GoDuration::ZERO {
        f.invalid(format!("imageMaximumGCAge {oldest} must not be negative"));
    }
    if oldest > GoDuration::ZERO && oldest <= youngest {
        f.invalid(format!("imageMaximumGCAge {oldest} must be greater than imageMinimumGCAge {youngest}"));
    }
}

fn pulls_and_bootstrap(ValidationInput { config: c, gates, .. }: ValidationInput<'_>, f: &mut Failures) {
    if let Some(pulls) = c.max_parallel_image_pulls {
        if pulls < 1 {
            f.invalid(format!("maxParallelImagePulls {pulls} must be a positive number"));
        }
        if pulls > 1 && c.serialize_image_pulls {
            f.invalid(
                "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls (--serialize-image-pulls) is \
                 set to false",
            );
        }
    }
    if c.server_tls_bootstrap && !gates.enabled("RotateKubeletServerCertificate") {
        f.invalid("serverTLSBootstrap true requires feature gate RotateKubeletServerCertificate");
    }
    if c.run_once {
        f.invalid("runOnce (--runOnce) true, Runonce mode has been deprecated and should not be set");
    }
}

fn taints(ValidationInput { config: c, .. }: ValidationInput<'_>, f: &mut Failures) {
    for taint in &c.register_with_taints {
        let named = names::qualified_name(&taint.key).is_empty() && names::label_value(&taint.value).is_empty();
        if !named || !(taint.effect.is_empty() || is_taint_effect(&taint.effect)) {
            f.bare(format!("invalid taint: {}", shown_taint(taint)));
        }
        if taint.time_added.is_some() {
            f.invalid("taint.TimeAdded is not nil");
        }
    }
}

/// Applies the rules after logging: endpoint, log query, container logs, pod logs.
pub(super) fn check_late(ValidationInput { config: c, .. }: ValidationInput<'_>, f: &mut Failures) {
    if c.container_runtime_endpoint.is_empty() {
        f.invalid("the containerRuntimeEndpoint was not specified or empty");
    }
    if c.enable_system_log_query && !c.enable_system_log_handler {
        f.invalid("enableSystemLogHandler is required for enableSystemLogQuery");
    }
    if c.container_log_max_workers < 1 {
        f.invalid("containerLogMaxWorkers must be greater than or equal to 1");
    }
    if c.container_log_monitor_interval < GoDuration::from_secs(3) {
        f.invalid("containerLogMonitorInterval must be a positive time duration greater than or equal to 3s");
    }
    if c.container_log_max_files <= 1 {
        f.invalid("containerLogMaxFiles must be greater than 1");
    }
    let logs = &c.pod_logs_dir;
    let shown = quote(logs);
    if logs.is_empty() {
        f.invalid("podLogsDir was not specified");
    }
    if !logs.starts_with('/') {
        f.invalid(format!("pod logs path {shown} must be absolute path"));
    }
    if clean_path(logs) != *logs {
        f.invalid(format!("pod logs path {shown} must be normalized"));
    }
    if !logs.is_ascii() {
        f.invalid(format!("pod logs path {shown} mut contains ASCII characters only"));
    }
}
