//! Metrics of `/metrics/probes`, in a registry of their own.
//!
//! A series appears with the first result of a container's probe. Implements spec 04b §10, 08 §6.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use prometheus::{
    HistogramVec, IntGauge, IntGaugeVec,
    core::{Collector, Desc},
    proto::{Bucket, Counter, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};

use super::{Registry, Stability, buckets::DEF, start_time_seconds};

const TOTAL: &str = "prober_probe_total";
const DURATION: &str = "prober_probe_duration_seconds";
/// Sorted by name, as on the page.
const OF_TOTAL: [&str; 6] = ["container", "namespace", "pod", "pod_uid", "probe_type", "result"];
const OF_DURATION: [&str; 4] = ["container", "namespace", "pod", "probe_type"];

/// Container whose probe is counted.
#[derive(Clone, Copy, Debug)]
pub struct ProbedContainer<'a> {
    /// Container name.
    pub container: &'a str,
    /// Pod name.
    pub pod: &'a str,
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// UID of the pod.
    pub uid: &'a str,
}

/// The families of probes: `prober_probe_total`, by probe type, result, container, pod, namespace and UID, and
/// `prober_probe_duration_seconds`, by probe type, container, pod and namespace.
///
/// A node has hundreds of probes, and a histogram of the client library takes four kilobytes for each; therefore the
/// families are computed from compact counters at each scrape.
pub struct ProbeMetrics(Arc<All>);

/// All probes, sorted by creation; the number is the last ID assigned.
#[derive(Default)]
struct All(Mutex<(u64, BTreeMap<u64, Arc<ProbeSeries>>)>);

/// Labels and results of one probe.
struct ProbeSeries {
    kind: &'static str,
    container: Box<str>,
    pod: Box<str>,
    namespace: Box<str>,
    uid: Box<str>,
    counts: Mutex<Counts>,
}

#[derive(Clone, Default)]
struct Counts {
    successful: u64,
    failed: u64,
    took: Durations,
}

/// Histogram of successful durations; each bucket excludes the lower ones.
#[derive(Clone, Default)]
struct Durations {
    within: [u64; DEF.len()],
    longer: u64,
    seconds: f64,
}

/// Counter of one probe; dropping it removes its series.
pub struct ProbeCounter {
    all: Arc<All>,
    id: u64,
    counted: Arc<ProbeSeries>,
}

/// Metrics of probe timeliness on `/metrics`: `berth_probe_schedule_lag_seconds`, from the scheduled time of a probe
/// to its attempt, by probe type, and `berth_probe_inflight`, attempts in progress, by handler (spec 08 §10).
pub struct ProbeTimelinessMetrics {
    lag: HistogramVec,
    inflight: IntGaugeVec,
}

/// Timeliness handle of one probe.
#[derive(Clone)]
pub struct ProbeTimeliness {
    lag: prometheus::Histogram,
    inflight: IntGauge,
}

/// Counts an attempt as in progress until it is dropped.
pub struct InflightAttempt(IntGauge);

impl ProbeTimelinessMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let lag = "Duration in seconds from the scheduled time of a probe to its attempt.";
        let inflight = "Number of probe attempts in progress.";
        Self {
            lag: registry.histograms(Stability::Alpha, "berth_probe_schedule_lag_seconds", lag, DEF, &["probe_type"]),
            inflight: registry.gauges(Stability::Alpha, "berth_probe_inflight", inflight, &["handler"]),
        }
    }

    /// Returns the handle of one probe.
    pub fn of(&self, kind: &'static str, handler: &'static str) -> ProbeTimeliness {
        ProbeTimeliness {
            lag: self.lag.with_label_values(&[kind]),
            inflight: self.inflight.with_label_values(&[handler]),
        }
    }
}

impl ProbeTimeliness {
    /// Records the start of an attempt, `lag` after its scheduled time.
    pub fn begun(&self, lag: Duration) -> InflightAttempt {
        self.lag.observe(lag.as_secs_f64());
        self.inflight.inc();
        InflightAttempt(self.inflight.clone())
    }
}

impl Drop for InflightAttempt {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl ProbeMetrics {
    /// Registers the families, and the start time of the process.
    pub fn new(registry: &Registry) -> Self {
        let help = "Start time of the process since unix epoch in seconds.";
        let started = registry.float_gauge(Stability::Alpha, "process_start_time_seconds", help);
        started.set(start_time_seconds().unwrap_or_default());
        let all = Arc::<All>::default();
        registry.collector(Probes::new(all.clone()));
        Self(all)
    }

    /// Starts to count a probe.
    pub fn begin(&self, kind: &'static str, of: &ProbedContainer<'_>) -> ProbeCounter {
        let counted = Arc::new(ProbeSeries {
            kind,
            container: of.container.into(),
            pod: of.pod.into(),
            namespace: of.namespace.into(),
            uid: of.uid.into(),
            counts: Mutex::default(),
        });
        let mut all = lock(&self.0.0);
        all.0 += 1;
        let id = all.0;
        all.1.insert(id, counted.clone());
        ProbeCounter { all: self.0.clone(), id, counted }
    }
}

impl ProbeCounter {
    /// Counts a result; `took` is the duration of a success, `None` a failure.
    pub fn add(&self, took: Option<Duration>) {
        let mut counts = lock(&self.counted.counts);
        let Some(took) = took else {
            counts.failed += 1;
            return;
        };
        counts.successful += 1;
        counts.took.add(took.as_secs_f64());
    }
}

impl Drop for ProbeCounter {
    fn drop(&mut self) {
        lock(&self.all.0).1.remove(&self.id);
    }
}

impl Durations {
    fn add(&mut self, seconds: f64) {
        self.seconds += seconds;
        let place = DEF.iter().position(|bound| seconds <= *bound);
        *place.and_then(|at| self.within.get_mut(at)).unwrap_or(&mut self.longer) += 1;
    }

    fn merge(&mut self, other: &Self) {
        self.within.iter_mut().zip(other.within).for_each(|(own, more)| *own += more);
        self.longer += other.longer;
        self.seconds += other.seconds;
    }

    fn histogram(&self) -> Histogram {
        let mut count = 0;
        let bucket = |(bound, within): (&f64, &u64)| {
            count += within;
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(count);
            bucket
        };
        let buckets = DEF.iter().zip(&self.within).map(bucket).collect();
        let mut histogram = Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(count + self.longer);
        histogram.set_sample_sum(self.seconds);
        histogram
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Collector that computes the families.
struct Probes {
    all: Arc<All>,
    total: Desc,
    duration: Desc,
}

impl Probes {
    fn new(all: Arc<All>) -> Self {
        let family = |stability: Stability, name: &str, help: &str, labels: &[&str]| {
            let labels = labels.iter().map(|label| (*label).to_owned()).collect();
            let described = Desc::new(name.to_owned(), stability.help(help), labels, Default::default());
            described.expect("names and labels are constants that the tests check")
        };
        let total = "Cumulative number of a liveness, readiness or startup probe for a container by result.";
        let duration = "Duration in seconds for a probe response.";
        Self {
            all,
            total: family(Stability::Beta, TOTAL, total, &OF_TOTAL),
            duration: family(Stability::Alpha, DURATION, duration, &OF_DURATION),
        }
    }
}

impl Collector for Probes {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.total, &self.duration]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let all: Vec<Arc<ProbeSeries>> = lock(&self.all.0).1.values().cloned().collect();
        let mut total = Vec::new();
        // Two pods of the same name, the older of which still terminates, share one series.
        let mut duration = BTreeMap::<[&str; 4], Durations>::new();
        for one in &all {
            let counts = lock(&one.counts).clone();
            for (result, count) in [("failed", counts.failed), ("successful", counts.successful)] {
                if count > 0 {
                    let labels = [&*one.container, &one.namespace, &one.pod, &one.uid, one.kind, result];
                    let mut metric = Metric::from_label(pairs(OF_TOTAL, labels));
                    let mut counter = Counter::default();
                    counter.set_value(count as f64);
                    metric.set_counter(counter);
                    total.push(metric);
                }
            }
            if counts.successful > 0 {
                let labels = [&*one.container, &one.namespace, &one.pod, one.kind];
                duration.entry(labels).or_default().merge(&counts.took);
            }
        }
        let duration = duration.into_iter().map(|(labels, took)| {
            let mut metric = Metric::from_label(pairs(OF_DURATION, labels));
            metric.set_histogram(took.histogram());
            metric
        });
        let families = [
            family(&self.total, MetricType::COUNTER, total),
            family(&self.duration, MetricType::HISTOGRAM, duration.collect()),
        ];
        families.into_iter().filter(|family| !family.get_metric().is_empty()).collect()
    }
}

fn pairs<const N: usize>(names: [&str; N], values: [&str; N]) -> Vec<LabelPair> {
    let pair = |(name, value): (&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pair
    };
    names.into_iter().zip(values).map(pair).collect()
}

fn family(of: &Desc, kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(of.fq_name.clone());
    family.set_help(of.help.clone());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::ExpositionFormat;

    #[test]
    fn only_the_start_time_is_exposed_before_the_first_probe() {
        let registry = Registry::new();
        let probes = ProbeMetrics::new(&registry);
        let page = |registry: &Registry| {
            let mut out = Vec::new();
            ExpositionFormat::negotiate(None).encode(registry.gather(), &mut out);
            String::from_utf8(out).expect("text")
        };
        let types = |page: &str| page.lines().filter(|l| l.starts_with("# TYPE")).count();
        assert_eq!(types(&page(&registry)), 1);
        let of = ProbedContainer { container: "c", pod: "p", namespace: "ns", uid: "u" };
        let counter = probes.begin("Liveness", &of);
        assert_eq!(types(&page(&registry)), 1, "nothing came yet");
        counter.add(None);
        assert!(page(&registry).contains("# HELP prober_probe_total [BETA] "));
        assert!(!page(&registry).contains("prober_probe_duration_seconds"), "of successes only");
        counter.add(Some(Duration::from_millis(3)));
        // Another pod of that name has counters of its own; durations are merged by name.
        let other = probes.begin("Liveness", &ProbedContainer { uid: "v", ..of });
        other.add(Some(Duration::from_secs(60)));
        let text = page(&registry);
        for line in [
            r#"prober_probe_total{container="c",namespace="ns",pod="p",pod_uid="u",probe_type="Liveness",result="failed"} 1"#,
            r#"prober_probe_total{container="c",namespace="ns",pod="p",pod_uid="u",probe_type="Liveness",result="successful"} 1"#,
            r#"prober_probe_duration_seconds_bucket{container="c",namespace="ns",pod="p",probe_type="Liveness",le="0.005"} 1"#,
            r#"prober_probe_duration_seconds_bucket{container="c",namespace="ns",pod="p",probe_type="Liveness",le="10"} 1"#,
            r#"prober_probe_duration_seconds_bucket{container="c",namespace="ns",pod="p",probe_type="Liveness",le="+Inf"} 2"#,
            r#"prober_probe_duration_seconds_sum{container="c",namespace="ns",pod="p",probe_type="Liveness"} 60.003"#,
            r#"prober_probe_duration_seconds_count{container="c",namespace="ns",pod="p",probe_type="Liveness"} 2"#,
            r#"prober_probe_total{container="c",namespace="ns",pod="p",pod_uid="v",probe_type="Liveness",result="successful"} 1"#,
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        drop(counter);
        assert!(!page(&registry).contains(r#"pod_uid="u""#) && page(&registry).contains(r#"pod_uid="v""#));
        drop(other);
        assert_eq!(types(&page(&registry)), 1);
    }
}
