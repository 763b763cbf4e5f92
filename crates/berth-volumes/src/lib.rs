//! Volume manager: stages, mounts, and cleans up the volumes of pods on this node.
//!
//! Inputs: a pod that is to run, or the UID of a terminated pod. Outputs: host paths for its containers, and cleaned-up
//! directories and mounts. Every call serves one pod, on the blocking pool, with a deadline: hanging storage delays
//! only its own pod.
//!
//! ```text
//!  pod ─► claims ─► spec ─┬─► plugins/ (files written by the agent) ─► the state is on disk
//!                         └─► owner/ (a task per volume) ─► DevicePlugin ─► attached, staged, published
//! ```
//!
//! A volume type that consists only of files written by the agent is one file in `plugins/` and one line in its table.
//! A volume type that needs more (attach, one stage per node, or a server that may hang) implements the trait in
//! `attachable.rs` and gets one owner task per volume and node. Blocking calls run on threads reserved for volumes
//! (`blocking_pools.rs`) and keep the semaphore permit of the volume (`operation.rs`) or pod (`pending_operations.rs`) until they return.
//! Every other volume type is rejected by name.
//! Implements spec 07 §1-7, 8, 10.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod api_objects;
mod atomic_writer;
mod attachable;
mod block_mapper;
mod blocking_pools;
mod claims;
pub mod csi;
mod desired_volumes;
mod expansion;
mod fc;
mod file_system;
mod global_mount;
mod group_ownership;
mod iscsi;
mod labels;
mod layout;
mod local;
mod machine;
mod manager;
mod memory;
mod migration;
mod mount_wait;
mod nfs;
mod operation;
mod orphan;
mod orphan_backoff;
pub mod ownership;
mod pending_operations;
mod plugins;
mod pod_volumes;
mod rebuild;
mod rebuild_files;
mod reconciler;
mod scsi;
mod selinux;
mod spec;
mod state_of_world;
#[cfg(test)]
mod testing;
mod token_reuse;
mod usage_stats;

pub use attachable::{
    AttachableVolumePlugin, Class, ErrorCause, Expansion, FoundVolume, FsGroup, OpError, PublishedVolume,
    ReconstructedVolume, Removal, Usage, VolumeTraits,
};
pub use blocking_pools::THREADS;
pub use fc::FcPlugin;
pub use iscsi::IscsiPlugin;
pub use labels::LabelPolicy;
pub use layout::PodLayout;
pub use local::LocalPlugin;
pub use machine::{HostOperations, ThisMachine};
pub use manager::{PodVolumeManager, VolumesConfig, VolumesDeps};
pub use memory::{CredentialStorage, may_reach_disk};
pub use nfs::NfsPlugin;
pub use operation::Operation;
pub use selinux::SelinuxPolicy;
pub use spec::{Mode, Persistent, UniqueName, VolumeSource, VolumeSpec};
