//! Table of all flags: names, settings, and help. Pure. Spec 01 §2.3 and the flag column of §4.

use super::{
    Flag, FlagTarget,
    FlagTarget::{
        Bool, Duration, Gates, Headers, Int32, Int64, Ip, Labels, Level, Pairs as Map, Quantity, ReservedMemory,
        Taints, Text, Texts, VModule, Version,
    },
    Pairs, ValueSyntax,
};

const USE_THE_FILE: &str = "This parameter should be set via the config file specified by the Kubelet's --config flag. See https://kubernetes.io/docs/tasks/administer-cluster/kubelet-config-file/ for more information.";
const USE_EVICTION: &str = "Use --eviction-hard or --eviction-soft instead. Will be removed in a future version.";
const LEGACY_STATS: &str = "This is a cadvisor flag that was mistakenly registered with the Kubelet. Due to legacy concerns, it will follow the standard CLI deprecation timeline before being removed.";

const fn plain(name: &'static str, slot: FlagTarget, help: &'static str) -> Flag {
    Flag { name, shorthand: None, slot, help, deprecated: None }
}

const fn short(name: &'static str, shorthand: char, slot: FlagTarget, help: &'static str) -> Flag {
    Flag { name, shorthand: Some(shorthand), slot, help, deprecated: None }
}

const fn deprecated(name: &'static str, slot: FlagTarget, help: &'static str, message: &'static str) -> Flag {
    Flag { name, shorthand: None, slot, help, deprecated: Some(message) }
}

/// A flag that also has a field in the configuration file.
const fn config(name: &'static str, slot: FlagTarget, help: &'static str) -> Flag {
    deprecated(name, slot, help, USE_THE_FILE)
}

/// A legacy flag without effect.
const fn legacy(name: &'static str, syntax: ValueSyntax, default: &'static str) -> Flag {
    deprecated(name, FlagTarget::Ignored(syntax, default), "No effect", LEGACY_STATS)
}

/// All flags: first those with a field in the file, then those without, then the legacy ones.
pub const FLAGS: &[Flag] = &[
    config("address", Ip(|s| &mut s.config.address), "IP address for the servers to listen on"),
    config(
        "allowed-unsafe-sysctls",
        Texts(|s| &mut s.config.allowed_unsafe_sysctls),
        "Unsafe sysctls, or patterns ending in *, that pods may set",
    ),
    config(
        "anonymous-auth",
        Bool(|s| &mut s.config.authentication.anonymous.enabled),
        "Enable anonymous requests to the Kubelet server",
    ),
    config(
        "authentication-token-webhook",
        Bool(|s| &mut s.config.authentication.webhook.enabled),
        "Use the TokenReview API to determine authentication for bearer tokens",
    ),
    config(
        "authentication-token-webhook-cache-ttl",
        Duration(|s| &mut s.config.authentication.webhook.cache_ttl),
        "The duration to cache responses from the webhook token authenticator",
    ),
    config(
        "authorization-mode",
        Text(|s| &mut s.config.authorization.mode),
        "Authorization mode for the Kubelet server: AlwaysAllow or Webhook",
    ),
    config(
        "authorization-webhook-cache-authorized-ttl",
        Duration(|s| &mut s.config.authorization.webhook.cache_authorized_ttl),
        "The duration to cache 'authorized' responses from the webhook authorizer",
    ),
    config(
        "authorization-webhook-cache-unauthorized-ttl",
        Duration(|s| &mut s.config.authorization.webhook.cache_unauthorized_ttl),
        "The duration to cache 'unauthorized' responses from the webhook authorizer",
    ),
    config(
        "cgroup-driver",
        Text(|s| &mut s.config.cgroup_driver),
        "Cgroup driver, cgroupfs or systemd; the driver that the runtime reports takes precedence",
    ),
    config("cgroup-root", Text(|s| &mut s.config.cgroup_root), "Parent cgroup of the pods' cgroups"),
    config(
        "cgroups-per-qos",
        Bool(|s| &mut s.config.cgroups_per_qos),
        "Create a cgroup hierarchy of QoS classes and pods",
    ),
    config(
        "client-ca-file",
        Text(|s| &mut s.config.authentication.x509.client_ca_file),
        "PEM bundle of the certificate authorities that client certificates are verified against",
    ),
    config("cluster-dns", Texts(|s| &mut s.config.cluster_dns), "Addresses of the cluster's DNS servers"),
    config("cluster-domain", Text(|s| &mut s.config.cluster_domain), "DNS domain of the cluster"),
    config(
        "container-log-max-files",
        Int32(|s| &mut s.config.container_log_max_files),
        "Maximum number of log files per container",
    ),
    config(
        "container-log-max-size",
        Text(|s| &mut s.config.container_log_max_size),
        "Maximum size of a container log file before it is rotated",
    ),
    config(
        "container-runtime-endpoint",
        Text(|s| &mut s.config.container_runtime_endpoint),
        "Endpoint of the container runtime service",
    ),
    config(
        "contention-profiling",
        Bool(|s| &mut s.config.enable_contention_profiling),
        "No effect: lock contention is not profiled",
    ),
    config(
        "cpu-cfs-quota",
        Bool(|s| &mut s.config.cpu_cfs_quota),
        "Enable CPU CFS quota enforcement for containers that specify CPU limits",
    ),
    config(
        "cpu-cfs-quota-period",
        Duration(|s| &mut s.config.cpu_cfs_quota_period),
        "CPU CFS quota period (cpu.cfs_period_us)",
    ),
    config("cpu-manager-policy", Text(|s| &mut s.config.cpu_manager_policy), "CPU manager policy: none or static"),
    config(
        "cpu-manager-policy-options",
        Map(Pairs::Single, |s| &mut s.config.cpu_manager_policy_options),
        "Options of the CPU manager policy",
    ),
    config(
        "cpu-manager-reconcile-period",
        Duration(|s| &mut s.config.cpu_manager_reconcile_period),
        "Interval of CPU manager reconciliation",
    ),
    config(
        "enable-controller-attach-detach",
        Bool(|s| &mut s.config.enable_controller_attach_detach),
        "Let the attach/detach controller attach and detach the node's volumes",
    ),
    config(
        "enable-debugging-handlers",
        Bool(|s| &mut s.config.enable_debugging_handlers),
        "Enable server endpoints for log collection and local running of containers and commands",
    ),
    config("enable-server", Bool(|s| &mut s.config.enable_server), "Enable the Kubelet's server"),
    config(
        "enforce-node-allocatable",
        Texts(|s| &mut s.config.enforce_node_allocatable),
        "Levels of node allocatable enforcement, such as pods, system-reserved, and kube-reserved",
    ),
    config("event-burst", Int32(|s| &mut s.config.event_burst), "Maximum burst of event creations"),
    config("event-qps", Int32(|s| &mut s.config.event_record_qps), "Maximum number of event creations per second"),
    config("eviction-hard", Map(Pairs::Below, |s| &mut s.config.eviction_hard), "Hard eviction thresholds"),
    config(
        "eviction-max-pod-grace-period",
        Int32(|s| &mut s.config.eviction_max_pod_grace_period),
        "Maximum grace period in seconds of pods terminated for a soft eviction threshold",
    ),
    config(
        "eviction-minimum-reclaim",
        Map(Pairs::Equal, |s| &mut s.config.eviction_minimum_reclaim),
        "Minimum amount of a resource to reclaim per eviction signal",
    ),
    config(
        "eviction-pressure-transition-period",
        Duration(|s| &mut s.config.eviction_pressure_transition_period),
        "Duration to wait before transitioning out of an eviction pressure condition",
    ),
    config("eviction-soft", Map(Pairs::Below, |s| &mut s.config.eviction_soft), "Soft eviction thresholds"),
    config(
        "eviction-soft-grace-period",
        Map(Pairs::Equal, |s| &mut s.config.eviction_soft_grace_period),
        "Grace period of each soft eviction threshold",
    ),
    plain("fail-cgroupv1", Bool(|s| &mut s.config.fail_cgroup_v1), "Fail to start on a host that uses cgroup v1"),
    config("fail-swap-on", Bool(|s| &mut s.config.fail_swap_on), "Fail to start if swap is enabled on the node"),
    config("feature-gates", Gates(|s| &mut s.config.feature_gates), "Feature gates to enable or disable"),
    config(
        "file-check-frequency",
        Duration(|s| &mut s.config.file_check_frequency),
        "Duration between checking static pod files for new data",
    ),
    config(
        "hairpin-mode",
        Text(|s| &mut s.config.hairpin_mode),
        "No effect; promiscuous-bridge, hairpin-veth, or none",
    ),
    config("healthz-bind-address", Ip(|s| &mut s.config.healthz_bind_address), "Address of the healthz listener"),
    config("healthz-port", Int32(|s| &mut s.config.healthz_port), "Port of the healthz listener; 0 disables it"),
    config(
        "http-check-frequency",
        Duration(|s| &mut s.config.http_check_frequency),
        "Duration between checking the static pod URL for new data",
    ),
    config(
        "image-gc-high-threshold",
        Int32(|s| &mut s.config.image_gc_high_threshold_percent),
        "Percent of disk usage above which image garbage collection is always run",
    ),
    config(
        "image-gc-low-threshold",
        Int32(|s| &mut s.config.image_gc_low_threshold_percent),
        "Percent of disk usage that image garbage collection frees space down to",
    ),
    config(
        "image-service-endpoint",
        Text(|s| &mut s.config.image_service_endpoint),
        "Endpoint of the container image service; empty is the container runtime endpoint",
    ),
    config(
        "kernel-memcg-notification",
        Bool(|s| &mut s.config.kernel_memcg_notification),
        "Use kernel memcg notifications for memory eviction thresholds instead of polling",
    ),
    config("kube-api-burst", Int32(|s| &mut s.config.kube_api_burst), "Maximum burst of requests to the API server"),
    config(
        "kube-api-content-type",
        Text(|s| &mut s.config.content_type),
        "No effect: requests to the API server are JSON",
    ),
    config(
        "kube-api-qps",
        Int32(|s| &mut s.config.kube_api_qps),
        "Maximum number of requests to the API server per second",
    ),
    config("kube-reserved", Map(Pairs::Equal, |s| &mut s.config.kube_reserved), "Resources reserved for node agents"),
    config(
        "kube-reserved-cgroup",
        Text(|s| &mut s.config.kube_reserved_cgroup),
        "Cgroup on which kubeReserved is enforced",
    ),
    config("kubelet-cgroups", Text(|s| &mut s.config.kubelet_cgroups), "Cgroup to create and move the agent to"),
    config(
        "local-storage-capacity-isolation",
        Bool(|s| &mut s.config.local_storage_capacity_isolation),
        "Enable local ephemeral storage isolation",
    ),
    config(
        "make-iptables-util-chains",
        Bool(|s| &mut s.config.make_iptables_util_chains),
        "No effect: no iptables chains are created",
    ),
    config("manifest-url", Text(|s| &mut s.config.static_pod_url), "URL for accessing static pod definitions"),
    config(
        "manifest-url-header",
        Headers(|s| &mut s.config.static_pod_url_header),
        "HTTP headers of requests to the static pod URL; may contain secrets",
    ),
    config(
        "max-open-files",
        Int64(|s| &mut s.config.max_open_files),
        "Maximum number of files that the agent can open",
    ),
    config("max-pods", Int32(|s| &mut s.config.max_pods), "Maximum number of pods on the node"),
    config(
        "memory-manager-policy",
        Text(|s| &mut s.config.memory_manager_policy),
        "Memory manager policy: None or Static",
    ),
    config(
        "minimum-image-ttl-duration",
        Duration(|s| &mut s.config.image_minimum_gc_age),
        "Minimum age of an unused image before it is garbage collected",
    ),
    config(
        "node-status-max-images",
        Int32(|s| &mut s.config.node_status_max_images),
        "Maximum number of images in the node status; -1 is no limit",
    ),
    config(
        "node-status-update-frequency",
        Duration(|s| &mut s.config.node_status_update_frequency),
        "Interval between computations of the node status",
    ),
    config("oom-score-adj", Int32(|s| &mut s.config.oom_score_adj), "oom_score_adj value of the agent"),
    config("pod-cidr", Text(|s| &mut s.config.pod_cidr), "CIDR of pod IP addresses, standalone mode only"),
    config(
        "pod-manifest-path",
        Text(|s| &mut s.config.static_pod_path),
        "Directory of static pod files, or path of a single static pod file",
    ),
    config(
        "pod-max-pids",
        Int64(|s| &mut s.config.pod_pids_limit),
        "Maximum number of processes per pod; -1 is the node's limit",
    ),
    config("pods-per-core", Int32(|s| &mut s.config.pods_per_core), "Maximum number of pods per core; 0 is no limit"),
    config("port", Int32(|s| &mut s.config.port), "Port of the HTTPS server"),
    config(
        "protect-kernel-defaults",
        Bool(|s| &mut s.config.protect_kernel_defaults),
        "Fail if a kernel tunable differs from the Kubelet's default, instead of modifying it",
    ),
    plain(
        "provider-id",
        Text(|s| &mut s.config.provider_id),
        "Unique identifier of the machine in its cloud provider's database",
    ),
    config(
        "qos-reserved",
        Map(Pairs::Equal, |s| &mut s.config.qos_reserved),
        "Percentage of memory requests that lower QoS classes cannot use (memory=50%); needs the gate QOSReserved",
    ),
    config("read-only-port", Int32(|s| &mut s.config.read_only_port), "Port of the read-only server; 0 disables it"),
    config("register-node", Bool(|s| &mut s.config.register_node), "Register the node with the API server"),
    config("register-with-taints", Taints(|s| &mut s.config.register_with_taints), "Taints to register the node with"),
    config("registry-burst", Int32(|s| &mut s.config.registry_burst), "Maximum burst of image pulls"),
    config(
        "registry-qps",
        Int32(|s| &mut s.config.registry_pull_qps),
        "Maximum number of image pulls per second; 0 is no limit",
    ),
    config(
        "reserved-cpus",
        Text(|s| &mut s.config.reserved_system_cpus),
        "CPUs reserved for the system, as a CPU list",
    ),
    config("reserved-memory", ReservedMemory(|s| &mut s.config.reserved_memory), "Memory reserved per NUMA node"),
    config(
        "resolv-conf",
        Text(|s| &mut s.config.resolv_conf),
        "Resolver configuration file for the containers' DNS settings; empty is none",
    ),
    config(
        "rotate-certificates",
        Bool(|s| &mut s.config.rotate_certificates),
        "Rotate client certificates by requesting new ones from the API server before they expire",
    ),
    config(
        "rotate-server-certificates",
        Bool(|s| &mut s.config.server_tls_bootstrap),
        "Request and rotate the serving certificate through the API server",
    ),
    config("runonce", Bool(|s| &mut s.config.run_once), "Removed; must not be set"),
    config(
        "runtime-request-timeout",
        Duration(|s| &mut s.config.runtime_request_timeout),
        "Timeout of all runtime requests except long-running ones (pull, logs, exec, and attach)",
    ),
    config("serialize-image-pulls", Bool(|s| &mut s.config.serialize_image_pulls), "Pull images one at a time"),
    config(
        "streaming-connection-idle-timeout",
        Duration(|s| &mut s.config.streaming_connection_idle_timeout),
        "Time after which an idle exec, attach, or port-forward stream is closed; 0 for never",
    ),
    config(
        "sync-frequency",
        Duration(|s| &mut s.config.sync_frequency),
        "Maximum period between synchronizing running containers and configuration",
    ),
    config(
        "system-cgroups",
        Text(|s| &mut s.config.system_cgroups),
        "Cgroup to move the processes of the root cgroup to; requires --cgroup-root",
    ),
    config(
        "system-reserved",
        Map(Pairs::Equal, |s| &mut s.config.system_reserved),
        "Resources reserved for the system",
    ),
    config(
        "system-reserved-cgroup",
        Text(|s| &mut s.config.system_reserved_cgroup),
        "Cgroup on which systemReserved is enforced",
    ),
    config("tls-cert-file", Text(|s| &mut s.config.tls_cert_file), "Serving certificate, PEM"),
    config(
        "tls-cipher-suites",
        Texts(|s| &mut s.config.tls_cipher_suites),
        "Cipher suites of the server, by Go's names; empty is the default set",
    ),
    config(
        "tls-min-version",
        Text(|s| &mut s.config.tls_min_version),
        "Minimum TLS version: VersionTLS10, VersionTLS11, VersionTLS12, or VersionTLS13; empty is VersionTLS12",
    ),
    config("tls-private-key-file", Text(|s| &mut s.config.tls_private_key_file), "Key of the serving certificate, PEM"),
    config(
        "topology-manager-policy",
        Text(|s| &mut s.config.topology_manager_policy),
        "Topology manager policy: none, best-effort, restricted, or single-numa-node",
    ),
    config(
        "topology-manager-policy-options",
        Map(Pairs::Equal, |s| &mut s.config.topology_manager_policy_options),
        "Options of the topology manager policy",
    ),
    config(
        "topology-manager-scope",
        Text(|s| &mut s.config.topology_manager_scope),
        "Scope of topology hints: container or pod",
    ),
    config(
        "volume-plugin-dir",
        Text(|s| &mut s.config.volume_plugin_dir),
        "No effect: FlexVolume plugins are not supported",
    ),
    config(
        "volume-stats-agg-period",
        Duration(|s| &mut s.config.volume_stats_agg_period),
        "Interval of calculating and caching the volume disk usage; a negative number disables it",
    ),
    config(
        "log-json-info-buffer-size",
        Quantity(|s| &mut s.config.logging.options.json.info_buffer_size),
        "Size of the buffer for the info stream in JSON format",
    ),
    config(
        "log-json-split-stream",
        Bool(|s| &mut s.config.logging.options.json.split_stream),
        "In JSON format, write error messages to stderr and info messages to stdout",
    ),
    config(
        "log-text-info-buffer-size",
        Quantity(|s| &mut s.config.logging.options.text.info_buffer_size),
        "Size of the buffer for the info stream in text format",
    ),
    config(
        "log-text-split-stream",
        Bool(|s| &mut s.config.logging.options.text.split_stream),
        "In text format, write error messages to stderr and info messages to stdout",
    ),
    config("logging-format", Text(|s| &mut s.config.logging.format), "Log format: text or json"),
    plain(
        "log-flush-frequency",
        Duration(|s| &mut s.config.logging.flush_frequency.duration),
        "Maximum time between log flushes",
    ),
    short("v", 'v', Level(|s| &mut s.config.logging.verbosity), "Number for the log level verbosity"),
    plain(
        "vmodule",
        VModule(|s| &mut s.config.logging.vmodule),
        "Comma-separated pattern=N pairs: verbosity of single source files, text format only",
    ),
    plain(
        "bootstrap-kubeconfig",
        Text(|s| &mut s.flags.bootstrap_kubeconfig),
        "Kubeconfig used to request the client certificate if --kubeconfig has no valid one",
    ),
    plain("cert-dir", Text(|s| &mut s.flags.cert_dir), "Directory of the TLS certificates"),
    plain(
        "cloud-provider",
        Text(|s| &mut s.flags.cloud_provider),
        "Cloud provider: empty, or external for a node that a cloud controller manager initializes",
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
        "Exit when another process opens the lock file",
    ),
    short("help", 'h', Bool(|s| &mut s.flags.help), "Print help"),
    plain("hostname-override", Text(|s| &mut s.flags.hostname_override), "Node name to use instead of the hostname"),
    plain(
        "housekeeping-interval",
        Duration(|s| &mut s.flags.housekeeping_interval),
        "No effect: container statistics are read on request",
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
    plain(
        "kubeconfig",
        Text(|s| &mut s.flags.kubeconfig),
        "Kubeconfig for connecting to the API server; empty is standalone mode",
    ),
    plain("lock-file", Text(|s| &mut s.flags.lock_file), "Path of the lock file"),
    plain(
        "max-housekeeping-interval",
        Duration(|s| &mut s.flags.max_housekeeping_interval),
        "No effect: container statistics are read on request",
    ),
    plain("node-ip", Text(|s| &mut s.flags.node_ip), "Address of the node, or a dual-stack pair of addresses"),
    plain("node-labels", Labels(|s| &mut s.flags.node_labels), "Labels to add when registering the node"),
    plain(
        "root-dir",
        Text(|s| &mut s.flags.root_dir),
        "Root directory for the agent's files (volume mounts, checkpoints, sockets)",
    ),
    plain("runtime-cgroups", Text(|s| &mut s.flags.runtime_cgroups), "Cgroup of the container runtime"),
    plain(
        "seccomp-default",
        Bool(|s| &mut s.flags.seccomp_default),
        "Use RuntimeDefault as the default seccomp profile",
    ),
    plain(
        "stale-authorization",
        Bool(|s| &mut s.flags.stale_authorization),
        "Extend cached access to metrics and health endpoints by a minute while the API server is unreachable",
    ),
    plain(
        "standalone-authorization",
        Text(|s| &mut s.flags.standalone_authorization),
        "Authorization policy file for a node without an API server; group system:masters always has access",
    ),
    plain(
        "streaming-allowed-hosts",
        Texts(|s| &mut s.flags.streaming_allowed_hosts),
        "Hosts other than this machine that the runtime may redirect streaming requests to",
    ),
    plain(
        "streaming-requires-create",
        Bool(|s| &mut s.flags.streaming_requires_create),
        "Require the create verb too for GET requests that open a stream; false is kubelet's behavior",
    ),
    plain(
        "version",
        Version(|s| &mut s.flags.version),
        "Print the version and exit: true, raw, or vX.Y.Z-suffix to set the reported version",
    ),
    deprecated(
        "experimental-allocatable-ignore-eviction",
        Bool(|s| &mut s.flags.experimental_allocatable_ignore_eviction),
        "Ignore hard eviction thresholds when calculating node allocatable",
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
        "Maximum number of old instances of containers to retain globally; negative is no limit",
        USE_EVICTION,
    ),
    deprecated(
        "maximum-dead-containers-per-container",
        Int32(|s| &mut s.flags.maximum_dead_containers_per_container),
        "Maximum number of old instances to retain per container",
        USE_EVICTION,
    ),
    deprecated(
        "minimum-container-ttl-duration",
        Duration(|s| &mut s.flags.minimum_container_ttl_duration),
        "Minimum age of a finished container before it is garbage collected",
        USE_EVICTION,
    ),
    deprecated(
        "boot-id-file",
        Text(|s| &mut s.flags.boot_id_file),
        "Comma-separated list of files to check for the boot ID",
        LEGACY_STATS,
    ),
    deprecated(
        "machine-id-file",
        Text(|s| &mut s.flags.machine_id_file),
        "Comma-separated list of files to check for the machine ID",
        LEGACY_STATS,
    ),
    legacy("application-metrics-count-limit", ValueSyntax::Int, "100"),
    legacy("container-hints", ValueSyntax::Text, "/etc/cadvisor/container_hints.json"),
    legacy("containerd", ValueSyntax::Text, "/run/containerd/containerd.sock"),
    legacy("containerd-namespace", ValueSyntax::Text, "k8s.io"),
    legacy("enable-load-reader", ValueSyntax::Bool, "false"),
    legacy("event-storage-age-limit", ValueSyntax::Text, "default=0"),
    legacy("event-storage-event-limit", ValueSyntax::Text, "default=0"),
    legacy("global-housekeeping-interval", ValueSyntax::Duration, "1m0s"),
    legacy("log-cadvisor-usage", ValueSyntax::Bool, "false"),
    legacy("storage-driver-user", ValueSyntax::Text, "root"),
    legacy("storage-driver-password", ValueSyntax::Text, "root"),
    legacy("storage-driver-host", ValueSyntax::Text, "localhost:8086"),
    legacy("storage-driver-db", ValueSyntax::Text, "cadvisor"),
    legacy("storage-driver-table", ValueSyntax::Text, "stats"),
    legacy("storage-driver-secure", ValueSyntax::Bool, "false"),
    legacy("storage-driver-buffer-duration", ValueSyntax::Duration, "1m0s"),
];
