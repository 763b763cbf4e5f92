//! Volumes of CSI drivers: programs that registered, and their volumes by gRPC.
//!
//! ```text
//!  plugin watcher ─► drivers ─► NodeGetInfo ─► Node, CSINode
//!                       │
//!  owner of a volume ─► plugin ─► stage, publish, unpublish, unstage, expand ─► NodeStageVolume, …
//!                                  └─ vol_data.json beside each mount: what to undo, for the next agent
//! ```
//!
//! A record is written before its driver is called, and removed after what it stands for: whoever finds one may call
//! the driver to undo it. One channel and one answer about capabilities per registration. A call that came to no end
//! leaves everything where it is. Behaviour: spec 07 §1, §2.4, §6, §12, §17.

mod attachment;
mod block;
mod client;
mod context;
mod disk;
mod driver;
mod drivers;
mod expand;
mod fs_group;
mod fullness;
mod limits;
mod paths;
mod plugin;
mod publish;
mod rebuild;
mod record;
mod source;
mod stage;
mod unpublish;
mod version;

pub use drivers::{DriverRegistration, Drivers, DriversDeps};
pub use plugin::{Csi, CsiDeps};
