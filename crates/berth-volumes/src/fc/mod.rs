//! Fibre Channel volume plugin.
//!
//! There is no login: the disk is present, or appears after a rescan of the SCSI hosts. The directory path encodes the
//! disk's name, so that no record is needed. Implements spec 07 §1, §7.8.

mod disk;
mod plugin;

pub use plugin::FcPlugin;
