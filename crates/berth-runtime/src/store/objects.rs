//! What is written down of sandboxes and containers. Pure. Behaviour: spec 09 §6.

use std::{collections::BTreeMap, path::PathBuf};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::launch::devices::Rule;
use berth_shim::plan::LaunchPlan;

/// The version of all records; others are broken objects.
pub const VERSION: u64 = super::record::VERSION;

/// A sandbox's `meta.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SandboxMeta {
    /// [`VERSION`].
    pub v: u64,
    /// Identity.
    pub id: String,
    /// `name_namespace_uid_attempt`.
    pub name: String,
    /// When it was made, nanoseconds since the epoch.
    pub created_ns: i64,
    /// The request's configuration: base64 of the message.
    pub config: String,
    /// The request's handler.
    pub runtime_handler: String,
    /// The namespace file, where the sandbox has a network of its own.
    pub netns: Option<PathBuf>,
    /// Addresses, the main one first.
    pub ips: Vec<String>,
    /// Its control group.
    pub group: String,
    /// What taking its network down needs to know.
    #[serde(default)]
    pub network: serde_json::Value,
}

/// What a sandbox is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxPhase {
    /// Nobody has been told of it yet.
    Creating,
    /// Containers can run in it.
    Ready,
    /// They cannot any more.
    NotReady,
}

/// A sandbox's `state.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SandboxState {
    /// [`VERSION`].
    pub v: u64,
    /// What it is.
    pub state: SandboxPhase,
    /// The boot it was made in.
    pub boot_id: String,
    /// Resources that were told later: base64 of the message.
    pub resources: Option<String>,
    /// Overhead that was told later: base64 of the message.
    pub overhead: Option<String>,
}

/// A container's `meta.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ContainerMeta {
    /// [`VERSION`].
    pub v: u64,
    /// Identity.
    pub id: String,
    /// Its sandbox.
    pub sandbox_id: String,
    /// `container_pod_namespace_uid_attempt`.
    pub name: String,
    /// When it was made, nanoseconds since the epoch.
    pub created_ns: i64,
    /// The request's configuration: base64 of the message.
    pub config: String,
    /// The image's identity.
    pub image_id: String,
    /// The image's first digest, or its identity.
    pub image_digest: String,
    /// The image's first tag, or the name in the request.
    pub image_name: String,
    /// The log's whole path; none: nothing is logged.
    pub log_path: Option<PathBuf>,
    /// The number of the signal that asks it to stop.
    pub stop_signal: i32,
    /// User, primary group, all groups.
    pub user: (u32, u32, Vec<u32>),
    /// Its control group.
    pub group: String,
    /// Identities of the images that are mounted into it, by path.
    #[serde(default)]
    pub mounted: BTreeMap<String, String>,
}

/// A container's `state.json`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ContainerState {
    /// [`VERSION`].
    pub v: u64,
    /// Its first process; 0: never started.
    pub pid: u32,
    /// Tells that process from another of the same number.
    pub start_ticks: u64,
    /// When it was started; 0: not.
    pub started_ns: i64,
    /// When it ended; 0: not.
    pub finished_ns: i64,
    /// How it ended.
    pub exit_code: i32,
    /// In a word.
    pub reason: String,
    /// In a sentence.
    pub message: String,
    /// Resources that were told later: base64 of the message.
    pub resources: Option<String>,
}

/// A container's `spec.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// [`VERSION`].
    pub v: u64,
    /// What its shim carries out.
    pub plan: LaunchPlan,
    /// What it may do with devices.
    pub devices: Vec<Rule>,
}

/// A message as text.
pub fn pack(message: &impl Message) -> String {
    BASE64.encode(message.encode_to_vec())
}

/// The message in a text; `None` where it is none.
pub fn unpack<M: Message + Default>(text: &str) -> Option<M> {
    M::decode(BASE64.decode(text).ok()?.as_slice()).ok()
}
