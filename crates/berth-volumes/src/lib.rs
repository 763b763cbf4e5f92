//! What is mounted for pods.
//!
//! In: a pod that is to run, or the UID of one that is gone. Out: host paths for its containers;
//! clean disks. Every call works on one pod, on the blocking pool and with a deadline: storage that
//! hangs holds up its pod and nothing else.
//!
//! ```text
//!  pod ─► claims ─► spec ─┬─► plugins/ (files of ours)           ─► what is on disk is the state
//!                         └─► owner/ (a task per volume) ─► DevicePlugin ─► attached, staged, published
//! ```
//!
//! A kind of volume that is files of ours is a file in `plugins/` and a line in its table. One that is more than
//! files (it is attached, staged once for all pods, or hangs with its server) plays the role in `device.rs`, and
//! has an owner per volume and node. What blocks does so in threads that volumes have for themselves (`hands.rs`), and
//! holds its volume (`operation.rs`) or its pod (`turns.rs`) until it returns. Kinds that are neither are refused by name.
//! Behaviour: spec 07 §1-7, 8, 10.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod atomic_writer;
mod block;
mod blocks;
mod claims;
pub mod csi;
mod desired;
mod device;
mod devices;
mod disks;
mod expand;
mod fc;
mod fetched;
mod format;
mod found;
mod fullness;
mod give;
mod hands;
mod held;
mod iscsi;
mod labels;
mod layout;
mod local;
mod machine;
mod manager;
mod memory;
mod migrate;
mod nfs;
mod operation;
mod orphan;
mod owner;
pub mod ownership;
mod plugins;
mod rebuild;
mod refused;
mod selinux;
mod spec;
#[cfg(test)]
mod testing;
mod turns;
mod waiting;
mod worlds;

pub use device::{
    Class, DevicePlugin, Expansion, Found, GroupOf, OpError, Published, Rebuilt, Removal, Traits, Trouble, Usage,
};
pub use fc::FcPlugin;
pub use hands::THREADS;
pub use iscsi::IscsiPlugin;
pub use labels::Labels;
pub use layout::PodLayout;
pub use local::LocalPlugin;
pub use machine::{Machine, ThisMachine};
pub use manager::{Manager, VolumesConfig, VolumesDeps};
pub use memory::{Credentials, may_reach_disk};
pub use nfs::NfsPlugin;
pub use operation::Operation;
pub use selinux::Policy;
pub use spec::{Mode, Persistent, Source, UniqueName, VolumeSpec};
