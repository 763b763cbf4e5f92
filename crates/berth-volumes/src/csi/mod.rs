//! CSI volume plugin: driver registration and node service calls over gRPC.
//!
//! ```text
//!  plugin watcher ─► drivers ─► NodeGetInfo ─► Node, CSINode
//!                       │
//!  owner of a volume ─► plugin ─► stage, publish, unpublish, unstage, expand ─► NodeStageVolume, …
//!                                  └─ vol_data.json beside each mount: what to undo, for the next agent
//! ```
//!
//! A record is written before the call to its driver and removed after the state that it describes: whoever finds a
//! record may call the driver to undo it. Each registration has one channel and one cached capabilities response. A
//! call without a result leaves everything in place. Implements spec 07 §1, §2.4, §6, §12, §17.

mod attachment;
mod block;
mod client;
mod context;
mod disk;
mod driver;
mod drivers;
mod expansion;
mod fs_group;
mod limits;
mod node_publish;
mod node_stage;
mod node_unpublish;
mod paths;
mod plugin;
mod rebuild;
mod record;
mod source;
mod version;
mod volume_stats;

pub use drivers::{DriverRegistration, Drivers, DriversDeps};
pub use plugin::{Csi, CsiDeps};
