//! `KubeletConfiguration` v1beta1, every field in the reference's declaration order. Pure.
//!
//! One struct is all three of: what the decoder reads (its zero value stands for "unset"), what the
//! agent runs with once `defaults` has filled it, and what `/configz` shows. For the last, plain
//! fields that upstream keeps behind a pointer are always written, the others only when not empty
//! (spec 01 §7.2). The structs bear the reference's names because error texts contain them.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::duration::GoDuration;
use berth_types::quantity::Amount;

/// `kind` of the configuration.
pub const KIND: &str = "KubeletConfiguration";
/// `apiVersion` of the configuration.
pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";

/// The configuration of the agent; meaning and defaults: spec 01 §4.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletConfiguration {
    /// Always [`KIND`] once loaded.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Always [`API_VERSION`] once loaded.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    /// Whether the HTTPS server runs.
    pub enable_server: bool,
    /// Directory of static pods, or one static pod file.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub static_pod_path: String,
    /// Root of the pods' log directories.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod_logs_dir: String,
    /// Longest time between two syncs of a pod.
    pub sync_frequency: GoDuration,
    /// Time between two reads of `staticPodPath`.
    pub file_check_frequency: GoDuration,
    /// Time between two reads of `staticPodURL`.
    pub http_check_frequency: GoDuration,
    /// Where static pods are fetched from.
    #[serde(rename = "staticPodURL", skip_serializing_if = "String::is_empty")]
    pub static_pod_url: String,
    /// Headers sent to `staticPodURL`; may hold secrets.
    #[serde(rename = "staticPodURLHeader", skip_serializing_if = "BTreeMap::is_empty")]
    pub static_pod_url_header: BTreeMap<String, Vec<String>>,
    /// Where the servers listen.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub address: String,
    /// Port of the HTTPS server.
    #[serde(skip_serializing_if = "is_zero")]
    pub port: i32,
    /// Port of the read-only server; 0 is off.
    #[serde(skip_serializing_if = "is_zero")]
    pub read_only_port: i32,
    /// Serving certificate, PEM.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tls_cert_file: String,
    /// Key of the serving certificate, PEM.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tls_private_key_file: String,
    /// Allowed cipher suites by Go's names; empty is the default set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tls_cipher_suites: Vec<String>,
    /// Allowed key exchanges by Go's numbers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tls_curve_preferences: Vec<i32>,
    /// `VersionTLS10` to `VersionTLS13`; empty is 1.2.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tls_min_version: String,
    /// Whether client certificates are renewed.
    #[serde(skip_serializing_if = "is_false")]
    pub rotate_certificates: bool,
    /// Whether the serving certificate comes from the API.
    #[serde(rename = "serverTLSBootstrap", skip_serializing_if = "is_false")]
    pub server_tls_bootstrap: bool,
    /// Who may call.
    pub authentication: KubeletAuthentication,
    /// What callers may do.
    pub authorization: KubeletAuthorization,
    /// Image pulls per second; 0 is no limit.
    #[serde(rename = "registryPullQPS")]
    pub registry_pull_qps: i32,
    /// Burst of image pulls.
    #[serde(skip_serializing_if = "is_zero")]
    pub registry_burst: i32,
    /// When credentials of present images are verified.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_pull_credentials_verification_policy: String,
    /// Images exempt from that verification.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub preloaded_images_verification_allowlist: Vec<String>,
    /// Events per second.
    #[serde(rename = "eventRecordQPS")]
    pub event_record_qps: i32,
    /// Burst of events.
    #[serde(skip_serializing_if = "is_zero")]
    pub event_burst: i32,
    /// Whether logs, exec and friends are served.
    pub enable_debugging_handlers: bool,
    /// Whether lock contention is profiled.
    #[serde(skip_serializing_if = "is_false")]
    pub enable_contention_profiling: bool,
    /// Port of the healthz listener; 0 is off.
    pub healthz_port: i32,
    /// Address of the healthz listener.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub healthz_bind_address: String,
    /// `oom_score_adj` of the agent.
    pub oom_score_adj: i32,
    /// DNS domain of the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cluster_domain: String,
    /// Addresses of the cluster's DNS servers.
    #[serde(rename = "clusterDNS", skip_serializing_if = "Vec::is_empty")]
    pub cluster_dns: Vec<String>,
    /// No effect.
    pub streaming_connection_idle_timeout: GoDuration,
    /// Time between two computations of the node status.
    pub node_status_update_frequency: GoDuration,
    /// Time between two reports of an unchanged node status.
    pub node_status_report_frequency: GoDuration,
    /// Duration of the node's lease, seconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub node_lease_duration_seconds: i32,
    /// Unused images younger than this stay.
    #[serde(rename = "imageMinimumGCAge")]
    pub image_minimum_gc_age: GoDuration,
    /// Unused images older than this go; 0 is never.
    #[serde(rename = "imageMaximumGCAge")]
    pub image_maximum_gc_age: GoDuration,
    /// Disk usage above which images are collected.
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold_percent: i32,
    /// Disk usage down to which images are collected.
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold_percent: i32,
    /// Time between two measurements of volumes; negative is off.
    pub volume_stats_agg_period: GoDuration,
    /// Cgroup the agent moves into.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kubelet_cgroups: String,
    /// Cgroup for processes outside containers.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub system_cgroups: String,
    /// Parent of the pods' cgroups.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup_root: String,
    /// Whether there is a cgroup per QoS class and pod.
    #[serde(rename = "cgroupsPerQOS")]
    pub cgroups_per_qos: bool,
    /// `cgroupfs` or `systemd`; the runtime's answer wins.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup_driver: String,
    /// `none` or `static`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpu_manager_policy: String,
    /// Whether the OOM killer takes single processes.
    #[serde(rename = "singleProcessOOMKill", skip_serializing_if = "Option::is_none")]
    pub single_process_oom_kill: Option<bool>,
    /// Options of the CPU manager's policy.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// Time between two reconciliations of CPU sets.
    pub cpu_manager_reconcile_period: GoDuration,
    /// `None` or `Static`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub memory_manager_policy: String,
    /// `none`, `best-effort`, `restricted` or `single-numa-node`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub topology_manager_policy: String,
    /// `container` or `pod`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub topology_manager_scope: String,
    /// Options of the topology manager's policy.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Share of memory reserved for the guaranteed class.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub qos_reserved: BTreeMap<String, String>,
    /// Deadline of short runtime calls.
    pub runtime_request_timeout: GoDuration,
    /// How services reach themselves.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hairpin_mode: String,
    /// Most pods on the node.
    #[serde(skip_serializing_if = "is_zero")]
    pub max_pods: i32,
    /// Addresses of pods, standalone mode only.
    #[serde(rename = "podCIDR", skip_serializing_if = "String::is_empty")]
    pub pod_cidr: String,
    /// Most processes per pod; -1 is the node's limit.
    pub pod_pids_limit: i64,
    /// Resolver file given to pods; empty is none.
    pub resolv_conf: String,
    /// Removed; must not be set.
    #[serde(skip_serializing_if = "is_false")]
    pub run_once: bool,
    /// Whether CPU limits are enforced.
    #[serde(rename = "cpuCFSQuota")]
    pub cpu_cfs_quota: bool,
    /// Period of CPU quotas.
    #[serde(rename = "cpuCFSQuotaPeriod")]
    pub cpu_cfs_quota_period: GoDuration,
    /// Images listed in the node status; -1 is all.
    pub node_status_max_images: i32,
    /// Open files of the agent.
    #[serde(skip_serializing_if = "is_zero")]
    pub max_open_files: i64,
    /// Content type of API requests.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub content_type: String,
    /// API requests per second.
    #[serde(rename = "kubeAPIQPS")]
    pub kube_api_qps: i32,
    /// Burst of API requests.
    #[serde(rename = "kubeAPIBurst", skip_serializing_if = "is_zero")]
    pub kube_api_burst: i32,
    /// Whether images are pulled one at a time.
    pub serialize_image_pulls: bool,
    /// Most pulls at a time; absent is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_parallel_image_pulls: Option<i32>,
    /// Hard eviction thresholds.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_hard: BTreeMap<String, String>,
    /// Soft eviction thresholds.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_soft: BTreeMap<String, String>,
    /// Grace of each soft threshold.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_soft_grace_period: BTreeMap<String, String>,
    /// How long pressure lasts after its cause is gone.
    pub eviction_pressure_transition_period: GoDuration,
    /// Longest pod grace at soft evictions, seconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub eviction_max_pod_grace_period: i32,
    /// Least to reclaim per signal.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_minimum_reclaim: BTreeMap<String, String>,
    /// Whether `evictionHard` keeps the defaults it does not name.
    pub merge_default_eviction_settings: bool,
    /// Most pods per core; 0 is no limit.
    #[serde(skip_serializing_if = "is_zero")]
    pub pods_per_core: i32,
    /// Whether the controller attaches volumes.
    pub enable_controller_attach_detach: bool,
    /// Whether wrong kernel settings are an error.
    #[serde(skip_serializing_if = "is_false")]
    pub protect_kernel_defaults: bool,
    /// Whether the hint chain is made.
    #[serde(rename = "makeIPTablesUtilChains")]
    pub make_iptables_util_chains: bool,
    /// No effect.
    pub iptables_masquerade_bit: i32,
    /// No effect.
    pub iptables_drop_bit: i32,
    /// Feature gates by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub feature_gates: BTreeMap<String, bool>,
    /// Whether swap stops the agent from starting.
    pub fail_swap_on: bool,
    /// Swap for pods.
    pub memory_swap: MemorySwapConfiguration,
    /// Size at which a container's log is rotated.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container_log_max_size: String,
    /// Log files kept per container.
    pub container_log_max_files: i32,
    /// Rotations at a time.
    pub container_log_max_workers: i32,
    /// Time between two looks at the logs.
    pub container_log_monitor_interval: GoDuration,
    /// `Get`, `Cache` or `Watch`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub config_map_and_secret_change_detection_strategy: String,
    /// Resources reserved for the system.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub system_reserved: BTreeMap<String, String>,
    /// Resources reserved for node agents.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub kube_reserved: BTreeMap<String, String>,
    /// CPUs reserved for the system, as a CPU list.
    #[serde(rename = "reservedSystemCPUs", skip_serializing_if = "String::is_empty")]
    pub reserved_system_cpus: String,
    /// Version whose hidden metrics are shown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub show_hidden_metrics_for_version: String,
    /// Cgroup that holds `systemReserved`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub system_reserved_cgroup: String,
    /// Cgroup that holds `kubeReserved`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kube_reserved_cgroup: String,
    /// What is enforced on cgroups.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub enforce_node_allocatable: Vec<String>,
    /// Unsafe sysctls pods may set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Where volume plugins lie.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub volume_plugin_dir: String,
    /// Identity of the machine at its provider.
    #[serde(rename = "providerID", skip_serializing_if = "String::is_empty")]
    pub provider_id: String,
    /// Whether the kernel reports memory thresholds.
    #[serde(skip_serializing_if = "is_false")]
    pub kernel_memcg_notification: bool,
    /// The log.
    pub logging: LoggingConfiguration,
    /// Whether `/logs/` is served.
    pub enable_system_log_handler: bool,
    /// Whether `/logs/` answers queries.
    pub enable_system_log_query: bool,
    /// How long a shutdown of the node waits.
    pub shutdown_grace_period: GoDuration,
    /// The part of it for critical pods.
    pub shutdown_grace_period_critical_pods: GoDuration,
    /// The same by priority.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shutdown_grace_period_by_pod_priority: Vec<ShutdownGracePeriodByPodPriority>,
    /// Restart delays.
    pub crash_loop_back_off: CrashLoopBackOffConfig,
    /// Memory reserved per NUMA node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reserved_memory: Vec<MemoryReservation>,
    /// Whether profiles are served.
    pub enable_profiling_handler: bool,
    /// Whether the verbosity can be changed over HTTP.
    pub enable_debug_flags_handler: bool,
    /// Whether `RuntimeDefault` is the seccomp default.
    pub seccomp_default: bool,
    /// Share of the limit at which memory is throttled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_throttling_factor: Option<f64>,
    /// `None` or `TieredReservation`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub memory_reservation_policy: String,
    /// Taints at registration.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub register_with_taints: Vec<Taint>,
    /// Whether the node registers itself.
    pub register_node: bool,
    /// Where traces go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracing: Option<TracingConfiguration>,
    /// Whether ephemeral storage is accounted.
    pub local_storage_capacity_isolation: bool,
    /// Socket of the runtime.
    pub container_runtime_endpoint: String,
    /// Socket of the image service; empty is the runtime's.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_service_endpoint: String,
    /// Whether cgroup v1 stops the agent from starting.
    pub fail_cgroup_v1: bool,
    /// User namespaces of pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_namespaces: Option<UserNamespaces>,
}

/// Who may call.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAuthentication {
    /// By client certificate.
    pub x509: KubeletX509Authentication,
    /// By token.
    pub webhook: KubeletWebhookAuthentication,
    /// By nothing at all.
    pub anonymous: KubeletAnonymousAuthentication,
}

/// Client certificates.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletX509Authentication {
    /// PEM bundle of the authorities whose clients are believed.
    #[serde(rename = "clientCAFile", skip_serializing_if = "String::is_empty")]
    pub client_ca_file: String,
}

/// Bearer tokens, checked by the API server.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletWebhookAuthentication {
    /// Whether tokens are believed at all.
    pub enabled: bool,
    /// How long an answer is remembered.
    #[serde(rename = "cacheTTL")]
    pub cache_ttl: GoDuration,
}

/// Callers without credentials.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAnonymousAuthentication {
    /// Whether they are let in as `system:anonymous`.
    pub enabled: bool,
}

/// What callers may do.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAuthorization {
    /// `AlwaysAllow` or `Webhook`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// Settings of `Webhook`.
    pub webhook: KubeletWebhookAuthorization,
}

/// Authorization by the API server.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletWebhookAuthorization {
    /// How long a "yes" is remembered.
    #[serde(rename = "cacheAuthorizedTTL")]
    pub cache_authorized_ttl: GoDuration,
    /// How long a "no" is remembered.
    #[serde(rename = "cacheUnauthorizedTTL")]
    pub cache_unauthorized_ttl: GoDuration,
}

/// Swap for pods.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemorySwapConfiguration {
    /// Empty, `NoSwap` or `LimitedSwap`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub swap_behavior: String,
}

/// Restart delays.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CrashLoopBackOffConfig {
    /// Longest delay between two starts of a crashing container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_container_restart_period: Option<GoDuration>,
}

/// Shutdown grace of one band of priorities.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ShutdownGracePeriodByPodPriority {
    /// Lowest priority of the band.
    pub priority: i32,
    /// Grace, seconds.
    pub shutdown_grace_period_seconds: i64,
}

/// Memory reserved on one NUMA node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryReservation {
    /// The node.
    pub numa_node: i32,
    /// How much of `memory` and of each huge page size.
    pub limits: BTreeMap<String, ConfigQuantity>,
}

/// A taint put on the node when it registers.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// Value, may be empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
    /// Must be absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}

/// Where traces go.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TracingConfiguration {
    /// OTLP endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Samples per million spans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling_rate_per_million: Option<i32>,
}

/// User namespaces of pods.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UserNamespaces {
    /// Ids per pod; a multiple of 65536.
    #[serde(rename = "idsPerPod", skip_serializing_if = "Option::is_none")]
    pub ids_per_pod: Option<i64>,
}

/// The log.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoggingConfiguration {
    /// `text` or `json`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub format: String,
    /// Longest time between two flushes.
    pub flush_frequency: FlushFrequency,
    /// Records of a higher level are dropped.
    pub verbosity: u32,
    /// Verbosity of single source files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vmodule: Vec<VModuleItem>,
    /// What only one format knows.
    pub options: FormatOptions,
}

/// Verbosity of the source files that match a pattern.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VModuleItem {
    /// File name without directory and suffix, or a glob of such names.
    pub file_pattern: String,
    /// Their verbosity.
    pub verbosity: u32,
}

/// What only one log format knows.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FormatOptions {
    /// Of `text`.
    pub text: OutputRoutingOptions,
    /// Of `json`.
    pub json: OutputRoutingOptions,
}

/// Where records go.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OutputRoutingOptions {
    /// Info to standard output, errors to standard error.
    #[serde(skip_serializing_if = "is_false")]
    pub split_stream: bool,
    /// Buffer of the info stream, bytes.
    pub info_buffer_size: ConfigQuantity,
}

/// A duration that may be written as a string or as nanoseconds, and is shown as it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlushFrequency {
    /// The duration.
    pub duration: GoDuration,
    /// Whether it is shown as a string.
    pub as_string: bool,
}

/// The name by which the decoder knows a [`FlushFrequency`].
pub(super) const FLUSH_FREQUENCY_TYPE: &str = "TimeOrMetaDuration";

impl Serialize for FlushFrequency {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.as_string {
            self.duration.serialize(serializer)
        } else {
            serializer.serialize_i64(self.duration.nanos())
        }
    }
}

impl<'de> Deserialize<'de> for FlushFrequency {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = FlushFrequency;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a duration or a number of nanoseconds")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<FlushFrequency, E> {
                Ok(FlushFrequency { duration: text.parse().map_err(E::custom)?, as_string: true })
            }

            fn visit_i64<E: de::Error>(self, nanos: i64) -> Result<FlushFrequency, E> {
                Ok(FlushFrequency { duration: GoDuration::from_nanos(nanos), as_string: false })
            }

            fn visit_u64<E: de::Error>(self, nanos: u64) -> Result<FlushFrequency, E> {
                self.visit_i64(i64::try_from(nanos).map_err(E::custom)?)
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<FlushFrequency, D::Error> {
                inner.deserialize_any(self)
            }
        }
        deserializer.deserialize_newtype_struct(FLUSH_FREQUENCY_TYPE, Visitor)
    }
}

/// A quantity, kept as its canonical text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigQuantity {
    text: String,
    amount: Amount,
}

/// The name by which the decoder knows a [`ConfigQuantity`].
pub(super) const QUANTITY_TYPE: &str = "Quantity";

impl ConfigQuantity {
    /// Reads a quantity.
    ///
    /// # Errors
    /// Says which part is wrong, in the API's words.
    pub fn parse(text: &str) -> Result<Self, berth_types::quantity::QuantityError> {
        let amount = Amount::parse(text)?;
        Ok(Self { text: amount.canonical(), amount })
    }

    /// Its value.
    pub fn amount(&self) -> Amount {
        self.amount
    }
}

impl Default for ConfigQuantity {
    fn default() -> Self {
        Self { text: "0".to_owned(), amount: Amount::from_value(0, berth_types::quantity::Format::DecimalSi) }
    }
}

impl std::fmt::Display for ConfigQuantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for ConfigQuantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for ConfigQuantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = ConfigQuantity;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a quantity such as \"10Mi\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ConfigQuantity, E> {
                ConfigQuantity::parse(text).map_err(E::custom)
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<ConfigQuantity, D::Error> {
                inner.deserialize_str(self)
            }
        }
        deserializer.deserialize_newtype_struct(QUANTITY_TYPE, Visitor)
    }
}

fn is_false(value: &bool) -> bool {
    !*value
}

fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
