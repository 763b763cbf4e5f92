//! On-disk records of sandboxes and containers. Pure.
//! Implements spec 09 §6.

use std::{collections::BTreeMap, path::PathBuf};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::launch::devices::Rule;
use berth_shim::plan::LaunchPlan;

/// Version of all records; any other version makes an object broken.
pub const VERSION: u64 = super::record::VERSION;

/// A sandbox's `meta.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SandboxMeta {
    /// [`VERSION`].
    pub v: u64,
    /// Sandbox id.
    pub id: String,
    /// `name_namespace_uid_attempt`.
    pub name: String,
    /// Creation time, nanoseconds since the epoch.
    pub created_ns: i64,
    /// CRI configuration: base64 of the protobuf message.
    pub config: String,
    /// Runtime handler of the request.
    pub runtime_handler: String,
    /// Network namespace file, where the sandbox has its own network.
    pub netns: Option<PathBuf>,
    /// Pod addresses, the primary one first.
    pub ips: Vec<String>,
    /// Cgroup path.
    pub group: String,
    /// Data for the teardown of its network.
    #[serde(default)]
    pub network: serde_json::Value,
}

/// Lifecycle phase of a sandbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxPhase {
    /// Under creation, not listed.
    Creating,
    /// Containers can run in it.
    Ready,
    /// Containers can no longer run in it.
    NotReady,
}

/// A sandbox's `state.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SandboxState {
    /// [`VERSION`].
    pub v: u64,
    /// Lifecycle phase.
    pub state: SandboxPhase,
    /// Id of the boot in which the sandbox was created.
    pub boot_id: String,
    /// Updated resources: base64 of the protobuf message.
    pub resources: Option<String>,
    /// Updated overhead: base64 of the protobuf message.
    pub overhead: Option<String>,
}

/// A container's `meta.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ContainerMeta {
    /// [`VERSION`].
    pub v: u64,
    /// Container id.
    pub id: String,
    /// Id of the sandbox whose shim runs the container.
    pub sandbox_id: String,
    /// `container_pod_namespace_uid_attempt`.
    pub name: String,
    /// Creation time, nanoseconds since the epoch.
    pub created_ns: i64,
    /// CRI configuration: base64 of the protobuf message.
    pub config: String,
    /// Image id: digest of the image configuration.
    pub image_id: String,
    /// First digest of the image, or its id.
    pub image_digest: String,
    /// First tag of the image, or the name in the request.
    pub image_name: String,
    /// Absolute path of the log; `None`: logging is disabled.
    pub log_path: Option<PathBuf>,
    /// Number of the stop signal.
    pub stop_signal: i32,
    /// User, primary group, and all groups.
    pub user: (u32, u32, Vec<u32>),
    /// Cgroup path.
    pub group: String,
    /// Ids of the image volumes' images, by path in the container.
    #[serde(default)]
    pub mounted: BTreeMap<String, String>,
}

/// A container's `state.json`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ContainerState {
    /// [`VERSION`].
    pub v: u64,
    /// Process id of its first process; 0: never started.
    pub pid: u32,
    /// Start time of that process in clock ticks; distinguishes it from a later process with the same id.
    pub start_ticks: u64,
    /// Start time, nanoseconds since the epoch; 0: not started.
    pub started_ns: i64,
    /// End time, nanoseconds since the epoch; 0: not ended.
    pub finished_ns: i64,
    /// Exit code: 128 if the start failed, 137 after an OOM kill, 255 if the exit was not observed.
    pub exit_code: i32,
    /// Reason of the end, one CamelCase word.
    pub reason: String,
    /// Message about the end.
    pub message: String,
    /// Updated resources: base64 of the protobuf message.
    pub resources: Option<String>,
}

/// A container's `spec.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// [`VERSION`].
    pub v: u64,
    /// Launch plan for the shim.
    pub plan: LaunchPlan,
    /// Device cgroup rules.
    pub devices: Vec<Rule>,
}

/// Encodes a protobuf message as base64.
pub fn pack(message: &impl Message) -> String {
    BASE64.encode(message.encode_to_vec())
}

/// Decodes a protobuf message from base64; `None` if malformed.
pub fn unpack<M: Message + Default>(text: &str) -> Option<M> {
    M::decode(BASE64.decode(text).ok()?.as_slice()).ok()
}
