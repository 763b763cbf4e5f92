//! Ports: role traits between subsystems, each with a production implementation and a fake.
//!
//! Subsystems of one layer do not import each other: a trait here describes what one needs from another, and
//! `wiring/build.rs` injects the implementation.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod clock;
mod disk_state_file;
mod events;
mod images;
mod logs;
mod mirrors;
mod node;
mod objects;
mod observer;
mod plugins;
mod pod_progress;
mod probes;
mod pulse;
mod resources;
mod runtime;
mod state_file;
mod storage;
mod user_namespaces;
mod volumes;

pub use clock::{Clock, SystemClock};
pub use disk_state_file::{DiskStateFile, OneWrite};
pub use events::{Event, EventKind, EventSink, EventTarget};
pub use images::{EnsureImage, ImageError, ImageProvider, ImageUser, PullPolicy, PullSecret, ResolvedImage};
pub use logs::{ContainerExit, ContainerLogFile, ContainerLogs, LogPolicy, MayGo, TerminationMessages};
pub use mirrors::{MirrorFate, MirrorPods};
pub use node::{HandlerFeatures, NodeFacts, RuntimeState};
pub use objects::{CertificateAsk, Credential, ObjectError, ObjectSource, ServiceAccount, TokenAsk};
pub use observer::{Observation, PodObserver, PodView, RuntimePods};
pub use plugins::{NodeDriver, NodeDrivers, PluginHandler, PluginInfo};
pub use pod_progress::{ConcurrentStep, PodProgress, StepTiming, StepView, SyncError};
pub use probes::{ProbeManager, ProbeResult, ProbeResults, ProbedPods, ProbedStatus};
pub use pulse::Pulse;
pub use resources::{ContainerTuning, PodCgroup, PodCgroupValues, ResourceError, ResourceManager};
pub use runtime::{
    ActionKind, ActionOutcome, Grace, KillPod, KillReason, PodRuntime, PodStateProvider, StartFailure, SyncOutcome,
    SyncPod,
};
pub use state_file::StateFile;
pub use storage::{Attached, StorageError, StorageObjects};
pub use user_namespaces::{IdRange, UserNamespaces};
pub use volumes::{
    BlockVolume, ClaimedVolume, ClaimedVolumes, Condition, Fullness, MountedVolume, MountedVolumes, VolumeError,
    VolumeManager,
};
