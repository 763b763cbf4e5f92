//! What is mounted for pods.
//!
//! In: a pod that is to run, or the UID of one that is gone. Out: host paths for its containers;
//! clean disks. Every call works on one pod, on the blocking pool and with a deadline: storage that
//! hangs holds up its pod and nothing else. What is on disk is the state; nothing else is kept.
//!
//! A kind of volume is a file in `plugins/` and a line in its table; kinds that are not there are
//! refused by name. Behaviour: spec 07 §1, 5, 7, 8, 10.

mod atomic_writer;
mod desired;
mod device;
mod fetched;
mod held;
mod layout;
mod manager;
mod memory;
mod orphan;
mod ownership;
mod plugins;
mod remove;
mod spec;
mod turns;
mod worlds;

pub use device::{
    Class, DevicePlugin, Expansion, Found, GroupOf, OpError, Published, Rebuilt, Removal, Traits, Trouble, Usage,
};
pub use layout::PodLayout;
pub use manager::{Manager, VolumesConfig, VolumesDeps};
pub use memory::Credentials;
pub use spec::{Mode, Persistent, Source, UniqueName, VolumeSpec};
