//! What an image says about its containers. Pure.
//!
//! The store makes it once for each image, when the image is committed: a container is planned without a look into a
//! layer. Behaviour: spec 09a §6, 09b §2.

use serde::{Deserialize, Serialize};

/// The part of an image's configuration that its containers inherit.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// `architecture`: `amd64`, `386`; empty: that of this machine.
    pub architecture: String,
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
    /// Text of `/etc/passwd` in the merged root, symbolic links resolved inside it; empty where it is missing or too
    /// long. Nobody promises that it is UTF-8.
    pub passwd: Vec<u8>,
    /// Text of `/etc/group`, likewise.
    pub group: Vec<u8>,
}
