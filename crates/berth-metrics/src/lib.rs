//! Prometheus metrics: the registry, and the names, labels, and buckets of all families.
//!
//! A family file declares a struct of handles and creates it from a [`Registry`]; the code that counts owns the
//! handles. [`exposition`] encodes the families for scrapers. Names, labels, and buckets: spec 08.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod admission;
mod allocation;
mod api_client;
mod api_writes;
mod auth;
mod build_info;
mod certificates;
mod cpu_manager;
mod csi;
mod devices;
mod dra;
mod embedded;
mod engine;
mod eviction;
pub mod exposition;
mod images;
mod memory_manager;
mod node;
mod oom;
mod orphans;
mod pleg;
mod plugins;
mod pod_resources;
mod pod_waits;
mod probes;
mod protobuf;
mod reflectors;
mod registry;
mod resource_managers;
mod resources;
mod rest_client;
mod rest_transport;
mod runtime;
mod runtime_operations;
mod selinux;
mod server;
mod shutdown;
mod slis;
mod sources;
mod stats;
mod status;
mod streaming;
pub mod text_encoder;
pub mod text_parser;
mod topology_manager;
mod traces;
mod volumes;
mod workqueue;

pub use admission::AdmissionMetrics;
pub use allocation::AllocationMetrics;
pub use api_client::{ApiClientMetrics, LastContact};
pub use api_writes::{ApiWriteMetrics, EventLoss};
pub use auth::{AuthMetrics, Fetch, Lookup, ReviewKind, ReviewMetrics};
pub use build_info::{
    BuildInfo, register_build_info, register_features, register_node, register_process, start_time_seconds,
};
pub use certificates::{CertificateExpiry, CertificateMetrics, register_pod_certificates};
pub use cpu_manager::CpuManagerMetrics;
pub use csi::CsiMetrics;
pub use devices::DeviceMetrics;
pub use dra::{DraMetrics, DraOperation};
pub use embedded::{
    EmbeddedMetrics, EmbeddedObjects, LaunchStep, NetworkOperation, Outcome, Unpacks, register_embedded_objects,
};
pub use engine::{EngineMetrics, WorkingPods, static_label};
pub use eviction::EvictionMetrics;
pub use images::{CollectReason, CredentialPlugins, Images, RecordGauges};
pub use memory_manager::MemoryManagerMetrics;
pub use node::NodeMetrics;
pub use oom::OomMetrics;
pub use orphans::OrphanMetrics;
pub use pleg::PlegMetrics;
pub use plugins::PluginMetrics;
pub use pod_resources::{EndpointVersion, PodResourcesCall, PodResourcesMetrics, PodWatchMetrics};
pub use pod_waits::PodWaits;
pub use probes::{ProbeCounter, ProbeMetrics, ProbeTimeliness, ProbeTimelinessMetrics, ProbedContainer};
pub use reflectors::{ReflectorMeter, ReflectorMetrics, WatchState};
pub use registry::{Registry, Stability, buckets};
pub use resource_managers::{AllocationSource, AssignmentKind, ManagedResource, ResourceManagerMetrics};
pub use resources::CgroupMetrics;
pub use rest_client::RestClientMetrics;
pub use rest_transport::{CaReload, CertRotation, ExecCall, OpenTransport, TransportMetrics};
pub use runtime::RuntimeMetrics;
pub use runtime_operations::{RuntimeOperation, RuntimeOperations, cri_losing_support};
pub use selinux::{LabelConflict, SelinuxMetrics};
pub use server::ServerMetrics;
pub use shutdown::ShutdownMetrics;
pub use slis::SliMetrics;
pub use sources::SourceMetrics;
pub use stats::{ClaimUsage, DiskUsages, LogUsage, StatsMetrics, StatsSource, register_disk_usages};
pub use status::StatusMetrics;
pub use streaming::StreamingMetrics;
pub use topology_manager::{AlignmentBoundary, AlignmentScope, TopologyManagerMetrics};
pub use traces::TraceMetrics;
pub use volumes::{OperationTarget, StorageOperation, VolumeMetrics, World};
pub use workqueue::{WorkQueue, WorkQueueMetrics};
