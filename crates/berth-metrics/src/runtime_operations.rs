//! Metrics of CRI calls: count, errors, and duration by operation.
//!
//! A series appears with the first call of its operation, as upstream. Implements spec 03a §13, 08 §4.3.

use std::{sync::OnceLock, time::Duration};

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::{Registry, Stability, buckets};

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident => $label:literal in $service:ident,)*) => {
        /// A CRI call; its label is the value of `operation_type`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum RuntimeOperation {
            $($(#[$doc])* $variant,)*
        }

        impl RuntimeOperation {
            /// All operations, in the order of their discriminants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Value of the label `operation_type`.
            pub fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)*
                }
            }

            /// Full name of the gRPC method, without the leading slash.
            pub fn full_method(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!("runtime.v1.", stringify!($service), "/", stringify!($variant)),)*
                }
            }
        }
    };
}

operations! {
    /// `Version`
    Version => "version" in RuntimeService,
    /// `Status`
    Status => "status" in RuntimeService,
    /// `RuntimeConfig`
    RuntimeConfig => "runtime_config" in RuntimeService,
    /// `UpdateRuntimeConfig`
    UpdateRuntimeConfig => "update_runtime_config" in RuntimeService,
    /// `RunPodSandbox`
    RunPodSandbox => "run_podsandbox" in RuntimeService,
    /// `StopPodSandbox`
    StopPodSandbox => "stop_podsandbox" in RuntimeService,
    /// `RemovePodSandbox`
    RemovePodSandbox => "remove_podsandbox" in RuntimeService,
    /// `PodSandboxStatus`
    PodSandboxStatus => "podsandbox_status" in RuntimeService,
    /// `ListPodSandbox`
    ListPodSandbox => "list_podsandbox" in RuntimeService,
    /// `CreateContainer`
    CreateContainer => "create_container" in RuntimeService,
    /// `StartContainer`
    StartContainer => "start_container" in RuntimeService,
    /// `StopContainer`
    StopContainer => "stop_container" in RuntimeService,
    /// `RemoveContainer`
    RemoveContainer => "remove_container" in RuntimeService,
    /// `ListContainers`
    ListContainers => "list_containers" in RuntimeService,
    /// `ContainerStatus`
    ContainerStatus => "container_status" in RuntimeService,
    /// `UpdateContainerResources`
    UpdateContainerResources => "update_container" in RuntimeService,
    /// `UpdatePodSandboxResources`
    UpdatePodSandboxResources => "update_podsandbox_resources" in RuntimeService,
    /// `ListContainerStats`
    ListContainerStats => "list_container_stats" in RuntimeService,
    /// `ListPodSandboxStats`
    ListPodSandboxStats => "list_podsandbox_stats" in RuntimeService,
    /// `ReopenContainerLog`
    ReopenContainerLog => "reopen_container_log" in RuntimeService,
    /// `ExecSync`
    ExecSync => "exec_sync" in RuntimeService,
    /// `Exec`
    Exec => "exec" in RuntimeService,
    /// `Attach`
    Attach => "attach" in RuntimeService,
    /// `PortForward`
    PortForward => "port_forward" in RuntimeService,
    /// `CheckpointContainer`
    CheckpointContainer => "checkpoint_container" in RuntimeService,
    /// `GetContainerEvents`
    GetContainerEvents => "get_container_events" in RuntimeService,
    /// `ListImages`
    ListImages => "list_images" in ImageService,
    /// `ImageStatus`
    ImageStatus => "image_status" in ImageService,
    /// `PullImage`
    PullImage => "pull_image" in ImageService,
    /// `RemoveImage`
    RemoveImage => "remove_image" in ImageService,
    /// `ImageFsInfo`
    ImageFsInfo => "image_fs_info" in ImageService,
}

struct Handles {
    total: IntCounter,
    errors: OnceLock<IntCounter>,
    duration: Histogram,
}

/// Metric handles of CRI calls, created per operation on first use.
pub struct RuntimeOperations {
    total: IntCounterVec,
    errors: IntCounterVec,
    duration: HistogramVec,
    handles: Vec<OnceLock<Handles>>,
}

impl RuntimeOperations {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let labels = &["operation_type"];
        Self {
            total: registry.counters(
                Stability::Alpha,
                "kubelet_runtime_operations_total",
                "Cumulative number of runtime operations by operation type.",
                labels,
            ),
            errors: registry.counters(
                Stability::Alpha,
                "kubelet_runtime_operations_errors_total",
                "Cumulative number of runtime operation errors by operation type.",
                labels,
            ),
            duration: registry.histograms(
                Stability::Alpha,
                "kubelet_runtime_operations_duration_seconds",
                "Duration in seconds of runtime operations. Broken down by operation type.",
                buckets::RUNTIME,
                labels,
            ),
            handles: RuntimeOperation::ALL.iter().map(|_| OnceLock::new()).collect(),
        }
    }

    /// Records a finished call; `failed` for any error, `NotFound` included.
    pub fn ended(&self, operation: RuntimeOperation, elapsed: Duration, failed: bool) {
        let label = &[operation.label()];
        let Some(slot) = self.handles.get(operation as usize) else { return };
        let handles = slot.get_or_init(|| Handles {
            total: self.total.with_label_values(label),
            errors: OnceLock::new(),
            duration: self.duration.with_label_values(label),
        });
        handles.total.inc();
        handles.duration.observe(elapsed.as_secs_f64());
        if failed {
            handles.errors.get_or_init(|| self.errors.with_label_values(label)).inc();
        }
    }
}

/// Reports that the runtime lacks a call that a coming release requires.
///
/// The family is registered only then (spec 08 §4.1).
pub fn cri_losing_support(registry: &Registry, version: &str) {
    registry
        .gauges(
            Stability::Alpha,
            "kubelet_cri_losing_support",
            "the Kubernetes version that the currently running CRI implementation will lose support on if not upgraded.",
            &["version"],
        )
        .with_label_values(&[version])
        .set(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_appears_with_the_first_call() {
        let registry = Registry::new();
        let operations = RuntimeOperations::new(&registry);
        assert!(registry.gather().is_empty());
        operations.ended(RuntimeOperation::PullImage, Duration::from_millis(6), true);
        operations.ended(RuntimeOperation::PullImage, Duration::from_millis(6), false);
        let label = &["pull_image"];
        assert_eq!(operations.total.with_label_values(label).get(), 2);
        assert_eq!(operations.errors.with_label_values(label).get(), 1);
        assert_eq!(operations.duration.with_label_values(label).get_sample_count(), 2);
    }

    #[test]
    fn every_operation_has_its_place() {
        for (place, operation) in RuntimeOperation::ALL.iter().enumerate() {
            assert_eq!(*operation as usize, place);
        }
    }
}
