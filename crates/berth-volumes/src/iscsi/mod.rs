//! Disks of iSCSI targets.
//!
//! ```text
//!  stage:    record ─► iscsiadm: discover, log in ─► scan one unit ─► its device, or the multipath one ─► mount
//!  unstage:  unmount ─► forget the disks ─► log out, if no other unit of the target is used here ─► record
//! ```
//!
//! The record (`iscsi.json`) is written before the first step and removed after the last: an agent that comes after
//! this one reads from it what there is to undo. Secrets are in no record, error or log.
//! Behaviour: spec 07 §1, §7.8.

mod calls;
mod names;
mod plugin;
mod record;
mod session;

pub use plugin::IscsiPlugin;
