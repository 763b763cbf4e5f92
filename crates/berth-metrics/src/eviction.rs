//! Metrics of node-pressure eviction. Implements spec 08 §4.8, §6.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use super::{Registry, Stability::Alpha, buckets};

/// Metric handles of eviction; the labels `eviction_signal` and `signal` have closed sets of values.
#[derive(Clone, Debug)]
pub struct EvictionMetrics {
    evictions: IntCounterVec,
    stats_age: HistogramVec,
    available: IntGaugeVec,
    threshold: IntGaugeVec,
    reaction: HistogramVec,
}

impl EvictionMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        Self {
            evictions: registry.counters(
                Alpha,
                "kubelet_evictions",
                "Cumulative number of pod evictions by eviction signal",
                &["eviction_signal"],
            ),
            stats_age: registry.histograms(
                Alpha,
                "kubelet_eviction_stats_age_seconds",
                "Time between when stats are collected, and when pod is evicted based on those stats by eviction signal",
                buckets::DEF,
                &["eviction_signal"],
            ),
            available: registry.gauges(
                Alpha,
                "berth_eviction_available",
                "Available amount of the resource of an eviction signal, in bytes or as a count.",
                &["signal"],
            ),
            threshold: registry.gauges(
                Alpha,
                "berth_eviction_threshold",
                "Eviction threshold of an eviction signal, in bytes or as a count.",
                &["signal"],
            ),
            reaction: registry.histograms(
                Alpha,
                "berth_eviction_reaction_seconds",
                "Duration in seconds from crossing an eviction threshold to killing the selected pod.",
                buckets::DEF,
                &["signal"],
            ),
        }
    }

    /// Sets the available amount of a signal and its threshold, bytes or count.
    pub fn observed(&self, signal: &str, available: i64, threshold: i64) {
        self.available.with_label_values(&[signal]).set(available);
        self.threshold.with_label_values(&[signal]).set(threshold);
    }

    /// Records the age of the observation by which a pod was selected.
    pub fn stats_age(&self, signal: &str, age: Duration) {
        self.stats_age.with_label_values(&[signal]).observe(age.as_secs_f64());
    }

    /// Records the time from a crossed threshold to the termination request for the pod.
    pub fn reacted(&self, signal: &str, after: Duration) {
        self.reaction.with_label_values(&[signal]).observe(after.as_secs_f64());
    }

    /// Counts an evicted pod.
    pub fn evicted(&self, signal: &str) {
        self.evictions.with_label_values(&[signal]).inc();
    }
}
