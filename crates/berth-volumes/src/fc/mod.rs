//! Disks of a Fibre Channel network: nobody logs in; the disk is there, or is found when the hosts look again.
//! What a disk is called is in the path of its directory, so that nothing else has to be kept.
//! Behaviour: spec 07 §1, §7.8.

mod disk;
mod plugin;

pub use plugin::FcPlugin;
