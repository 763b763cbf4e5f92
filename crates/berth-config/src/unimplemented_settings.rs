//! Settings that are accepted, validated, and shown, but whose feature is not implemented. Pure.
//!
//! A table: the change that implements a feature deletes its row. Each setting that differs from its default is logged
//! once at startup, so that no setting is ignored silently. Settings whose purpose is met without them, such as
//! `--housekeeping-interval`, are not listed here but in `docs/differences.md`.

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
    "MemoryQoS",
    "NodeDeclaredFeatures",
    "PodAndContainerStatsFromCRI",
    "PodCertificateRequest",
    "PodLevelResourceManagers",
    "PodLevelResources",
    "PodLogsQuerySplitStreams",
    "PodsAPI",
    "PreventStaticPodAPIReferences",
    "QOSReserved",
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
    "FlexVolume plugins": "volumePluginDir" => volume_plugin_dir;
};

/// Requests to the API server are always JSON. A client of the default type, protobuf, accepts JSON as well.
const CONTENT_TYPE: Row<KubeletConfiguration> =
    ("contentType", "API content types other than JSON", |mine, _| !is_json_or_protobuf(&mine.content_type));

/// Whether a client with this content type accepts JSON. An empty type means JSON; parameters do not matter.
fn is_json_or_protobuf(content_type: &str) -> bool {
    let media_type = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    ["", "application/json", "application/vnd.kubernetes.protobuf"].contains(&media_type.as_str())
}

const FLAGS: &[Row<KubeletFlags>] = waiting! {
    "mounter binary": "--experimental-mounter-path" => experimental_mounter_path;
};

/// Returns the settings that differ from their defaults and have no effect yet, in the order of the table.
pub fn unimplemented_settings(config: &KubeletConfiguration, flags: &KubeletFlags) -> Vec<UnimplementedSetting> {
    let (default, default_flags) = (defaults::defaults(), KubeletFlags::default());
    let to_setting = |(setting, feature): (&'static str, &'static str)| UnimplementedSetting {
        setting: setting.to_owned(),
        feature,
    };
    let fields = FIELDS.iter().chain([&CONTENT_TYPE]).filter(|row| row.2(config, &default));
    let fields = fields.map(|row| to_setting((row.0, row.1)));
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
    use crate::GoDuration;

    #[test]
    fn only_changed_settings_are_reported() {
        let mut config = defaults::defaults();
        let mut flags = KubeletFlags::default();
        assert_eq!(unimplemented_settings(&config, &flags), []);
        config.enable_contention_profiling = true;
        config.max_pods = 5;
        flags.experimental_mounter_path = "/m".to_owned();
        let gates = [
            ("NativeHistograms", true),
            ("CBORServingAndStorage", true),
            ("CRIListStreaming", true),
            ("AllAlpha", true),
        ];
        config.feature_gates = gates.map(|(name, value)| (name.to_owned(), value)).into();
        let reported: Vec<_> = unimplemented_settings(&config, &flags).into_iter().map(|n| n.setting).collect();
        let gates = ["featureGates.CBORServingAndStorage", "featureGates.NativeHistograms"];
        assert_eq!(reported, [&["enableContentionProfiling", "--experimental-mounter-path"], &gates[..]].concat());
    }

    #[test]
    fn only_content_types_that_exclude_json_are_reported() {
        for (content_type, is_reported) in [
            ("application/vnd.kubernetes.protobuf", false),
            ("application/json", false),
            ("Application/JSON; charset=utf-8", false),
            ("", false),
            ("application/yaml", true),
            ("application/cbor", true),
            ("json", true),
        ] {
            let config = KubeletConfiguration { content_type: content_type.to_owned(), ..defaults::defaults() };
            let reported = unimplemented_settings(&config, &KubeletFlags::default());
            let names: Vec<&str> = reported.iter().map(|unimplemented| unimplemented.setting.as_str()).collect();
            let expected: &[&str] = if is_reported { &["contentType"] } else { &[] };
            assert_eq!(names, expected, "{content_type}");
        }
    }

    #[test]
    fn settings_whose_purpose_is_met_are_not_reported() {
        let mut config = defaults::defaults();
        config.pod_cidr = "10.0.0.0/24".to_owned();
        config.show_hidden_metrics_for_version = "1.35".to_owned();
        let flags = KubeletFlags {
            housekeeping_interval: GoDuration::from_secs(1),
            max_housekeeping_interval: GoDuration::from_secs(60),
            machine_id_file: "/m".to_owned(),
            boot_id_file: "/b".to_owned(),
            ..KubeletFlags::default()
        };
        assert_eq!(unimplemented_settings(&config, &flags), []);
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
