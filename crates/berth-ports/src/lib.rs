//! Ports: role traits between subsystems, each with a production implementation and a fake.
//!
//! Subsystems of one layer do not import each other: a trait here describes what one needs from another, and
//! `wiring/composition_root.rs` injects the implementation.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod claims;
mod clock;
mod devices;
mod disk_state_file;
mod events;
mod images;
mod logs;
mod mirrors;
mod node;
mod objects;
mod observer;
mod placement;
mod plugins;
mod pod_progress;
mod probes;
mod resources;
mod runtime;
mod state_file;
mod storage;
mod task_liveness;
mod user_namespaces;
mod volumes;

pub use claims::{NoClaims, PodClaims};
pub use clock::{Clock, SystemClock};
pub use devices::{AllocationRefusal, ContainerDevices, DeviceAdmission, DeviceCapacity, NoDevices, PodDevices};
pub use disk_state_file::{DiskStateFile, OneWrite};
pub use events::{EventKind, EventRecord, EventSink, EventTarget};
pub use images::{EnsureImage, ImageError, ImageProvider, ImageUser, PullPolicy, PullSecret, ResolvedImage};
pub use logs::{ContainerExit, ContainerLogFile, ContainerLogs, LogPolicy, RemovalPredicate, TerminationMessages};
pub use mirrors::{MirrorPodState, MirrorPods};
pub use node::{HandlerFeatures, NodeFacts, RuntimeState};
pub use objects::{CertificateRequest, Credential, ObjectError, ObjectSource, ServiceAccount, TokenRequest};
pub use observer::{LatestObservation, PodObserver, PodView, RuntimePods};
pub use placement::{AllocatablePlacement, ContainerPlacement, ContainerPlacements, NoPlacements, PlacedMemory};
pub use plugins::{NodeDriver, NodeDrivers, PluginHandler, PluginInfo};
pub use pod_progress::{ConcurrentStep, PodProgress, StepTiming, StepView, SyncError};
pub use probes::{ProbeManager, ProbeResult, ProbeResults, ProbedPods, ProbedStatus};
pub use resources::{ContainerTuning, PodCgroup, PodCgroupValues, ResourceError, ResourceManager};
pub use runtime::{
    ActionKind, ActionOutcome, Grace, KillPod, KillReason, PodRuntime, PodStateProvider, StartFailure, SyncOutcome,
    SyncPod,
};
pub use state_file::StateFile;
pub use storage::{AttachedVolumes, StorageError, StorageObjects};
pub use task_liveness::TaskLiveness;
pub use user_namespaces::{IdRange, UserNamespaces};
pub use volumes::{
    BlockVolume, ClaimedVolume, ClaimedVolumes, MountedVolume, MountedVolumes, VolumeCondition, VolumeError,
    VolumeManager, VolumeStats,
};
