//! Table of all flags: names, settings, and help. Pure. Spec 01 §2.3 and the flag column of §4.

use super::{
    Flag, Ignored, Pairs, Slot,
    Slot::{
        Bool, Duration, Gates, Headers, Int32, Int64, Ip, Labels, Level, Pairs as Map, Quantity, ReservedMemory,
        Taints, Text, Texts, VModule, Version,
    },
};

const USE_THE_FILE: &str = "This parameter should be set via the config file specified by the Kubelet's --config flag. See https://kubernetes.io/docs/tasks/administer-cluster/kubelet-config-file/ for more information.";
const USE_EVICTION: &str = "Use --eviction-hard or --eviction-soft instead. Will be removed in a future version.";
const LEGACY_STATS: &str = "This is a cadvisor flag that was mistakenly registered with the Kubelet. Due to legacy concerns, it will follow the standard CLI deprecation timeline before being removed.";

const fn plain(name: &'static str, slot: Slot, help: &'static str) -> Flag {
    Flag { name, shorthand: None, slot, help, deprecated: None }
}

const fn short(name: &'static str, shorthand: char, slot: Slot, help: &'static str) -> Flag {
    Flag { name, shorthand: Some(shorthand), slot, help, deprecated: None }
}

const fn deprecated(name: &'static str, slot: Slot, help: &'static str, message: &'static str) -> Flag {
    Flag { name, shorthand: None, slot, help, deprecated: Some(message) }
}

/// A flag that also has a field in the configuration file.
const fn config(name: &'static str, slot: Slot, help: &'static str) -> Flag {
    deprecated(name, slot, help, USE_THE_FILE)
}

/// A legacy flag without effect.
const fn legacy(name: &'static str, syntax: Ignored, default: &'static str) -> Flag {
    deprecated(name, Slot::Ignored(syntax, default), "No effect", LEGACY_STATS)
}

/// All flags: first those with a field in the file, then those without, then the legacy ones.
pub const FLAGS: &[Flag] = &[
    config("address", Ip(|s| &mut s.config.address), "Where the servers listen"),
    config("allowed-unsafe-sysctls", Texts(|s| &mut s.config.allowed_unsafe_sysctls), "Unsafe sysctls pods may set"),
    config(
        "anonymous-auth",
        Bool(|s| &mut s.config.authentication.anonymous.enabled),
        "Whether callers without credentials are let in",
    ),
    config(
        "authentication-token-webhook",
        Bool(|s| &mut s.config.authentication.webhook.enabled),
        "Whether bearer tokens are checked by the API server",
    ),
    config(
        "authentication-token-webhook-cache-ttl",
        Duration(|s| &mut s.config.authentication.webhook.cache_ttl),
        "How long answers about tokens are remembered",
    ),
    config("authorization-mode", Text(|s| &mut s.config.authorization.mode), "AlwaysAllow or Webhook"),
    config(
        "authorization-webhook-cache-authorized-ttl",
        Duration(|s| &mut s.config.authorization.webhook.cache_authorized_ttl),
        "How long a yes is remembered",
    ),
    config(
        "authorization-webhook-cache-unauthorized-ttl",
        Duration(|s| &mut s.config.authorization.webhook.cache_unauthorized_ttl),
        "How long a no is remembered",
    ),
    config("cgroup-driver", Text(|s| &mut s.config.cgroup_driver), "cgroupfs or systemd; the runtime's answer wins"),
    config("cgroup-root", Text(|s| &mut s.config.cgroup_root), "Parent of the pods' cgroups"),
    config(
        "cgroups-per-qos",
        Bool(|s| &mut s.config.cgroups_per_qos),
        "Whether there is a cgroup per QoS class and pod",
    ),
    config(
        "client-ca-file",
        Text(|s| &mut s.config.authentication.x509.client_ca_file),
        "PEM bundle of the authorities whose clients are believed",
    ),
    config("cluster-dns", Texts(|s| &mut s.config.cluster_dns), "Addresses of the cluster's DNS servers"),
    config("cluster-domain", Text(|s| &mut s.config.cluster_domain), "DNS domain of the cluster"),
    config("container-log-max-files", Int32(|s| &mut s.config.container_log_max_files), "Log files kept per container"),
    config(
        "container-log-max-size",
        Text(|s| &mut s.config.container_log_max_size),
        "Size at which a container's log is rotated",
    ),
    config("container-runtime-endpoint", Text(|s| &mut s.config.container_runtime_endpoint), "Socket of the runtime"),
    config(
        "contention-profiling",
        Bool(|s| &mut s.config.enable_contention_profiling),
        "Whether lock contention is profiled",
    ),
    config("cpu-cfs-quota", Bool(|s| &mut s.config.cpu_cfs_quota), "Whether CPU limits are enforced"),
    config("cpu-cfs-quota-period", Duration(|s| &mut s.config.cpu_cfs_quota_period), "Period of CPU quotas"),
    config("cpu-manager-policy", Text(|s| &mut s.config.cpu_manager_policy), "none or static"),
    config(
        "cpu-manager-policy-options",
        Map(Pairs::Single, |s| &mut s.config.cpu_manager_policy_options),
        "Options of the CPU manager's policy",
    ),
    config(
        "cpu-manager-reconcile-period",
        Duration(|s| &mut s.config.cpu_manager_reconcile_period),
        "Time between two reconciliations of CPU sets",
    ),
    config(
        "enable-controller-attach-detach",
        Bool(|s| &mut s.config.enable_controller_attach_detach),
        "Whether the controller attaches volumes",
    ),
    config(
        "enable-debugging-handlers",
        Bool(|s| &mut s.config.enable_debugging_handlers),
        "Whether logs, exec and friends are served",
    ),
    config("enable-server", Bool(|s| &mut s.config.enable_server), "Whether the HTTPS server runs"),
    config(
        "enforce-node-allocatable",
        Texts(|s| &mut s.config.enforce_node_allocatable),
        "What is enforced on cgroups",
    ),
    config("event-burst", Int32(|s| &mut s.config.event_burst), "Burst of events"),
    config("event-qps", Int32(|s| &mut s.config.event_record_qps), "Events per second"),
    config("eviction-hard", Map(Pairs::Below, |s| &mut s.config.eviction_hard), "Hard eviction thresholds"),
    config(
        "eviction-max-pod-grace-period",
        Int32(|s| &mut s.config.eviction_max_pod_grace_period),
        "Longest pod grace at soft evictions, seconds",
    ),
    config(
        "eviction-minimum-reclaim",
        Map(Pairs::Equal, |s| &mut s.config.eviction_minimum_reclaim),
        "Least to reclaim per signal",
    ),
    config(
        "eviction-pressure-transition-period",
        Duration(|s| &mut s.config.eviction_pressure_transition_period),
        "How long pressure lasts after its cause is gone",
    ),
    config("eviction-soft", Map(Pairs::Below, |s| &mut s.config.eviction_soft), "Soft eviction thresholds"),
    config(
        "eviction-soft-grace-period",
        Map(Pairs::Equal, |s| &mut s.config.eviction_soft_grace_period),
        "Grace of each soft threshold",
    ),
    plain("fail-cgroupv1", Bool(|s| &mut s.config.fail_cgroup_v1), "Whether cgroup v1 stops the agent from starting"),
    config("fail-swap-on", Bool(|s| &mut s.config.fail_swap_on), "Whether swap stops the agent from starting"),
    config("feature-gates", Gates(|s| &mut s.config.feature_gates), "Feature gates by name"),
    config(
        "file-check-frequency",
        Duration(|s| &mut s.config.file_check_frequency),
        "Time between two reads of staticPodPath",
    ),
    config("hairpin-mode", Text(|s| &mut s.config.hairpin_mode), "How services reach themselves"),
    config("healthz-bind-address", Ip(|s| &mut s.config.healthz_bind_address), "Address of the healthz listener"),
    config("healthz-port", Int32(|s| &mut s.config.healthz_port), "Port of the healthz listener; 0 is off"),
    config(
        "http-check-frequency",
        Duration(|s| &mut s.config.http_check_frequency),
        "Time between two reads of staticPodURL",
    ),
    config(
        "image-gc-high-threshold",
        Int32(|s| &mut s.config.image_gc_high_threshold_percent),
        "Disk usage above which images are collected",
    ),
    config(
        "image-gc-low-threshold",
        Int32(|s| &mut s.config.image_gc_low_threshold_percent),
        "Disk usage down to which images are collected",
    ),
    config(
        "image-service-endpoint",
        Text(|s| &mut s.config.image_service_endpoint),
        "Socket of the image service; empty is the runtime's",
    ),
    config(
        "kernel-memcg-notification",
        Bool(|s| &mut s.config.kernel_memcg_notification),
        "Whether the kernel reports memory thresholds",
    ),
    config("kube-api-burst", Int32(|s| &mut s.config.kube_api_burst), "Burst of API requests"),
    config("kube-api-content-type", Text(|s| &mut s.config.content_type), "Content type of API requests"),
    config("kube-api-qps", Int32(|s| &mut s.config.kube_api_qps), "API requests per second"),
    config("kube-reserved", Map(Pairs::Equal, |s| &mut s.config.kube_reserved), "Resources reserved for node agents"),
    config("kube-reserved-cgroup", Text(|s| &mut s.config.kube_reserved_cgroup), "Cgroup that holds kubeReserved"),
    config("kubelet-cgroups", Text(|s| &mut s.config.kubelet_cgroups), "Cgroup the agent moves into"),
    config(
        "local-storage-capacity-isolation",
        Bool(|s| &mut s.config.local_storage_capacity_isolation),
        "Whether ephemeral storage is accounted",
    ),
    config(
        "make-iptables-util-chains",
        Bool(|s| &mut s.config.make_iptables_util_chains),
        "Whether the hint chain is made",
    ),
    config("manifest-url", Text(|s| &mut s.config.static_pod_url), "Where static pods are fetched from"),
    config(
        "manifest-url-header",
        Headers(|s| &mut s.config.static_pod_url_header),
        "Headers sent to staticPodURL; may hold secrets",
    ),
    config("max-open-files", Int64(|s| &mut s.config.max_open_files), "Open files of the agent"),
    config("max-pods", Int32(|s| &mut s.config.max_pods), "Most pods on the node"),
    config("memory-manager-policy", Text(|s| &mut s.config.memory_manager_policy), "None or Static"),
    config(
        "minimum-image-ttl-duration",
        Duration(|s| &mut s.config.image_minimum_gc_age),
        "Unused images younger than this stay",
    ),
    config(
        "node-status-max-images",
        Int32(|s| &mut s.config.node_status_max_images),
        "Images listed in the node status; -1 is all",
    ),
    config(
        "node-status-update-frequency",
        Duration(|s| &mut s.config.node_status_update_frequency),
        "Time between two computations of the node status",
    ),
    config("oom-score-adj", Int32(|s| &mut s.config.oom_score_adj), "oom_score_adj of the agent"),
    config("pod-cidr", Text(|s| &mut s.config.pod_cidr), "Addresses of pods, standalone mode only"),
    config(
        "pod-manifest-path",
        Text(|s| &mut s.config.static_pod_path),
        "Directory of static pods, or one static pod file",
    ),
    config("pod-max-pids", Int64(|s| &mut s.config.pod_pids_limit), "Most processes per pod; -1 is the node's limit"),
    config("pods-per-core", Int32(|s| &mut s.config.pods_per_core), "Most pods per core; 0 is no limit"),
    config("port", Int32(|s| &mut s.config.port), "Port of the HTTPS server"),
    config(
        "protect-kernel-defaults",
        Bool(|s| &mut s.config.protect_kernel_defaults),
        "Whether wrong kernel settings are an error",
    ),
    plain("provider-id", Text(|s| &mut s.config.provider_id), "Identity of the machine at its provider"),
    config(
        "qos-reserved",
        Map(Pairs::Equal, |s| &mut s.config.qos_reserved),
        "Share of memory reserved for the guaranteed class",
    ),
    config("read-only-port", Int32(|s| &mut s.config.read_only_port), "Port of the read-only server; 0 is off"),
    config("register-node", Bool(|s| &mut s.config.register_node), "Whether the node registers itself"),
    config("register-with-taints", Taints(|s| &mut s.config.register_with_taints), "Taints at registration"),
    config("registry-burst", Int32(|s| &mut s.config.registry_burst), "Burst of image pulls"),
    config("registry-qps", Int32(|s| &mut s.config.registry_pull_qps), "Image pulls per second; 0 is no limit"),
    config(
        "reserved-cpus",
        Text(|s| &mut s.config.reserved_system_cpus),
        "CPUs reserved for the system, as a CPU list",
    ),
    config("reserved-memory", ReservedMemory(|s| &mut s.config.reserved_memory), "Memory reserved per NUMA node"),
    config("resolv-conf", Text(|s| &mut s.config.resolv_conf), "Resolver file given to pods; empty is none"),
    config(
        "rotate-certificates",
        Bool(|s| &mut s.config.rotate_certificates),
        "Whether client certificates are renewed",
    ),
    config(
        "rotate-server-certificates",
        Bool(|s| &mut s.config.server_tls_bootstrap),
        "Whether the serving certificate comes from the API",
    ),
    config("runonce", Bool(|s| &mut s.config.run_once), "Removed; must not be set"),
    config(
        "runtime-request-timeout",
        Duration(|s| &mut s.config.runtime_request_timeout),
        "Deadline of short runtime calls",
    ),
    config(
        "serialize-image-pulls",
        Bool(|s| &mut s.config.serialize_image_pulls),
        "Whether images are pulled one at a time",
    ),
    config(
        "streaming-connection-idle-timeout",
        Duration(|s| &mut s.config.streaming_connection_idle_timeout),
        "Time after which an idle exec, attach, or port-forward stream is closed; 0 for never",
    ),
    config("sync-frequency", Duration(|s| &mut s.config.sync_frequency), "Longest time between two syncs of a pod"),
    config("system-cgroups", Text(|s| &mut s.config.system_cgroups), "Cgroup for processes outside containers"),
    config(
        "system-reserved",
        Map(Pairs::Equal, |s| &mut s.config.system_reserved),
        "Resources reserved for the system",
    ),
    config(
        "system-reserved-cgroup",
        Text(|s| &mut s.config.system_reserved_cgroup),
        "Cgroup that holds systemReserved",
    ),
    config("tls-cert-file", Text(|s| &mut s.config.tls_cert_file), "Serving certificate, PEM"),
    config(
        "tls-cipher-suites",
        Texts(|s| &mut s.config.tls_cipher_suites),
        "Allowed cipher suites by Go's names; empty is the default set",
    ),
    config("tls-min-version", Text(|s| &mut s.config.tls_min_version), "VersionTLS10 to VersionTLS13; empty is 1.2"),
    config("tls-private-key-file", Text(|s| &mut s.config.tls_private_key_file), "Key of the serving certificate, PEM"),
    config(
        "topology-manager-policy",
        Text(|s| &mut s.config.topology_manager_policy),
        "none, best-effort, restricted or single-numa-node",
    ),
    config(
        "topology-manager-policy-options",
        Map(Pairs::Equal, |s| &mut s.config.topology_manager_policy_options),
        "Options of the topology manager's policy",
    ),
    config("topology-manager-scope", Text(|s| &mut s.config.topology_manager_scope), "container or pod"),
    config("volume-plugin-dir", Text(|s| &mut s.config.volume_plugin_dir), "Where volume plugins lie"),
    config(
        "volume-stats-agg-period",
        Duration(|s| &mut s.config.volume_stats_agg_period),
        "Time between two measurements of volumes; negative is off",
    ),
    config(
        "log-json-info-buffer-size",
        Quantity(|s| &mut s.config.logging.options.json.info_buffer_size),
        "Buffer of the info stream in JSON format",
    ),
    config(
        "log-json-split-stream",
        Bool(|s| &mut s.config.logging.options.json.split_stream),
        "In JSON format, info to standard output and errors to standard error",
    ),
    config(
        "log-text-info-buffer-size",
        Quantity(|s| &mut s.config.logging.options.text.info_buffer_size),
        "Buffer of the info stream in text format",
    ),
    config(
        "log-text-split-stream",
        Bool(|s| &mut s.config.logging.options.text.split_stream),
        "In text format, info to standard output and errors to standard error",
    ),
    config("logging-format", Text(|s| &mut s.config.logging.format), "Format of the log: text or json"),
    plain(
        "log-flush-frequency",
        Duration(|s| &mut s.config.logging.flush_frequency.duration),
        "Longest time between two flushes of the log",
    ),
    short("v", 'v', Level(|s| &mut s.config.logging.verbosity), "Verbosity of the log"),
    plain(
        "vmodule",
        VModule(|s| &mut s.config.logging.vmodule),
        "Comma-separated pattern=N pairs: verbosity of single source files, text format only",
    ),
    plain(
        "bootstrap-kubeconfig",
        Text(|s| &mut s.flags.bootstrap_kubeconfig),
        "Kubeconfig with which the first client certificate is asked for",
    ),
    plain("cert-dir", Text(|s| &mut s.flags.cert_dir), "Directory of the certificates"),
    plain(
        "cloud-provider",
        Text(|s| &mut s.flags.cloud_provider),
        "Empty, or external if a cloud controller manager looks after the node",
    ),
    plain("config", Text(|s| &mut s.flags.config), "Main configuration file"),
    plain(
        "config-dir",
        Text(|s| &mut s.flags.config_dir),
        "Directory whose *.conf files are merged over the main configuration file",
    ),
    plain(
        "exit-on-lock-contention",
        Bool(|s| &mut s.flags.exit_on_lock_contention),
        "Leave when another process opens the lock file",
    ),
    short("help", 'h', Bool(|s| &mut s.flags.help), "Print this help"),
    plain("hostname-override", Text(|s| &mut s.flags.hostname_override), "Name of the node instead of the host's"),
    plain(
        "housekeeping-interval",
        Duration(|s| &mut s.flags.housekeeping_interval),
        "Shortest time between two statistics of a container",
    ),
    plain(
        "image-credential-provider-bin-dir",
        Text(|s| &mut s.flags.image_credential_provider_bin_dir),
        "Directory of the credential provider executables",
    ),
    plain(
        "image-credential-provider-config",
        Text(|s| &mut s.flags.image_credential_provider_config),
        "Credential provider configuration, a file or a directory",
    ),
    plain("kubeconfig", Text(|s| &mut s.flags.kubeconfig), "How to reach the API server; empty is standalone mode"),
    plain("lock-file", Text(|s| &mut s.flags.lock_file), "File that is locked while the agent runs"),
    plain(
        "max-housekeeping-interval",
        Duration(|s| &mut s.flags.max_housekeeping_interval),
        "Longest time between two statistics of a container",
    ),
    plain("node-ip", Text(|s| &mut s.flags.node_ip), "Address of the node, or a dual-stack pair of addresses"),
    plain("node-labels", Labels(|s| &mut s.flags.node_labels), "Labels of the node when it registers"),
    plain("root-dir", Text(|s| &mut s.flags.root_dir), "Directory of the agent's files"),
    plain("runtime-cgroups", Text(|s| &mut s.flags.runtime_cgroups), "Cgroup of the container runtime"),
    plain(
        "seccomp-default",
        Bool(|s| &mut s.flags.seccomp_default),
        "Use RuntimeDefault as the default seccomp profile",
    ),
    plain(
        "stale-authorization",
        Bool(|s| &mut s.flags.stale_authorization),
        "Let who could read metrics and health go on for a minute while the API server cannot be asked",
    ),
    plain(
        "standalone-authorization",
        Text(|s| &mut s.flags.standalone_authorization),
        "Policy file: who besides group system:masters may call a node without an API server",
    ),
    plain(
        "streaming-allowed-hosts",
        Texts(|s| &mut s.flags.streaming_allowed_hosts),
        "Hosts beyond this machine to which the runtime may send streams",
    ),
    plain(
        "streaming-requires-create",
        Bool(|s| &mut s.flags.streaming_requires_create),
        "Ask for the verb create too where a GET opens a stream; false is what kubelet does",
    ),
    plain(
        "version",
        Version(|s| &mut s.flags.version),
        "Print the version: true, raw, or vX.Y.Z-suffix to report that instead",
    ),
    deprecated(
        "experimental-allocatable-ignore-eviction",
        Bool(|s| &mut s.flags.experimental_allocatable_ignore_eviction),
        "Do not subtract hard eviction thresholds from what pods may use",
        "will be removed in 1.25 or later.",
    ),
    deprecated(
        "experimental-mounter-path",
        Text(|s| &mut s.flags.experimental_mounter_path),
        "No effect",
        "will be removed in 1.25 or later. in favor of using CSI.",
    ),
    deprecated(
        "maximum-dead-containers",
        Int32(|s| &mut s.flags.maximum_dead_containers),
        "Dead containers kept on the node; negative is no limit",
        USE_EVICTION,
    ),
    deprecated(
        "maximum-dead-containers-per-container",
        Int32(|s| &mut s.flags.maximum_dead_containers_per_container),
        "Dead containers kept per container",
        USE_EVICTION,
    ),
    deprecated(
        "minimum-container-ttl-duration",
        Duration(|s| &mut s.flags.minimum_container_ttl_duration),
        "Dead containers younger than this are kept",
        USE_EVICTION,
    ),
    deprecated(
        "boot-id-file",
        Text(|s| &mut s.flags.boot_id_file),
        "Comma-separated files that may hold the boot id",
        LEGACY_STATS,
    ),
    deprecated(
        "machine-id-file",
        Text(|s| &mut s.flags.machine_id_file),
        "Comma-separated files that may hold the machine id",
        LEGACY_STATS,
    ),
    legacy("application-metrics-count-limit", Ignored::Int, "100"),
    legacy("container-hints", Ignored::Text, "/etc/cadvisor/container_hints.json"),
    legacy("containerd", Ignored::Text, "/run/containerd/containerd.sock"),
    legacy("containerd-namespace", Ignored::Text, "k8s.io"),
    legacy("enable-load-reader", Ignored::Bool, "false"),
    legacy("event-storage-age-limit", Ignored::Text, "default=0"),
    legacy("event-storage-event-limit", Ignored::Text, "default=0"),
    legacy("global-housekeeping-interval", Ignored::Duration, "1m0s"),
    legacy("log-cadvisor-usage", Ignored::Bool, "false"),
    legacy("storage-driver-user", Ignored::Text, "root"),
    legacy("storage-driver-password", Ignored::Text, "root"),
    legacy("storage-driver-host", Ignored::Text, "localhost:8086"),
    legacy("storage-driver-db", Ignored::Text, "cadvisor"),
    legacy("storage-driver-table", Ignored::Text, "stats"),
    legacy("storage-driver-secure", Ignored::Bool, "false"),
    legacy("storage-driver-buffer-duration", Ignored::Duration, "1m0s"),
];
