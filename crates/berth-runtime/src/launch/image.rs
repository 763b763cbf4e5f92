//! Image configuration that containers inherit. Pure.
//!
//! The image store parses it once per image when it commits the image, so planning a container reads no layer.
//! Implements spec 09a §6, 09b §2.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Container defaults from an image's configuration. Field names are those of image records on disk.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// `User`: `name`, `uid`, `user:group`; empty: root.
    pub user: String,
    /// `Env`, as `KEY=value`.
    pub env: Vec<String>,
    /// `Entrypoint`.
    pub entrypoint: Vec<String>,
    /// `Cmd`.
    pub cmd: Vec<String>,
    /// `WorkingDir`; empty: the root.
    pub working_dir: String,
    /// Keys of `Volumes`.
    pub volumes: Vec<String>,
    /// `StopSignal`: `SIGTERM`, `TERM`, `15`; empty: SIGTERM.
    pub stop_signal: String,
    /// `Labels`.
    pub labels: BTreeMap<String, String>,
    /// Keys of `ExposedPorts`.
    pub exposed_ports: Vec<String>,
}

/// Image data that the launch plans of its containers use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LaunchImage {
    /// Container defaults.
    pub config: ImageConfig,
    /// `architecture`: `amd64`, `386`; empty: that of this machine.
    pub architecture: String,
    /// Content of `/etc/passwd` in the merged root, with symbolic links resolved inside that root; empty if it is
    /// missing or too large. Not guaranteed to be UTF-8.
    pub passwd: Vec<u8>,
    /// Content of `/etc/group`, with the same rules.
    pub group: Vec<u8>,
}
