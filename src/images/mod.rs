//! Image management: pull, credential verification, and garbage collection.
//!
//! Input: requests through [`berth_ports::ImageProvider`]. Output: a reference for `CreateContainer`,
//! or an error, and events. The [`ImageManager`] owns the back-off and the running pulls; [`ImageManager::run`]
//! owns the image state for garbage collection. Implements spec 03b §1-4.

mod backoff;
mod credential_verification;
pub mod credentials;
mod gc;
mod gc_ages;
mod gc_rank;
mod gc_watch;
mod manager;
mod policy;
mod puller;
pub mod record_documents;
mod records;
pub mod reference;
mod settings;
mod store;

pub use credential_verification::VerificationPolicy;
pub use credentials::{DockerFolders, PluginConfigError, PluginFlags};
pub use gc::{DiskSpaceOf, GcError, statvfs_disk_space};
pub use gc_rank::{DiskSpace, GcPolicy};
pub use manager::ImageManager;
pub use puller::Parallelism;
pub use settings::{ImagesConfig, ImagesDeps, ImagesError, OnPull, PullMoment};
