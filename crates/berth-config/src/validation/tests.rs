//! Table of validation rules: an invalid setting and its error text per row.

use serde_json::{Value, json};

use super::*;
use crate::{
    defaults,
    json_decoder::{Names, decode},
};

fn judged_on(document: &Value, host: &HostFacts) -> Result<(), String> {
    let typed = decode::<KubeletConfiguration>(document, Names::Exact).expect("well typed");
    let mut config = typed.value;
    defaults::fill(&mut config, &typed.present, &FeatureGates::new()).expect("no locked gate");
    validate(&config, &FeatureGates::new(), host)
}

fn judged(document: &Value) -> Result<(), String> {
    judged_on(document, &HostFacts::default())
}

#[track_caller]
fn refused(document: Value, error: &str) {
    assert_eq!(judged(&document), Err(format!("invalid configuration: {error}")), "{document}");
}

#[track_caller]
fn refused_bare(document: Value, error: &str) {
    assert_eq!(judged(&document), Err(error.to_owned()), "{document}");
}

#[test]
fn the_defaults_are_valid() {
    assert_eq!(judged(&json!({})), Ok(()));
}

#[test]
fn numbers_are_bounded() {
    refused(json!({"nodeLeaseDurationSeconds": -1}), "nodeLeaseDurationSeconds must be greater than 0");
    refused(json!({"eventBurst": -1}), "eventBurst (--event-burst) -1 must not be a negative number");
    refused(json!({"eventRecordQPS": -1}), "eventRecordQPS (--event-qps) -1 must not be a negative number");
    refused(json!({"healthzPort": 65536}), "healthzPort (--healthz-port) 65536 must be between 1 and 65535, inclusive");
    refused(
        json!({"iptablesDropBit": 32}),
        "iptablesDropBit (--iptables-drop-bit) 32 must be between 0 and 31, inclusive",
    );
    refused(
        json!({"iptablesMasqueradeBit": -1}),
        "iptablesMasqueradeBit (--iptables-masquerade-bit) -1 must be between 0 and 31, inclusive",
    );
    refused(json!({"kubeAPIBurst": -1}), "kubeAPIBurst (--kube-api-burst) -1 must not be a negative number");
    refused(json!({"kubeAPIQPS": -1}), "kubeAPIQPS (--kube-api-qps) -1 must not be a negative number");
    refused(
        json!({"nodeStatusMaxImages": -2}),
        "nodeStatusMaxImages (--node-status-max-images) -2 must be -1 or greater",
    );
    refused(json!({"maxOpenFiles": -1}), "maxOpenFiles (--max-open-files) -1 must not be a negative number");
    refused(json!({"maxPods": -1}), "maxPods (--max-pods) -1 must not be a negative number");
    refused(
        json!({"oomScoreAdj": 1001}),
        "oomScoreAdj (--oom-score-adj) 1001 must be between -1000 and 1000, inclusive",
    );
    refused(json!({"podsPerCore": -1}), "podsPerCore (--pods-per-core) -1 must not be a negative number");
    refused(json!({"port": 70000}), "port (--port) 70000 must be between 1 and 65535, inclusive");
    refused(json!({"readOnlyPort": -1}), "readOnlyPort (--read-only-port) -1 must be between 0 and 65535, inclusive");
    refused(json!({"registryBurst": -1}), "registryBurst (--registry-burst) -1 must not be a negative number");
    refused(json!({"registryPullQPS": -1}), "registryPullQPS (--registry-qps) -1 must not be a negative number");
    refused(
        json!({"systemCgroups": "/s"}),
        "systemCgroups (--system-cgroups) was specified and cgroupRoot (--cgroup-root) was not specified",
    );
}

#[test]
fn durations_and_image_ages_are_bounded() {
    refused(
        json!({"cpuCFSQuotaPeriod": "2s"}),
        "cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {2s} must be between 1ms and 1sec, inclusive",
    );
    refused(
        json!({"cpuCFSQuotaPeriod": "200ms", "featureGates": {"CustomCPUCFSQuotaPeriod": false}}),
        "cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {200ms} requires feature gate CustomCPUCFSQuotaPeriod",
    );
    // AC-01-18
    refused(
        json!({"imageGCHighThresholdPercent": 80}),
        "imageGCLowThresholdPercent (--image-gc-low-threshold) 80 must be less than imageGCHighThresholdPercent \
         (--image-gc-high-threshold) 80",
    );
    refused(
        json!({"imageGCHighThresholdPercent": 101}),
        "imageGCHighThresholdPercent (--image-gc-high-threshold) 101 must be between 0 and 100, inclusive",
    );
    refused(json!({"imageMinimumGCAge": "-1s"}), "imageMinimumGCAge -1s must not be negative");
    refused(json!({"imageMaximumGCAge": "-1s"}), "imageMaximumGCAge -1s must not be negative");
    refused(json!({"imageMaximumGCAge": "1m"}), "imageMaximumGCAge 1m0s must be greater than imageMinimumGCAge 2m0s");
}

#[test]
fn pulls_bootstrap_and_taints() {
    refused(json!({"maxParallelImagePulls": 0}), "maxParallelImagePulls 0 must be a positive number");
    refused(
        json!({"maxParallelImagePulls": 2, "serializeImagePulls": true}),
        "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls (--serialize-image-pulls) is set to \
         false",
    );
    refused(
        json!({"serverTLSBootstrap": true, "featureGates": {"RotateKubeletServerCertificate": false}}),
        "serverTLSBootstrap true requires feature gate RotateKubeletServerCertificate",
    );
    refused(
        json!({"runOnce": true}),
        "runOnce (--runOnce) true, Runonce mode has been deprecated and should not be set",
    );
    refused_bare(
        json!({"registerWithTaints": [{"key": "a b", "value": "v", "effect": "NoSchedule"}]}),
        "invalid taint: {a b v NoSchedule <nil>}",
    );
    refused_bare(json!({"registerWithTaints": [{"key": "a", "effect": "Now"}]}), "invalid taint: {a  Now <nil>}");
    refused(
        json!({"registerWithTaints": [{"key": "a", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}]}),
        "taint.TimeAdded is not nil",
    );
}

#[test]
fn policies_have_names() {
    refused(
        json!({"topologyManagerPolicy": "x"}),
        "topologyManagerPolicy (--topology-manager-policy) \"x\" must be one of: [\"none\" \"best-effort\" \
         \"restricted\" \"single-numa-node\"]",
    );
    refused(
        json!({"topologyManagerScope": "x"}),
        "topologyManagerScope (--topology-manager-scope) \"x\" must be one of: \"container\", or \"pod\"",
    );
    refused(
        json!({"hairpinMode": "x"}),
        "option \"x\" specified for hairpinMode (--hairpin-mode). Valid options are \"none\", \"hairpin-veth\" or \
         \"promiscuous-bridge\"",
    );
    refused(
        json!({"memorySwap": {"swapBehavior": "Unlimited"}}),
        "memorySwap.swapBehavior \"Unlimited\" must be one of: \"\", \"LimitedSwap\" or \"NoSwap\"",
    );
    refused(
        json!({"memoryReservationPolicy": "x"}),
        "option \"x\" specified for memoryReservationPolicy. Valid options are \"None\" or \"TieredReservation\"",
    );
    refused(
        json!({"memoryReservationPolicy": "TieredReservation"}),
        "memoryReservationPolicy \"TieredReservation\" requires MemoryQoS feature gate to be enabled",
    );
    refused(
        json!({"memoryThrottlingFactor": 1.5}),
        "memoryThrottlingFactor 1.5 must be greater than 0 and less than or equal to 1.0",
    );
}

#[test]
fn shutdown_and_restart_periods() {
    refused(
        json!({"shutdownGracePeriod": "10s", "shutdownGracePeriodCriticalPods": "20s"}),
        "shutdownGracePeriodCriticalPods {20s} must be <= shutdownGracePeriod {10s}",
    );
    refused(
        json!({"shutdownGracePeriod": "100ms"}),
        "shutdownGracePeriod {100ms} must be either zero or otherwise >= 1 sec",
    );
    refused(
        json!({"shutdownGracePeriod": "10s", "featureGates": {"GracefulNodeShutdown": false, "GracefulNodeShutdownBasedOnPodPriority": false}}),
        "specifying shutdownGracePeriod or shutdownGracePeriodCriticalPods requires feature gate GracefulNodeShutdown",
    );
    let by_priority = json!([{"priority": 0, "shutdownGracePeriodSeconds": 10}]);
    refused(
        json!({"shutdownGracePeriod": "10s", "shutdownGracePeriodByPodPriority": by_priority}),
        "Cannot specify both shutdownGracePeriodByPodPriority and shutdownGracePeriod at the same time",
    );
    refused(
        json!({"shutdownGracePeriodByPodPriority": by_priority, "featureGates": {"GracefulNodeShutdownBasedOnPodPriority": false}}),
        "Specifying shutdownGracePeriodByPodPriority requires feature gate GracefulNodeShutdownBasedOnPodPriority",
    );
    refused(
        json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "301s"}}),
        "CrashLoopBackOff.MaxContainerRestartPeriod (got: 301 seconds) must be set between 1s and 300s",
    );
    refused(
        json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "10s"}, "featureGates": {"KubeletCrashLoopBackOffMax": false}}),
        "FeatureGate KubeletCrashLoopBackOffMax not enabled, CrashLoopBackOff.MaxContainerRestartPeriod must not be set",
    );
}

#[test]
fn enforcement_is_consistent() {
    const E: &str = "enforceNodeAllocatable (--enforce-node-allocatable)";
    refused(
        json!({"enforceNodeAllocatable": ["kube-reserved", "kube-reserved-compressible"], "kubeReservedCgroup": "/k"}),
        &format!("both \"kube-reserved\" and \"kube-reserved-compressible\" cannot be specified together in {E}"),
    );
    refused(json!({"enforceNodeAllocatable": ["pods", "pods"]}), &format!("duplicated enforcements \"pods\" in {E}"));
    refused(
        json!({"enforceNodeAllocatable": ["system-reserved"]}),
        &format!(
            "systemReservedCgroup (--system-reserved-cgroup) must be specified when \"system-reserved\" or \
             \"system-reserved-compressible\" included in {E}"
        ),
    );
    refused(
        json!({"enforceNodeAllocatable": ["none", "pods"]}),
        &format!("{E} may not contain additional enforcements when \"none\" is specified"),
    );
    refused(
        json!({"enforceNodeAllocatable": ["all"]}),
        &format!(
            "option \"all\" specified for {E}. Valid options are \"pods\", \"system-reserved\", \
             \"system-reserved-compressible\", \"kube-reserved\", \"kube-reserved-compressible\" or \"none\""
        ),
    );
    refused(
        json!({"cgroupsPerQOS": false}),
        &format!("cgroupsPerQOS (--cgroups-per-qos) must be set to true when \"pods\" contained in {E}"),
    );
    assert_eq!(judged(&json!({"cgroupsPerQOS": false, "enforceNodeAllocatable": ["none"]})), Ok(()));
}

#[test]
fn the_pull_policy_and_its_list() {
    refused(
        json!({"imagePullCredentialsVerificationPolicy": "x"}),
        "option \"x\" specified for imagePullCredentialsVerificationPolicy. Valid options are \"NeverVerify\", \
         \"NeverVerifyPreloadedImages\", \"NeverVerifyAllowlistedImages\" or \"AlwaysVerify\"",
    );
    refused(
        json!({"imagePullCredentialsVerificationPolicy": "NeverVerify", "featureGates": {"KubeletEnsureSecretPulledImages": false}}),
        "`imagePullCredentialsVerificationPolicy` must not be set if KubeletEnsureSecretPulledImages feature gate is \
         not enabled",
    );
    refused(
        json!({"preloadedImagesVerificationAllowlist": ["a"]}),
        "can't set `preloadedImagesVerificationAllowlist` if `imagePullCredentialsVertificationPolicy` is not \
         \"NeverVerifyAllowlistedImages\"",
    );
    for (pattern, good) in [
        ("docker.io/library/busybox", true),
        ("registry:5000/a/*", true),
        (" a", false),
        ("a/*/b", false),
        ("a*", false),
        ("a/b:latest", false),
        ("busybox:latest", false),
        ("a@sha256:0", false),
    ] {
        let document = json!({
            "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
            "preloadedImagesVerificationAllowlist": [pattern],
        });
        assert_eq!(judged(&document).is_ok(), good, "{pattern}");
    }
}

#[test]
fn reservations_and_the_kernel() {
    refused(
        json!({"reservedSystemCPUs": "0", "kubeReservedCgroup": "/k"}),
        "can't use reservedSystemCPUs (--reserved-cpus) with systemReservedCgroup (--system-reserved-cgroup) or \
         kubeReservedCgroup (--kube-reserved-cgroup)",
    );
    refused(
        json!({"reservedSystemCPUs": "x"}),
        "unable to parse reservedSystemCPUs (--reserved-cpus) x, error: strconv.Atoi: parsing \"x\": invalid syntax",
    );
    refused(
        json!({"reservedMemory": [{"numaNode": 0, "limits": {"cpu": "1"}}]}),
        "the limit type \"cpu\" for NUMA node 0 is not supported, only [memory hugepages-<HugePageSize>] is accepted",
    );
    refused(
        json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": 0}}]}),
        "reserved memory may not be zero for NUMA node 0 and resource \"memory\"",
    );
    let one = json!({"numaNode": 1, "limits": {"memory": "1Gi"}});
    refused(
        json!({"reservedMemory": [one, one]}),
        "the reserved memory has a duplicate value for NUMA node 1 and resource \"memory\"",
    );
    for (ids, must) in [
        (0_i64, "not be less than 65536"),
        (65_537, "be a multiple of 65536"),
        (1 << 40, "not be more than 4294967295"),
    ] {
        refused(json!({"userNamespaces": {"idsPerPod": ids}}), &format!("userNamespaces.idsPerPod must {must}"));
    }
    let v1 = HostFacts { cgroup_v1: true, ..HostFacts::default() };
    assert!(judged_on(&json!({}), &v1).is_err_and(|e| e.starts_with("kubelet is configured to not run on a host")));
    assert_eq!(
        judged_on(&json!({"failCgroupV1": false, "singleProcessOOMKill": false}), &v1),
        Err("invalid configuration: singleProcessOOMKill must not be explicitly set to false when using cgroup v1"
            .into())
    );
    refused_bare(
        json!({"showHiddenMetricsForVersion": "1.34"}),
        "invalid showHiddenMetricsForVersion: showHiddenMetricsForVersion: Invalid value: \"1.34\": must be omitted or \
         have the value '1.35'; only the previous minor version is allowed",
    );
}

#[test]
fn logging_and_tracing() {
    for (logging, error) in [
        (json!({"format": "xml"}), "logging.format: Invalid value: \"xml\": Unsupported log format"),
        (json!({"flushFrequency": "-1s"}), "logging.flushFrequency: Invalid value: \"-1s\": Must be greater than zero"),
        (
            json!({"verbosity": 2_147_483_648_u32}),
            "logging.verbosity: Invalid value: 2147483648: Must be <= 2147483647",
        ),
        (
            json!({"format": "json", "vmodule": [{"filePattern": "a", "verbosity": 1}]}),
            "logging.vmodule: Forbidden: Only supported for text log format",
        ),
        (
            json!({"vmodule": [{"filePattern": "", "verbosity": 1}]}),
            "logging.vmodule[0]: Required value: File pattern must not be empty",
        ),
        (
            json!({"vmodule": [{"filePattern": "a=b", "verbosity": 1}]}),
            "logging.vmodule[0]: Invalid value: \"a=b\": File pattern must not contain equal sign or comma",
        ),
        (
            json!({"options": {"text": {"splitStream": true}}}),
            "logging.options.text.splitStream: Forbidden: Feature LoggingAlphaOptions is disabled",
        ),
        (
            json!({"options": {"json": {"infoBufferSize": "1Mi"}}}),
            "logging.options.json.infoBufferSize: Forbidden: Feature LoggingAlphaOptions is disabled",
        ),
    ] {
        refused_bare(json!({"logging": logging}), error);
    }
    refused_bare(
        json!({"logging": {"format": "json"}, "featureGates": {"LoggingBetaOptions": false}}),
        "logging.format: Forbidden: Log format json is disabled, see LoggingBetaOptions feature",
    );
    refused_bare(
        json!({"tracing": {"samplingRatePerMillion": -1}}),
        "tracing.samplingRatePerMillion: Invalid value: -1: sampling rate must be positive",
    );
    assert!(
        judged(&json!({"tracing": {"endpoint": "http://x"}})).is_err_and(|e| e.contains("unsupported scheme: http"))
    );
    assert_eq!(judged(&json!({"tracing": {"endpoint": "localhost:4317", "samplingRatePerMillion": 100}})), Ok(()));
}

#[test]
fn container_and_pod_logs() {
    refused(json!({"containerLogMaxFiles": 1}), "containerLogMaxFiles must be greater than 1");
    refused(json!({"containerLogMaxWorkers": 0}), "containerLogMaxWorkers must be greater than or equal to 1");
    refused(
        json!({"containerLogMonitorInterval": "2s"}),
        "containerLogMonitorInterval must be a positive time duration greater than or equal to 3s",
    );
    refused(
        json!({"enableSystemLogHandler": false, "enableSystemLogQuery": true}),
        "enableSystemLogHandler is required for enableSystemLogQuery",
    );
    refused(json!({"podLogsDir": "logs"}), "pod logs path \"logs\" must be absolute path");
    refused(json!({"podLogsDir": "/var/log/pods/"}), "pod logs path \"/var/log/pods/\" must be normalized");
    refused(json!({"podLogsDir": "/lög"}), "pod logs path \"/lög\" mut contains ASCII characters only");
}

#[test]
fn several_failures_come_together_in_order() {
    // AC-01-19
    refused_bare(
        json!({"maxPods": -1, "eventBurst": -1}),
        "[invalid configuration: eventBurst (--event-burst) -1 must not be a negative number, invalid configuration: \
         maxPods (--max-pods) -1 must not be a negative number]",
    );
    // AC-01-22
    assert!(judged(&json!({"featureGates": {"NodeDeclaredFeatures": false}})).is_err_and(|e| e.starts_with(
        "[ExtendWebSocketsToKubelet is enabled, but depends on features that are \
                disabled: [NodeDeclaredFeatures], "
    )));
}
