//! Metrics of CRI calls: count, errors, and duration by operation.
//!
//! A series appears with the first call of its operation, as upstream. Implements spec 03a §13, 08 §4.3.

use std::{sync::OnceLock, time::Duration};

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::{Registry, Stability, buckets};

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident => $label:literal,)*) => {
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
        }
    };
}

operations! {
    /// `Version`
    Version => "version",
    /// `Status`
    Status => "status",
    /// `RuntimeConfig`
    RuntimeConfig => "runtime_config",
    /// `UpdateRuntimeConfig`
    UpdateRuntimeConfig => "update_runtime_config",
    /// `RunPodSandbox`
    RunPodSandbox => "run_podsandbox",
    /// `StopPodSandbox`
    StopPodSandbox => "stop_podsandbox",
    /// `RemovePodSandbox`
    RemovePodSandbox => "remove_podsandbox",
    /// `PodSandboxStatus`
    PodSandboxStatus => "podsandbox_status",
    /// `ListPodSandbox`
    ListPodSandbox => "list_podsandbox",
    /// `CreateContainer`
    CreateContainer => "create_container",
    /// `StartContainer`
    StartContainer => "start_container",
    /// `StopContainer`
    StopContainer => "stop_container",
    /// `RemoveContainer`
    RemoveContainer => "remove_container",
    /// `ListContainers`
    ListContainers => "list_containers",
    /// `ContainerStatus`
    ContainerStatus => "container_status",
    /// `UpdateContainerResources`
    UpdateContainer => "update_container",
    /// `UpdatePodSandboxResources`
    UpdatePodSandboxResources => "update_podsandbox_resources",
    /// `ListContainerStats`
    ListContainerStats => "list_container_stats",
    /// `ListPodSandboxStats`
    ListPodSandboxStats => "list_podsandbox_stats",
    /// `ReopenContainerLog`
    ReopenContainerLog => "reopen_container_log",
    /// `ExecSync`
    ExecSync => "exec_sync",
    /// `Exec`
    Exec => "exec",
    /// `Attach`
    Attach => "attach",
    /// `PortForward`
    PortForward => "port_forward",
    /// `CheckpointContainer`
    CheckpointContainer => "checkpoint_container",
    /// `GetContainerEvents`
    GetContainerEvents => "get_container_events",
    /// `ListImages`
    ListImages => "list_images",
    /// `ImageStatus`
    ImageStatus => "image_status",
    /// `PullImage`
    PullImage => "pull_image",
    /// `RemoveImage`
    RemoveImage => "remove_image",
    /// `ImageFsInfo`
    ImageFsInfo => "image_fs_info",
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
