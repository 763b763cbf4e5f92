//! Metrics of image pulls, pull records, image garbage collection, and credential plugins.
//!
//! Implements spec 03b §1.5, 08 §4.7 and §10.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge};

use super::{Registry, Stability, buckets};

/// Metric handles of images.
pub struct Images {
    pull_duration: HistogramVec,
    ensure_requests: IntCounterVec,
    collected: IntCounterVec,
    freed: IntCounterVec,
    mustpull_checks: IntCounterVec,
    /// Pulls in progress.
    pub pulls_inflight: IntGauge,
    /// Pulls waiting in the queue.
    pub pull_queue_depth: IntGauge,
    pulled_bytes: IntCounter,
    /// Pull intents.
    pub intents: RecordGauges,
    /// Pulled records.
    pub records: RecordGauges,
}

/// Gauges of one kind of pull record.
#[derive(Clone)]
pub struct RecordGauges {
    /// Number of files on disk.
    pub on_disk: IntGauge,
    /// Usage of the in-memory cache, percent.
    pub usage_percent: IntGauge,
}

/// Reason for which an image was garbage collected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CollectReason {
    /// Unused for longer than the maximum age.
    Age,
    /// Disk usage above the threshold.
    Space,
}

impl CollectReason {
    fn label(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Space => "space",
        }
    }
}

impl Images {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let alpha = Stability::Alpha;
        let gauges = |kind: &str, what: &str| RecordGauges {
            on_disk: registry.gauge(
                alpha,
                &format!("kubelet_imagemanager_ondisk_{kind}"),
                &format!("Number of {what} stored on disk."),
            ),
            usage_percent: registry.gauge(
                alpha,
                &format!("kubelet_imagemanager_inmemory_{kind}_usage_percent"),
                &format!("The {what} in-memory cache usage in percent."),
            ),
        };
        Self {
            pull_duration: registry.histograms(
                alpha,
                "kubelet_image_pull_duration_seconds",
                "Duration in seconds to pull an image.",
                buckets::PULL,
                &["image_size_in_bytes"],
            ),
            ensure_requests: registry.counters(
                alpha,
                "kubelet_image_manager_ensure_image_requests_total",
                "Number of ensure-image requests processed by the kubelet.",
                &["pull_policy", "present_locally", "pull_required"],
            ),
            collected: registry.counters(
                alpha,
                "kubelet_image_garbage_collected_total",
                "Total number of images garbage collected by the kubelet, whether through disk usage or image age.",
                &["reason"],
            ),
            freed: registry.counters(
                alpha,
                "berth_image_gc_freed_bytes_total",
                "Cumulative number of bytes freed by image garbage collection.",
                &["reason"],
            ),
            mustpull_checks: registry.counters(
                alpha,
                "kubelet_imagemanager_image_mustpull_checks_total",
                "Counter for how many times kubelet checked whether credentials need to be re-verified to access an image",
                &["result"],
            ),
            pulls_inflight: registry.gauge(alpha, "berth_image_pulls_inflight", "Number of image pulls in progress."),
            pull_queue_depth: registry.gauge(
                alpha,
                "berth_image_pull_queue_depth",
                "Number of image pulls waiting in the queue.",
            ),
            pulled_bytes: registry.counter(alpha, "berth_image_pull_bytes_total", "Cumulative number of bytes of pulled images."),
            intents: gauges("pullintents", "ImagePullIntents"),
            records: gauges("pulledrecords", "ImagePulledRecords"),
        }
    }

    /// Records a successful pull; `took` includes the wait in the queue, `size` is in bytes, 0 for unknown.
    pub fn pulled(&self, took: Duration, size: u64) {
        let millis = took.as_millis();
        #[allow(clippy::cast_precision_loss, reason = "milliseconds of a pull fit 52 bits")]
        self.pull_duration.with_label_values(&[size_label(size)]).observe(millis as f64 / 1e3);
        self.pulled_bytes.inc_by(size);
    }

    /// Counts a finished request to ensure that an image is present.
    pub fn ensured(&self, policy: &'static str, present: &'static str, required: &'static str) {
        self.ensure_requests.with_label_values(&[policy, present, required]).inc();
    }

    /// Counts a check of a pod's access to an image, by result.
    pub fn checked(&self, result: &'static str) {
        self.mustpull_checks.with_label_values(&[result]).inc();
    }

    /// Counts a removed image and the bytes it freed.
    pub fn collected(&self, reason: CollectReason, size: u64) {
        self.collected.with_label_values(&[reason.label()]).inc();
        self.freed.with_label_values(&[reason.label()]).inc_by(size);
    }
}

/// Value of the label `image_size_in_bytes`; lower bounds are exclusive.
fn size_label(size: u64) -> &'static str {
    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;
    const LABELS: [(u64, &str); 12] = [
        (100 * GB, "GT100GB"),
        (60 * GB, "60GB-100GB"),
        (40 * GB, "40GB-60GB"),
        (30 * GB, "30GB-40GB"),
        (20 * GB, "20GB-30GB"),
        (10 * GB, "10GB-20GB"),
        (5 * GB, "5GB-10GB"),
        (GB, "1GB-5GB"),
        (500 * MB, "500MB-1GB"),
        (100 * MB, "100MB-500MB"),
        (10 * MB, "10MB-100MB"),
        (0, "0-10MB"),
    ];
    LABELS.iter().find(|(bound, _)| size > *bound).map_or("N/A", |(_, label)| label)
}

/// Metric handles of credential plugins (spec 08 §4.16).
pub struct CredentialPlugins {
    duration: HistogramVec,
    errors: IntCounterVec,
}

impl CredentialPlugins {
    /// Registers the families; `hash` is that of the loaded configuration.
    pub fn new(registry: &Registry, hash: &str) -> Self {
        registry
            .gauges(
                Stability::Alpha,
                "kubelet_credential_provider_config_info",
                "Information about the last applied credential provider configuration with hash as label",
                &["hash"],
            )
            .with_label_values(&[hash])
            .set(1);
        Self {
            duration: registry.histograms(
                Stability::Alpha,
                "kubelet_credential_provider_plugin_duration",
                "Duration of execution in seconds for credential provider plugin",
                buckets::DEF,
                &["plugin_name"],
            ),
            errors: registry.counters(
                Stability::Alpha,
                "kubelet_credential_provider_plugin_errors_total",
                "Number of errors from credential provider plugin",
                &["plugin_name"],
            ),
        }
    }

    /// Records a plugin run; `failed` for a failure or a timeout.
    pub fn ran(&self, plugin: &str, took: Duration, failed: bool) {
        self.duration.with_label_values(&[plugin]).observe(took.as_secs_f64());
        if failed {
            self.errors.with_label_values(&[plugin]).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_into_their_bucket() {
        let rows = [
            (0, "N/A"),
            (1, "0-10MB"),
            (10 << 20, "0-10MB"), // AC-08-8
            ((10 << 20) + 1, "10MB-100MB"),
            (500 << 20, "100MB-500MB"),
            (1 << 30, "500MB-1GB"),
            (50 << 30, "40GB-60GB"),
            (u64::MAX, "GT100GB"),
        ];
        for (size, label) in rows {
            assert_eq!(size_label(size), label, "{size}");
        }
    }
}
