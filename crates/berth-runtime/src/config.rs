//! Settings of the embedded runtime: section `embeddedRuntime`. Pure.
//!
//! Every field is optional, and one that nobody knows is refused by name. Behaviour: spec 09 §5.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// The product's name, in control groups, interfaces and the runtime's own name.
pub const NAME: &str = "berth";
/// What is told as the image of a sandbox: there is none, and dashboards look for one.
pub const PAUSE: &str = "berth/pause:builtin";

/// The settings.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EmbeddedConfig {
    /// What survives a reboot.
    pub root: PathBuf,
    /// What a reboot takes with it.
    pub state: PathBuf,
    /// Where others reach the same services: `unix:///run/berth/cri.sock`; empty: nowhere.
    pub serve_socket: String,
    /// Where streams are served, with `serveSocket` only.
    pub stream_address: String,
    /// `systemd`, `cgroupfs`, or empty: found out.
    pub cgroup_driver: String,
    /// `overlay`, `fuse-overlayfs`, `copy`, or empty: found out.
    pub snapshotter: String,
    /// Bytes in a record of a log; 0 and below: no limit.
    pub max_container_log_line_size: i64,
    /// Whether every pod may listen on ports below 1024.
    pub unprivileged_ports: bool,
    /// Whether every pod may send echo requests.
    #[serde(rename = "unprivilegedICMP")]
    pub unprivileged_icmp: bool,
    /// Whether the `RuntimeDefault` seccomp profile allows 32-bit system calls also to 64-bit images. Some of them
    /// (`socketcall`) pass their arguments in memory, where a filter cannot see them.
    #[serde(rename = "allow32BitSystemCalls")]
    pub allow_32_bit_system_calls: bool,
    /// Whether processes are never made less likely to be killed for want of memory than we are; none: found out.
    #[serde(rename = "restrictOOMScoreAdj")]
    pub restrict_oom_score_adj: Option<bool>,
    /// How long after its end an executed process's output is waited for.
    #[serde(rename = "execIODrain", deserialize_with = "duration")]
    pub exec_io_drain: Duration,
    /// By name: `soft:hard`.
    pub default_ulimits: std::collections::BTreeMap<String, String>,
    /// Where devices are described.
    pub cdi_spec_dirs: Vec<PathBuf>,
    /// Whether limits on huge pages are skipped where the controller is missing.
    pub tolerate_missing_hugetlb: bool,
    /// Whether the volumes of an image are not made.
    pub ignore_image_volumes: bool,
    /// Whether devices belong to the container's user.
    pub device_ownership_from_security_context: bool,
    /// `strict`, or `any`: containerd's rule.
    pub oom_reason: OomRule,
    /// About registries.
    pub registries: Registries,
    /// Layers at once for an image.
    pub max_concurrent_downloads: usize,
    /// A pull without a byte for so long is given up; zero: never.
    #[serde(deserialize_with = "duration")]
    pub pull_progress_timeout: Duration,
    /// Whether compressed layers are kept.
    pub keep_compressed_layers: bool,
    /// The largest layer, bytes.
    pub max_layer_bytes: u64,
    /// Most entries of a layer.
    pub max_layer_entries: u64,
    /// Most that a layer may grow.
    pub max_compression_ratio: u64,
    /// Handlers of runtime classes that mean this runtime, beside its own name.
    pub runtime_handlers: Vec<String>,
    /// Images that are never collected.
    pub pinned_images: Vec<String>,
    /// Archives that are imported at the start.
    pub import_dir: PathBuf,
    /// The pods' network.
    pub network: NetworkConfig,
}

/// The pods' network.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// `auto`, `builtin`, `cni`.
    pub mode: String,
    /// The bridge's name; empty: ours.
    pub bridge: String,
    /// MTU; none: that of the default route's link.
    pub mtu: Option<u32>,
    /// Whether pods get the machine's address elsewhere.
    pub masquerade: bool,
    /// Where they do not, besides pods' ranges, link-local and multicast.
    #[serde(rename = "nonMasqueradeCIDRs")]
    pub non_masquerade_cidrs: Vec<String>,
    /// Whether pods can have ports of the machine.
    pub host_ports: bool,
    /// Pods' ranges until the node is given others, with commas; empty: a usual one.
    #[serde(rename = "defaultPodCIDR")]
    pub default_pod_cidr: String,
    /// Where configurations of plugins are.
    pub cni_conf_dir: PathBuf,
    /// Where plugins are.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// How long a plugin may take.
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

/// About registries.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Registries {
    /// Directories of `hosts.toml` files, with `:` between them.
    pub config_path: String,
}

/// When the end of a container is told as `OOMKilled`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OomRule {
    /// It ended of it.
    #[default]
    Strict,
    /// Something of it was ever killed for want of memory.
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
    /// Reads the section.
    ///
    /// # Errors
    /// Names the field.
    pub fn read(section: serde_json::Value) -> Result<Self, String> {
        serde_json::from_value(section).map_err(|error| format!("embeddedRuntime: {error}"))
    }

    /// Bytes in a record of a log; 0: no limit.
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
