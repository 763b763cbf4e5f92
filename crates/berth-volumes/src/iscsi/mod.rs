//! iSCSI volume plugin.
//!
//! ```text
//!  stage:    record ─► iscsiadm: discovery, login ─► scan one LUN ─► its disk or multipath device ─► mount
//!  unstage:  unmount ─► delete the disks ─► logout, unless another LUN of the target is in use ─► record
//! ```
//!
//! The record (`iscsi.json`) is written before the first step and removed after the last one: a later agent reads from
//! it what to undo. No record, error, or log line contains a secret. Implements spec 07 §1, §7.8.

mod calls;
mod names;
mod plugin;
mod record;
mod session;

pub use plugin::IscsiPlugin;
