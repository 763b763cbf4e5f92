//! `KubeletConfiguration` v1beta1, every field in the reference's declaration order. Pure.
//!
//! One struct serves three purposes: what the decoder produces (zero stands for "unset"), what the agent runs with
//! after `defaults` has filled it, and what `/configz` shows. `/configz` always contains the plain fields that
//! upstream keeps behind a pointer, the others only if not empty (spec 01 §7.2). The structs have the reference's
//! names because error texts contain them. `unimplemented_settings` lists the fields without effect.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use berth_types::go_duration::GoDuration;
use berth_types::quantity::Amount;

/// `kind` of the configuration.
pub const KIND: &str = "KubeletConfiguration";
/// `apiVersion` of the configuration.
pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";

/// Configuration of the agent. Meaning and defaults: spec 01 §4.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletConfiguration {
    /// Always [`KIND`] after loading.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Always [`API_VERSION`] after loading.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    /// Whether the HTTPS server runs.
    pub enable_server: bool,
    /// Directory of static pods, or a single static pod file.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub static_pod_path: String,
    /// Root directory of the pod log directories.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod_logs_dir: String,
    /// Maximum time between two syncs of a pod.
    pub sync_frequency: GoDuration,
    /// Time between two reads of `staticPodPath`.
    pub file_check_frequency: GoDuration,
    /// Time between two reads of `staticPodURL`.
    pub http_check_frequency: GoDuration,
    /// URL from which static pods are fetched.
    #[serde(rename = "staticPodURL", skip_serializing_if = "String::is_empty")]
    pub static_pod_url: String,
    /// Headers sent to `staticPodURL`; may contain secrets.
    #[serde(rename = "staticPodURLHeader", skip_serializing_if = "BTreeMap::is_empty")]
    pub static_pod_url_header: BTreeMap<String, Vec<String>>,
    /// Listen address of the servers.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub address: String,
    /// Port of the HTTPS server.
    #[serde(skip_serializing_if = "is_zero")]
    pub port: i32,
    /// Port of the read-only server; 0 disables it.
    #[serde(skip_serializing_if = "is_zero")]
    pub read_only_port: i32,
    /// Path of the serving certificate, PEM.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tls_cert_file: String,
    /// Path of the serving certificate's key, PEM.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tls_private_key_file: String,
    /// Allowed cipher suites by Go's names; empty for the default set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tls_cipher_suites: Vec<String>,
    /// Allowed key exchanges by Go's curve IDs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tls_curve_preferences: Vec<i32>,
    /// Minimum TLS version, `VersionTLS10` to `VersionTLS13`; empty for 1.2.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tls_min_version: String,
    /// Whether client certificates are rotated.
    #[serde(skip_serializing_if = "is_false")]
    pub rotate_certificates: bool,
    /// Whether the serving certificate is requested through the API.
    #[serde(rename = "serverTLSBootstrap", skip_serializing_if = "is_false")]
    pub server_tls_bootstrap: bool,
    /// Authentication of requests to the server.
    pub authentication: KubeletAuthentication,
    /// Authorization of requests to the server.
    pub authorization: KubeletAuthorization,
    /// Image pulls per second; 0 for no limit.
    #[serde(rename = "registryPullQPS")]
    pub registry_pull_qps: i32,
    /// Burst of image pulls.
    #[serde(skip_serializing_if = "is_zero")]
    pub registry_burst: i32,
    /// Policy for verifying pull credentials of images that are already present.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_pull_credentials_verification_policy: String,
    /// Images exempt from that verification.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub preloaded_images_verification_allowlist: Vec<String>,
    /// Events sent per second.
    #[serde(rename = "eventRecordQPS")]
    pub event_record_qps: i32,
    /// Token bucket size for events; must not be negative, default 100.
    #[serde(skip_serializing_if = "is_zero")]
    pub event_burst: i32,
    /// Whether logs, exec, and other debugging endpoints are served.
    pub enable_debugging_handlers: bool,
    /// Whether lock contention is profiled; without effect.
    #[serde(skip_serializing_if = "is_false")]
    pub enable_contention_profiling: bool,
    /// Port of the healthz listener; 0 disables it.
    pub healthz_port: i32,
    /// Address of the healthz listener.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub healthz_bind_address: String,
    /// `oom_score_adj` of the agent's process.
    pub oom_score_adj: i32,
    /// DNS domain of the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cluster_domain: String,
    /// Addresses of the cluster's DNS servers.
    #[serde(rename = "clusterDNS", skip_serializing_if = "Vec::is_empty")]
    pub cluster_dns: Vec<String>,
    /// Idle timeout of streams; 0 for none.
    pub streaming_connection_idle_timeout: GoDuration,
    /// Interval of node status computations.
    pub node_status_update_frequency: GoDuration,
    /// Interval of reports of an unchanged node status.
    pub node_status_report_frequency: GoDuration,
    /// Validity of the node lease after a renewal, seconds; must be positive, default 40.
    #[serde(skip_serializing_if = "is_zero")]
    pub node_lease_duration_seconds: i32,
    /// Minimum age of unused images before they are garbage collected.
    #[serde(rename = "imageMinimumGCAge")]
    pub image_minimum_gc_age: GoDuration,
    /// Maximum age of unused images before they are garbage collected; 0 for no maximum.
    #[serde(rename = "imageMaximumGCAge")]
    pub image_maximum_gc_age: GoDuration,
    /// Disk usage above which images are garbage collected, percent.
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold_percent: i32,
    /// Disk usage down to which images are garbage collected, percent.
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold_percent: i32,
    /// Interval of volume usage measurements; negative disables them.
    pub volume_stats_agg_period: GoDuration,
    /// Cgroup that the agent moves to; empty leaves it where it was started.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kubelet_cgroups: String,
    /// Cgroup that the processes of the root cgroup move to; empty leaves them there. Requires `cgroupRoot`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub system_cgroups: String,
    /// Parent of the pod cgroups.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup_root: String,
    /// Whether QoS classes and pods have cgroups.
    #[serde(rename = "cgroupsPerQOS")]
    pub cgroups_per_qos: bool,
    /// `cgroupfs` or `systemd`; the runtime's report takes precedence.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup_driver: String,
    /// `none` or `static`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpu_manager_policy: String,
    /// Whether the OOM killer kills single processes instead of the whole container.
    #[serde(rename = "singleProcessOOMKill", skip_serializing_if = "Option::is_none")]
    pub single_process_oom_kill: Option<bool>,
    /// Option values by name, such as `full-pcpus-only`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// Interval of CPU set reconciliation.
    pub cpu_manager_reconcile_period: GoDuration,
    /// `None` or `Static`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub memory_manager_policy: String,
    /// `none`, `best-effort`, `restricted`, or `single-numa-node`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub topology_manager_policy: String,
    /// `container` or `pod`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub topology_manager_scope: String,
    /// Option values by name, such as `prefer-closest-numa-nodes`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Percentage of the memory requests of a QoS class that lower classes cannot use: `memory: 50%`. Requires the gate
    /// `QOSReserved`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub qos_reserved: BTreeMap<String, String>,
    /// Timeout of CRI calls other than long-running ones.
    pub runtime_request_timeout: GoDuration,
    /// `promiscuous-bridge`, `hairpin-veth`, or `none`; no effect.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hairpin_mode: String,
    /// Maximum number of pods on the node.
    #[serde(skip_serializing_if = "is_zero")]
    pub max_pods: i32,
    /// CIDRs of pods of a node without an API server, comma-separated.
    #[serde(rename = "podCIDR", skip_serializing_if = "String::is_empty")]
    pub pod_cidr: String,
    /// Maximum number of processes per pod; -1 for the node's limit.
    pub pod_pids_limit: i64,
    /// Resolver configuration for pods; empty for none.
    pub resolv_conf: String,
    /// Removed; must not be set.
    #[serde(skip_serializing_if = "is_false")]
    pub run_once: bool,
    /// Whether CPU limits are enforced by CFS quota.
    #[serde(rename = "cpuCFSQuota")]
    pub cpu_cfs_quota: bool,
    /// Period of the CFS quota: 100 ms, or 1 ms to 1 s with the gate `CustomCPUCFSQuotaPeriod`.
    #[serde(rename = "cpuCFSQuotaPeriod")]
    pub cpu_cfs_quota_period: GoDuration,
    /// Maximum number of images in the node status; -1 for all.
    pub node_status_max_images: i32,
    /// Maximum number of open files of the agent.
    #[serde(skip_serializing_if = "is_zero")]
    pub max_open_files: i64,
    /// Content type of API requests; without effect: JSON is used.
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
    /// Maximum number of parallel image pulls; absent for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_parallel_image_pulls: Option<i32>,
    /// Hard eviction thresholds by signal.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_hard: BTreeMap<String, String>,
    /// Soft eviction thresholds by signal.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_soft: BTreeMap<String, String>,
    /// Grace period of each soft eviction threshold.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_soft_grace_period: BTreeMap<String, String>,
    /// Time for which a pressure condition remains after its cause has ended.
    pub eviction_pressure_transition_period: GoDuration,
    /// Maximum grace period of pods at soft evictions, seconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub eviction_max_pod_grace_period: i32,
    /// Minimum amount to reclaim, by signal.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub eviction_minimum_reclaim: BTreeMap<String, String>,
    /// Whether signals that `evictionHard` does not set keep their default threshold.
    pub merge_default_eviction_settings: bool,
    /// Maximum number of pods per core; 0 for no limit.
    #[serde(skip_serializing_if = "is_zero")]
    pub pods_per_core: i32,
    /// Whether the attach/detach controller attaches volumes.
    pub enable_controller_attach_detach: bool,
    /// Whether kernel settings that differ from the required ones are an error.
    #[serde(skip_serializing_if = "is_false")]
    pub protect_kernel_defaults: bool,
    /// No effect: Berth creates no iptables chains.
    #[serde(rename = "makeIPTablesUtilChains")]
    pub make_iptables_util_chains: bool,
    /// No effect.
    pub iptables_masquerade_bit: i32,
    /// No effect.
    pub iptables_drop_bit: i32,
    /// Feature gates by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub feature_gates: BTreeMap<String, bool>,
    /// Whether the agent refuses to start with swap on.
    pub fail_swap_on: bool,
    /// Swap usage of pods.
    pub memory_swap: MemorySwapConfiguration,
    /// Size at which a container log is rotated, as a quantity.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container_log_max_size: String,
    /// Maximum number of log files per container.
    pub container_log_max_files: i32,
    /// Maximum number of concurrent log rotations.
    pub container_log_max_workers: i32,
    /// Interval of log size checks.
    pub container_log_monitor_interval: GoDuration,
    /// Change detection of ConfigMaps and Secrets: `Get`, `Cache`, or `Watch`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub config_map_and_secret_change_detection_strategy: String,
    /// Resources reserved for the operating system.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub system_reserved: BTreeMap<String, String>,
    /// Resources reserved for Kubernetes node agents.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub kube_reserved: BTreeMap<String, String>,
    /// CPUs reserved for the system and node agents, as a CPU list.
    #[serde(rename = "reservedSystemCPUs", skip_serializing_if = "String::is_empty")]
    pub reserved_system_cpus: String,
    /// Version whose hidden metrics are shown: `1.35`; empty for none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub show_hidden_metrics_for_version: String,
    /// Cgroup to which `systemReserved` applies.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub system_reserved_cgroup: String,
    /// Cgroup to which `kubeReserved` applies.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kube_reserved_cgroup: String,
    /// Reservations that are enforced on cgroups.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub enforce_node_allocatable: Vec<String>,
    /// Unsafe sysctls that pods may set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Directory of FlexVolume plugins; without effect.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub volume_plugin_dir: String,
    /// Identifier of the machine at its cloud provider.
    #[serde(rename = "providerID", skip_serializing_if = "String::is_empty")]
    pub provider_id: String,
    /// Whether kernel notifications are used for memory thresholds.
    #[serde(skip_serializing_if = "is_false")]
    pub kernel_memcg_notification: bool,
    /// Logging configuration.
    pub logging: LoggingConfiguration,
    /// Whether `/logs/` is served.
    pub enable_system_log_handler: bool,
    /// Whether `/logs/` supports queries.
    pub enable_system_log_query: bool,
    /// Total grace period of a node shutdown.
    pub shutdown_grace_period: GoDuration,
    /// Part of the shutdown grace period that is reserved for critical pods.
    pub shutdown_grace_period_critical_pods: GoDuration,
    /// Grace period per range of pod priorities; excludes `shutdownGracePeriod`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shutdown_grace_period_by_pod_priority: Vec<ShutdownGracePeriodByPodPriority>,
    /// Back-off of container restarts.
    pub crash_loop_back_off: CrashLoopBackOffConfig,
    /// Memory reserved per NUMA node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reserved_memory: Vec<MemoryReservation>,
    /// Whether profiling endpoints are served.
    pub enable_profiling_handler: bool,
    /// Whether the log verbosity can be changed over HTTP.
    pub enable_debug_flags_handler: bool,
    /// Whether `RuntimeDefault` is the default seccomp profile.
    pub seccomp_default: bool,
    /// Position of `memory.high` between request and limit, above 0 and at most 1; default 0.9. Requires the gate
    /// `MemoryQoS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_throttling_factor: Option<f64>,
    /// Protection of memory requests from reclaim: `None` or `TieredReservation`. Requires the gate `MemoryQoS`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub memory_reservation_policy: String,
    /// Taints that the node registers with.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub register_with_taints: Vec<Taint>,
    /// Whether the node registers itself with the API server.
    pub register_node: bool,
    /// Export of traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracing: Option<TracingConfiguration>,
    /// Whether local ephemeral storage is accounted and limited.
    pub local_storage_capacity_isolation: bool,
    /// CRI socket of the runtime.
    pub container_runtime_endpoint: String,
    /// CRI socket of the image service; empty for that of the runtime.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_service_endpoint: String,
    /// Whether the agent refuses to start on cgroup v1.
    pub fail_cgroup_v1: bool,
    /// Configuration of user namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_namespaces: Option<UserNamespaces>,
}

/// Authentication of requests to the server.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAuthentication {
    /// Client certificate authentication.
    pub x509: KubeletX509Authentication,
    /// Bearer token authentication.
    pub webhook: KubeletWebhookAuthentication,
    /// Anonymous access.
    pub anonymous: KubeletAnonymousAuthentication,
}

/// Client certificate authentication.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletX509Authentication {
    /// PEM bundle of the trusted client certificate authorities.
    #[serde(rename = "clientCAFile", skip_serializing_if = "String::is_empty")]
    pub client_ca_file: String,
}

/// Bearer token authentication through TokenReviews of the API server.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletWebhookAuthentication {
    /// Whether bearer tokens are accepted.
    pub enabled: bool,
    /// Time for which token reviews are cached.
    #[serde(rename = "cacheTTL")]
    pub cache_ttl: GoDuration,
}

/// Access without credentials.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAnonymousAuthentication {
    /// Whether requests without credentials are accepted as `system:anonymous`.
    pub enabled: bool,
}

/// Authorization of requests to the server.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAuthorization {
    /// `AlwaysAllow` or `Webhook`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// Settings of mode `Webhook`.
    pub webhook: KubeletWebhookAuthorization,
}

/// Authorization through SubjectAccessReviews of the API server.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletWebhookAuthorization {
    /// Time for which permitted requests are cached.
    #[serde(rename = "cacheAuthorizedTTL")]
    pub cache_authorized_ttl: GoDuration,
    /// Time for which denied requests are cached.
    #[serde(rename = "cacheUnauthorizedTTL")]
    pub cache_unauthorized_ttl: GoDuration,
}

/// Swap usage of pods.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemorySwapConfiguration {
    /// `NoSwap` or `LimitedSwap`; empty for the default.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub swap_behavior: String,
}

/// Back-off of container restarts.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CrashLoopBackOffConfig {
    /// Maximum delay between two starts of a crashing container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_container_restart_period: Option<GoDuration>,
}

/// Shutdown grace period of a range of pod priorities.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ShutdownGracePeriodByPodPriority {
    /// Lowest priority of the range.
    pub priority: i32,
    /// Time that pods of this range have to stop, seconds; a negative value counts as 0.
    pub shutdown_grace_period_seconds: i64,
}

/// Memory reserved on one NUMA node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryReservation {
    /// Number of the NUMA node.
    pub numa_node: i32,
    /// Reserved `memory`, and reserved huge pages per size.
    pub limits: BTreeMap<String, ConfigQuantity>,
}

/// A taint that the node registers with.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Taint {
    /// Taint key.
    pub key: String,
    /// Taint value; may be empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
    /// Must be absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}

/// Export of traces.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TracingConfiguration {
    /// OTLP endpoint of the collector.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Sampled traces per million spans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling_rate_per_million: Option<i32>,
}

/// Configuration of user namespaces.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UserNamespaces {
    /// IDs per pod; a multiple of 65536.
    #[serde(rename = "idsPerPod", skip_serializing_if = "Option::is_none")]
    pub ids_per_pod: Option<i64>,
}

/// `logging` section of the configuration: format, flushing, and verbosity.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoggingConfiguration {
    /// Log format: `text` or `json`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub format: String,
    /// Maximum time between two flushes.
    pub flush_frequency: FlushFrequency,
    /// Log verbosity; records of a higher level are dropped.
    pub verbosity: u32,
    /// Log verbosity by source file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vmodule: Vec<VModuleItem>,
    /// Options of the log formats.
    pub options: FormatOptions,
}

/// Log verbosity of the source files that match a pattern.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VModuleItem {
    /// File name without directory and suffix, or a glob of such names.
    pub file_pattern: String,
    /// Log verbosity of these files.
    pub verbosity: u32,
}

/// Options of the log formats.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FormatOptions {
    /// Options of format `text`.
    pub text: OutputRoutingOptions,
    /// Options of format `json`.
    pub json: OutputRoutingOptions,
}

/// Routing of log output.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OutputRoutingOptions {
    /// Whether info is written to standard output and errors to standard error.
    #[serde(skip_serializing_if = "is_false")]
    pub split_stream: bool,
    /// Buffer size of the info stream, bytes.
    pub info_buffer_size: ConfigQuantity,
}

/// A duration given as a string or as nanoseconds, serialized in the same form.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlushFrequency {
    /// Value of the duration.
    pub duration: GoDuration,
    /// Whether the duration is serialized as a string.
    pub as_string: bool,
}

/// Type name by which the decoder recognizes a [`FlushFrequency`].
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

/// A quantity, stored with its canonical text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigQuantity {
    text: String,
    amount: Amount,
}

/// Type name by which the decoder recognizes a [`ConfigQuantity`].
pub(super) const QUANTITY_TYPE: &str = "Quantity";

impl ConfigQuantity {
    /// Parses a quantity.
    ///
    /// # Errors
    /// The malformed part, with the API's error text.
    pub fn parse(text: &str) -> Result<Self, berth_types::quantity::QuantityError> {
        let amount = Amount::parse(text)?;
        Ok(Self { text: amount.canonical(), amount })
    }

    /// Value of the quantity.
    pub fn amount(&self) -> Amount {
        self.amount
    }
}

impl Default for ConfigQuantity {
    fn default() -> Self {
        Self { text: "0".to_owned(), amount: Amount::from_value(0, berth_types::quantity::QuantityFormat::DecimalSi) }
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
