//! Settings that are accepted, validated, and shown, but whose feature is not implemented. Pure.
//!
//! A table: the change that implements a feature deletes its row. Each setting that differs from its default is logged once at
//! startup, so that no setting is ignored silently.

use super::{
    defaults,
    fields::KubeletConfiguration,
    flags::KubeletFlags,
    gates::{ALL_ALPHA, ALL_BETA, FeatureGates},
};

/// Gates that the agent consults; `tests/it/tidy.rs` checks the list against the sources.
pub const CONSULTED: &[&str] = &[
    "AllowDNSOnlyNodeCSR",
    "CPUManagerPolicyAlphaOptions",
    "CPUManagerPolicyBetaOptions",
    "CRIListStreaming",
    "CSIVolumeHealth",
    "ClusterTrustBundleProjection",
    "ComponentFlagz",
    "ComponentStatusz",
    "ContainerCheckpoint",
    "ContainerStopSignals",
    "CustomCPUCFSQuotaPeriod",
    "DisableCPUQuotaWithExclusiveCPUs",
    "DynamicResourceAllocation",
    "ExtendWebSocketsToKubelet",
    "GracefulNodeShutdown",
    "GracefulNodeShutdownBasedOnPodPriority",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingExclusiveCPUs",
    "InPlacePodVerticalScalingExclusiveMemory",
    "InPlacePodVerticalScalingInitContainers",
    "KubeletCrashLoopBackOffMax",
    "KubeletEnsureSecretPulledImages",
    "KubeletInUserNamespace",
    "KubeletPodResourcesListUseActivePods",
    "KubeletServiceAccountTokenForCredentialProviders",
    "LoggingAlphaOptions",
    "LoggingBetaOptions",
    "NodeDeclaredFeatures",
    "PodAndContainerStatsFromCRI",
    "PodCertificateRequest",
    "PodLevelResourceManagers",
    "PodLevelResources",
    "PodLogsQuerySplitStreams",
    "PodsAPI",
    "PreventStaticPodAPIReferences",
    "ReduceDefaultCrashLoopBackOffDecay",
    "ReloadKubeletServerCertificateFile",
    "ResourceHealthStatus",
    "ResourceHealthStatusMessage",
    "RestartAllContainersOnContainerExits",
    "RotateKubeletServerCertificate",
    "RuntimeClassInImageCriApi",
    "SELinuxMount",
];

/// Gates without effect in kubelet either: both options of the topology manager are stable.
const WITHOUT_OPTIONS: [&str; 2] = ["TopologyManagerPolicyAlphaOptions", "TopologyManagerPolicyBetaOptions"];

/// A setting without effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnimplementedSetting {
    /// Field name, flag with its dashes, or gate as `featureGates.Name`.
    pub setting: String,
    /// The missing feature.
    pub feature: &'static str,
}

type Differs<T> = fn(&T, &T) -> bool;

/// Setting, the feature it requires, and whether it differs from the default.
type Row<T> = (&'static str, &'static str, Differs<T>);

macro_rules! waiting {
    ($($feature:literal: $($setting:literal => $($part:ident).+),+;)+) => {
        &[$($(($setting, $feature, |mine, default| mine.$($part).+ != default.$($part).+)),+),+]
    };
}

const FIELDS: &[Row<KubeletConfiguration>] = waiting! {
    "lock contention profiling": "enableContentionProfiling" => enable_contention_profiling;
    "API content types other than JSON": "contentType" => content_type;
    "memory QoS":
        "qosReserved" => qos_reserved, "memoryThrottlingFactor" => memory_throttling_factor,
        "memoryReservationPolicy" => memory_reservation_policy;
    "moving processes into cgroups": "kubeletCgroups" => kubelet_cgroups, "systemCgroups" => system_cgroups;
    "pod CIDR in standalone mode": "podCIDR" => pod_cidr;
    "hidden metrics": "showHiddenMetricsForVersion" => show_hidden_metrics_for_version;
    "FlexVolume plugins": "volumePluginDir" => volume_plugin_dir;
};

const FLAGS: &[Row<KubeletFlags>] = waiting! {
    "container housekeeping interval":
        "--housekeeping-interval" => housekeeping_interval,
        "--max-housekeeping-interval" => max_housekeeping_interval;
    "mounter binary": "--experimental-mounter-path" => experimental_mounter_path;
    "boot and machine ID files": "--boot-id-file" => boot_id_file, "--machine-id-file" => machine_id_file;
};

/// Returns the settings that differ from their defaults and have no effect yet, in the order of the table.
pub fn unimplemented_settings(config: &KubeletConfiguration, flags: &KubeletFlags) -> Vec<UnimplementedSetting> {
    let (default, default_flags) = (defaults::defaults(), KubeletFlags::default());
    let to_setting = |(setting, feature): (&'static str, &'static str)| UnimplementedSetting {
        setting: setting.to_owned(),
        feature,
    };
    let fields = FIELDS.iter().filter(|row| row.2(config, &default)).map(|row| to_setting((row.0, row.1)));
    let flags = FLAGS.iter().filter(|row| row.2(flags, &default_flags)).map(|row| to_setting((row.0, row.1)));
    fields.chain(flags).chain(gates(config)).collect()
}

/// Gates that differ from their default and are not consulted. Gates of other cluster components are often set in the
/// same list, and are reported too.
fn gates(config: &KubeletConfiguration) -> impl Iterator<Item = UnimplementedSetting> {
    let defaults = FeatureGates::new();
    let differs = move |name: &str, value: bool| defaults.enabled(name) != value;
    let is_implemented = |name: &str| {
        CONSULTED.contains(&name) || WITHOUT_OPTIONS.contains(&name) || name == ALL_ALPHA || name == ALL_BETA
    };
    let idle = config.feature_gates.iter().filter(move |(name, value)| differs(name, **value) && !is_implemented(name));
    let feature = "the feature of this gate";
    idle.map(move |(name, _)| UnimplementedSetting { setting: format!("featureGates.{name}"), feature })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_settings_are_reported() {
        let mut config = defaults::defaults();
        let mut flags = KubeletFlags::default();
        assert_eq!(unimplemented_settings(&config, &flags), []);
        config.enable_contention_profiling = true;
        config.max_pods = 5;
        flags.boot_id_file = "/k".to_owned();
        let gates = [("NativeHistograms", true), ("MemoryQoS", true), ("CRIListStreaming", true), ("AllAlpha", true)];
        config.feature_gates = gates.map(|(name, value)| (name.to_owned(), value)).into();
        let reported: Vec<_> = unimplemented_settings(&config, &flags).into_iter().map(|n| n.setting).collect();
        let gates = ["featureGates.MemoryQoS", "featureGates.NativeHistograms"];
        assert_eq!(reported, [&["enableContentionProfiling", "--boot-id-file"], &gates[..]].concat());
    }

    #[test]
    fn settings_of_the_resource_managers_have_an_effect() {
        let mut config = defaults::defaults();
        config.cpu_manager_policy = "static".to_owned();
        config.cpu_manager_policy_options = [("align-by-socket".to_owned(), "true".to_owned())].into();
        config.memory_manager_policy = "Static".to_owned();
        config.topology_manager_policy = "restricted".to_owned();
        config.topology_manager_scope = "pod".to_owned();
        config.topology_manager_policy_options = [("prefer-closest-numa-nodes".to_owned(), "true".to_owned())].into();
        let gates = [
            ("CPUManagerPolicyAlphaOptions", true),
            ("CPUManagerPolicyBetaOptions", false),
            ("DisableCPUQuotaWithExclusiveCPUs", false),
            ("InPlacePodVerticalScalingExclusiveCPUs", true),
            ("InPlacePodVerticalScalingExclusiveMemory", true),
            ("PodLevelResourceManagers", true),
            ("TopologyManagerPolicyAlphaOptions", true),
            ("TopologyManagerPolicyBetaOptions", false),
        ];
        config.feature_gates = gates.map(|(name, value)| (name.to_owned(), value)).into();
        assert_eq!(unimplemented_settings(&config, &KubeletFlags::default()), []);
    }
}
