//! Images: present, permitted, and gone when they are no longer needed.
//!
//! A request for one image comes in through [`berth_ports::ImageProvider`]; out goes a
//! reference for `CreateContainer`, or exactly why not, and the events on the way. The
//! [`Manager`] owns the back-off and the pulls under way; [`Manager::run`] owns what is
//! remembered of images for garbage collection. Behaviour: spec 03b §1-4.

mod backoff;
pub mod credentials;
mod gc;
mod gc_ages;
mod gc_rank;
mod gc_watch;
mod manager;
mod policy;
mod puller;
mod rate;
pub mod record;
mod records;
pub mod reference;
mod settings;
mod store;
mod verify;

pub use credentials::{DockerFolders, PluginConfigError, PluginFlags};
pub use gc::{GcError, RoomOf, statvfs_room};
pub use gc_rank::{GcPolicy, Room};
pub use manager::Manager;
pub use puller::Parallelism;
pub use settings::{ImagesConfig, ImagesDeps, ImagesError, OnPull, PullMoment};
pub use verify::VerificationPolicy;
