//! Metrics of dynamic resource allocation (spec 06c §3.8, 08 §4.9).

use std::{collections::BTreeMap, time::Duration};

use prometheus::{
    HistogramVec, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{Registry, Stability::Alpha, volumes::truth};

/// `DRA`, seconds: 15 bounds in a geometric series from 0.1 to 40, as Go computes it.
const BUCKETS: &[f64] = &[
    0.1,
    0.153_412_740_463_439_1,
    0.235_354_689_365_025_24,
    0.361_064_078_764_099_46,
    0.553_918_298_061_075_2,
    0.849_781_240_983_936,
    1.303_672_689_737_678,
    1.999_999_999_999_999_3,
    3.068_254_809_268_780_5,
    4.707_093_787_300_502_5,
    7.221_281_575_281_985,
    11.078_365_961_221_499,
    16.995_624_819_678_714,
    26.073_453_794_753_54,
    39.999_999_999_999_97,
];

/// Operation on all claims of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DraOperation {
    /// Preparation before the pod's containers start.
    Prepare,
    /// Release after they have stopped.
    Unprepare,
}

impl DraOperation {
    /// Value of the label `operation_name`.
    fn name(self) -> &'static str {
        match self {
            Self::Prepare => "PrepareResources",
            Self::Unprepare => "UnprepareResources",
        }
    }
}

/// Metric handles of dynamic resource allocation.
#[derive(Clone, Debug)]
pub struct DraMetrics {
    registry: Registry,
    operations: HistogramVec,
    calls: HistogramVec,
}

impl DraMetrics {
    /// Registers the histograms.
    pub fn new(registry: &Registry) -> Self {
        Self {
            registry: registry.clone(),
            operations: registry.histograms(
                Alpha,
                "dra_operations_duration_seconds",
                "Latency histogram in seconds for the duration of handling all ResourceClaims referenced by a pod when \
                 the pod starts or stops. Identified by the name of the operation (PrepareResources or \
                 UnprepareResources) and separated by the success of the operation. The number of failed operations is \
                 provided through the histogram's overall count.",
                BUCKETS,
                &["operation_name", "is_error"],
            ),
            calls: registry.histograms(
                Alpha,
                "dra_grpc_operations_duration_seconds",
                "Duration in seconds of the DRA gRPC operations",
                BUCKETS,
                &["driver_name", "method_name", "grpc_status_code"],
            ),
        }
    }

    /// Observes the duration of an operation on all claims of a pod.
    pub fn operation(&self, operation: DraOperation, is_error: bool, took: Duration) {
        let labels = [operation.name(), truth(is_error)];
        self.operations.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// Observes the duration of a driver call. `method` is the full path, `code` the name of the gRPC status code:
    /// `OK`, `DeadlineExceeded`, ...
    pub fn call(&self, driver: &str, method: &str, code: &str, took: Duration) {
        self.calls.with_label_values(&[driver, method, code]).observe(took.as_secs_f64());
    }

    /// Registers `dra_resource_claims_in_use`; at most once for a registry. `read` returns the number of prepared
    /// claims by driver, and `<any>` with their total.
    pub fn register_in_use(&self, read: impl Fn() -> BTreeMap<String, i64> + Send + Sync + 'static) {
        let help = Alpha.help(
            "The number of ResourceClaims that are currently in use on the node, by driver name (driver_name label \
             value) and across all drivers (special value <any> for driver_name). Note that the sum of all by-driver \
             counts is not the total number of in-use ResourceClaims because the same ResourceClaim might use devices \
             from different drivers. Instead, use the count for the <any> driver_name.",
        );
        let family = IntGaugeVec::new(Opts::new("dra_resource_claims_in_use", help), &["driver_name"]);
        self.registry.collector(ClaimsInUse { family: family.expect("a constant name"), read: Box::new(read) });
    }
}

/// Numbers of prepared claims, computed at each scrape.
struct ClaimsInUse {
    family: IntGaugeVec,
    read: Box<dyn Fn() -> BTreeMap<String, i64> + Send + Sync>,
}

impl Collector for ClaimsInUse {
    fn desc(&self) -> Vec<&Desc> {
        self.family.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.family.reset();
        for (driver, count) in (self.read)() {
            self.family.with_label_values(&[driver.as_str()]).set(count);
        }
        self.family.collect().into_iter().filter(|family| !family.get_metric().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn claims_in_use_are_read_at_each_scrape() {
        let (registry, counts) = (Registry::new(), Arc::new(Mutex::new(BTreeMap::new())));
        let source = counts.clone();
        let metrics = DraMetrics::new(&registry);
        metrics.register_in_use(move || source.lock().expect("whole").clone());
        assert!(registry.gather().is_empty());
        *counts.lock().expect("whole") = BTreeMap::from([("<any>".to_owned(), 2), ("gpu".to_owned(), 1)]);
        let families = registry.gather();
        let series: Vec<(&str, f64)> = (families[0].get_metric().iter())
            .map(|series| (series.get_label()[0].value(), series.get_gauge().get_value()))
            .collect();
        assert_eq!((families[0].name(), series), ("dra_resource_claims_in_use", vec![("<any>", 2.0), ("gpu", 1.0)]));
        counts.lock().expect("whole").clear();
        assert!(registry.gather().is_empty());
    }

    #[test]
    fn durations_have_the_labels_of_kubelet() {
        let registry = Registry::new();
        let metrics = DraMetrics::new(&registry);
        metrics.operation(DraOperation::Unprepare, true, Duration::from_secs(1));
        let method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
        metrics.call("gpu", method, "OK", Duration::from_secs(1));
        let found: Vec<_> = (registry.gather().iter())
            .map(|family| {
                let series = &family.get_metric()[0];
                let labels = series.get_label().iter();
                let labels =
                    labels.map(|label| (label.name().to_owned(), label.value().to_owned())).collect::<Vec<_>>();
                (family.name().to_owned(), labels, series.get_histogram().get_bucket().len())
            })
            .collect();
        let labels = |labels: &[(&str, &str)]| -> Vec<(String, String)> {
            labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let calls = labels(&[("driver_name", "gpu"), ("grpc_status_code", "OK"), ("method_name", method)]);
        let operations = labels(&[("is_error", "true"), ("operation_name", "UnprepareResources")]);
        let expected = [
            ("dra_grpc_operations_duration_seconds".to_owned(), calls, 15),
            ("dra_operations_duration_seconds".to_owned(), operations, 15),
        ];
        assert_eq!(found, expected);
    }
}
