//! Metrics of CSI driver calls. Implements spec 07 §12.3, 08 §4.9.

use std::time::Duration;

use prometheus::{HistogramVec, core::Collector};

use super::{OperationTarget, Registry, Stability::Alpha, buckets::STORAGE, volumes::truth};

/// Metric handle of CSI driver calls.
#[derive(Clone, Debug)]
pub struct CsiMetrics {
    operations: HistogramVec,
}

impl CsiMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let operations = registry.histograms(
            Alpha,
            "csi_operations_seconds",
            "Container Storage Interface operation duration with gRPC error code status total",
            STORAGE,
            &["driver_name", "method_name", "grpc_status_code", "migrated"],
        );
        Self { operations }
    }

    /// Records a finished driver call with its gRPC status code: `OK`, `DeadlineExceeded`, ...
    pub fn ended<'a>(&self, on: impl Into<OperationTarget<'a>>, method: &str, code: &str, elapsed: Duration) {
        let OperationTarget { plugin, is_migrated } = on.into();
        let labels = [plugin, method, code, truth(is_migrated)];
        self.operations.with_label_values(&labels).observe(elapsed.as_secs_f64());
    }

    /// Removes all series of a driver that failed to register: clients that register under ever new names would
    /// otherwise create ever more series.
    pub fn forget(&self, driver: &str) {
        for family in self.operations.collect() {
            for series in family.get_metric() {
                let value = |name: &str| {
                    let found = series.get_label().iter().find(|label| label.name() == name);
                    found.map(|label| label.value().to_owned()).unwrap_or_default()
                };
                if value("driver_name") == driver {
                    let labels = [driver, &value("method_name"), &value("grpc_status_code"), &value("migrated")];
                    // The series may have been removed in the meantime.
                    let _ = self.operations.remove_label_values(&labels);
                }
            }
        }
    }
}
