//! Configuration of the embedded runtime: section `embeddedRuntime`. Pure.
//!
//! Every field is optional; an unknown field is an error that names it. Implements spec 09 §5.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// The product name, as used in cgroups, network interfaces, and the runtime name.
pub const NAME: &str = "berth";
/// Image name reported for sandboxes: no such image exists, but dashboards expect one.
pub const PAUSE: &str = "berth/pause:builtin";

/// Section `embeddedRuntime` of the configuration.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EmbeddedConfig {
    /// Directory of state that survives a reboot.
    pub root: PathBuf,
    /// Directory of state that a reboot discards.
    pub state: PathBuf,
    /// CRI socket for other clients, such as `unix:///run/berth/cri.sock`; empty: none.
    pub serve_socket: String,
    /// Address of the streaming server; used with `serveSocket` only.
    pub stream_address: String,
    /// `systemd`, `cgroupfs`, or empty: detected.
    pub cgroup_driver: String,
    /// `overlay`, `fuse-overlayfs`, `copy`, or empty: detected.
    pub snapshotter: String,
    /// Maximum size of a container log line, bytes; 0 or less: no limit.
    pub max_container_log_line_size: i64,
    /// Whether processes of every pod may bind ports below 1024.
    pub unprivileged_ports: bool,
    /// Whether processes of every pod may send ICMP echo requests.
    #[serde(rename = "unprivilegedICMP")]
    pub unprivileged_icmp: bool,
    /// Whether the `RuntimeDefault` seccomp profile also allows 32-bit system calls in 64-bit images. Some of them
    /// (`socketcall`) pass their arguments in memory, where a filter cannot inspect them.
    #[serde(rename = "allow32BitSystemCalls")]
    pub allow_32_bit_system_calls: bool,
    /// Whether `oom_score_adj` of containers is never below the agent's own; none: detected.
    #[serde(rename = "restrictOOMScoreAdj")]
    pub restrict_oom_score_adj: Option<bool>,
    /// How long the output of an executed process is drained after its exit.
    #[serde(rename = "execIODrain", deserialize_with = "duration")]
    pub exec_io_drain: Duration,
    /// Default resource limits: name to `soft:hard`.
    pub default_ulimits: std::collections::BTreeMap<String, String>,
    /// Directories of CDI specs.
    pub cdi_spec_dirs: Vec<PathBuf>,
    /// Whether hugepage limits are ignored where the `hugetlb` controller is missing.
    pub tolerate_missing_hugetlb: bool,
    /// Whether volumes declared by an image are ignored.
    pub ignore_image_volumes: bool,
    /// Whether device nodes are owned by the container's user.
    pub device_ownership_from_security_context: bool,
    /// When an exit is reported as `OOMKilled`: `strict`, or `any` (containerd's rule).
    pub oom_reason: OomRule,
    /// Registry configuration.
    pub registries: Registries,
    /// Maximum number of concurrent layer downloads of one image.
    pub max_concurrent_downloads: usize,
    /// A pull without progress for this long is aborted; zero: never.
    #[serde(deserialize_with = "duration")]
    pub pull_progress_timeout: Duration,
    /// Whether compressed layers are kept after unpacking.
    pub keep_compressed_layers: bool,
    /// Maximum size of an unpacked layer, bytes.
    pub max_layer_bytes: u64,
    /// Maximum number of entries of a layer.
    pub max_layer_entries: u64,
    /// Maximum ratio of unpacked to compressed size of a layer.
    pub max_compression_ratio: u64,
    /// RuntimeClass handlers served by this runtime, in addition to its own name.
    pub runtime_handlers: Vec<String>,
    /// Images that are never garbage collected.
    pub pinned_images: Vec<String>,
    /// Directory of image archives that are imported at startup.
    pub import_dir: PathBuf,
    /// Pod network configuration.
    pub network: NetworkConfig,
}

/// Pod network configuration.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// `auto`, `builtin`, or `cni`.
    pub mode: String,
    /// Name of the bridge; empty: the built-in name.
    pub bridge: String,
    /// MTU of pod interfaces; none: that of the default route's interface.
    pub mtu: Option<u32>,
    /// Whether traffic from pods to other networks is masqueraded.
    pub masquerade: bool,
    /// Destinations without masquerading, in addition to pod CIDRs, link-local, and multicast.
    #[serde(rename = "nonMasqueradeCIDRs")]
    pub non_masquerade_cidrs: Vec<String>,
    /// Whether pods may use host ports.
    pub host_ports: bool,
    /// Comma-separated pod CIDRs until the node has its own; empty: the built-in default.
    #[serde(rename = "defaultPodCIDR")]
    pub default_pod_cidr: String,
    /// Directory of CNI network configurations.
    pub cni_conf_dir: PathBuf,
    /// Directories of CNI plugin binaries.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Timeout of one CNI plugin call.
    #[serde(deserialize_with = "duration")]
    pub cni_timeout: Duration,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            mode: "auto".to_owned(),
            bridge: String::new(),
            mtu: None,
            masquerade: true,
            non_masquerade_cidrs: Vec::new(),
            host_ports: true,
            default_pod_cidr: String::new(),
            cni_conf_dir: "/etc/cni/net.d".into(),
            cni_bin_dirs: ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"].map(PathBuf::from).to_vec(),
            cni_timeout: Duration::from_secs(60),
        }
    }
}

/// Registry configuration.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Registries {
    /// Directories of `hosts.toml` files, separated by `:`.
    pub config_path: String,
}

/// When a container exit is reported as `OOMKilled`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OomRule {
    /// The OOM kill caused the exit.
    #[default]
    Strict,
    /// The OOM killer killed any process of the container at any time.
    Any,
}

impl Default for EmbeddedConfig {
    fn default() -> Self {
        Self {
            root: format!("/var/lib/{NAME}/runtime").into(),
            state: format!("/run/{NAME}/runtime").into(),
            serve_socket: String::new(),
            stream_address: "127.0.0.1:0".to_owned(),
            cgroup_driver: String::new(),
            snapshotter: String::new(),
            max_container_log_line_size: 16384,
            unprivileged_ports: true,
            unprivileged_icmp: true,
            allow_32_bit_system_calls: false,
            restrict_oom_score_adj: None,
            exec_io_drain: Duration::from_secs(2),
            default_ulimits: [("nofile".to_owned(), "1024:524288".to_owned())].into(),
            cdi_spec_dirs: vec!["/etc/cdi".into(), "/run/cdi".into()],
            tolerate_missing_hugetlb: true,
            ignore_image_volumes: false,
            device_ownership_from_security_context: false,
            oom_reason: OomRule::Strict,
            registries: Registries::default(),
            max_concurrent_downloads: 3,
            pull_progress_timeout: Duration::from_secs(300),
            keep_compressed_layers: false,
            max_layer_bytes: 64 << 30,
            max_layer_entries: 5_000_000,
            max_compression_ratio: 1000,
            runtime_handlers: Vec::new(),
            pinned_images: Vec::new(),
            import_dir: format!("/var/lib/{NAME}/images").into(),
            network: NetworkConfig::default(),
        }
    }
}

impl Default for Registries {
    fn default() -> Self {
        Self { config_path: format!("/etc/{NAME}/certs.d:/etc/containerd/certs.d:/etc/docker/certs.d") }
    }
}

impl EmbeddedConfig {
    /// Parses the section.
    ///
    /// # Errors
    /// Invalid JSON; the text names the field.
    pub fn read(section: serde_json::Value) -> Result<Self, String> {
        serde_json::from_value(section).map_err(|error| format!("embeddedRuntime: {error}"))
    }

    /// Maximum size of a container log line, bytes; 0: no limit.
    pub fn longest_record(&self) -> usize {
        usize::try_from(self.max_container_log_line_size).unwrap_or_default()
    }
}

fn duration<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let parsed: jiff::SignedDuration = text.parse().map_err(serde::de::Error::custom)?;
    Duration::try_from(parsed).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_optional_and_strange_ones_are_named() {
        let read = |text: &str| EmbeddedConfig::read(serde_json::from_str(text).expect("JSON"));
        assert_eq!(read("{}"), Ok(EmbeddedConfig::default()));
        let some = read(r#"{"execIODrain": "5s", "root": "/x", "oomReason": "any", "pullProgressTimeout": "0"}"#);
        let some = some.expect("fine");
        assert_eq!((some.exec_io_drain, some.oom_reason), (Duration::from_secs(5), OomRule::Any));
        assert_eq!(some.pull_progress_timeout, Duration::ZERO);
        let allowing = read(r#"{"allow32BitSystemCalls": true}"#).expect("fine");
        assert!(allowing.allow_32_bit_system_calls && !some.allow_32_bit_system_calls);
        let wrong = read(r#"{"exceIODrain": "5s"}"#).expect_err("unknown");
        assert!(wrong.starts_with("embeddedRuntime: unknown field `exceIODrain`"), "{wrong}");
        let wrong = read(r#"{"registries": {"path": "x"}}"#).expect_err("unknown");
        assert!(wrong.contains("unknown field `path`"), "{wrong}");
    }
}
