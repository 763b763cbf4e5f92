//! Metrics registry: typed constructors that prefix help texts with the stability level.

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    core::Collector, proto::MetricFamily,
};

/// Stability level of a family, written as the prefix of its help text (spec 08 §2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stability {
    /// `[ALPHA]`
    Alpha,
    /// `[BETA]`
    Beta,
    /// `[STABLE]`
    Stable,
    /// `[INTERNAL]`
    Internal,
    /// No prefix: families that bypass the wrapper (`process_*`, …).
    Bare,
}

impl Stability {
    /// Value of the label `stability_level`.
    fn name(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Stable => "STABLE",
            Self::Internal => "INTERNAL",
            Self::Bare => "",
        }
    }

    pub(super) fn help(self, text: &str) -> String {
        match self {
            Self::Alpha => format!("[ALPHA] {text}"),
            Self::Beta => format!("[BETA] {text}"),
            Self::Stable => format!("[STABLE] {text}"),
            Self::Internal => format!("[INTERNAL] {text}"),
            Self::Bare => text.to_owned(),
        }
    }
}

/// Bucket bounds by the names of spec 08 §3.
pub mod buckets {
    /// `DEF`, seconds.
    pub const DEF: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
    /// `PODSTART`, seconds.
    pub const PODSTART: &[f64] = &[
        0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0,
        600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
    ];
    /// `PULL`, seconds.
    pub const PULL: &[f64] = &[
        1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
        2700.0, 3600.0,
    ];
    /// `STATUS`, seconds.
    pub const STATUS: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
    /// `RUNTIME`: 0.005 · 2.5^k seconds.
    pub const RUNTIME: &[f64] = &[
        0.005,
        0.0125,
        0.03125,
        0.078_125,
        0.195_312_5,
        0.488_281_25,
        1.220_703_125,
        3.051_757_812_5,
        7.629_394_531_25,
        19.073_486_328_125,
        47.683_715_820_312_5,
        119.209_289_550_781_25,
        298.023_223_876_953_1,
        745.058_059_692_382_8,
    ];
    /// `STORAGE`, seconds.
    pub const STORAGE: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];
    /// `REST`, seconds.
    pub const REST: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
    /// `SIZE`, bytes.
    pub const SIZE: &[f64] =
        &[64.0, 256.0, 512.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0];
    /// `EXECAGE`, seconds.
    pub const EXECAGE: &[f64] = &[
        600.0,
        1800.0,
        3600.0,
        14400.0,
        86400.0,
        604_800.0,
        2_592_000.0,
        7_776_000.0,
        15_552_000.0,
        31_104_000.0,
        124_416_000.0,
    ];
    /// `WQ`, seconds: ten to the power of -8 to 1, as Go computes it.
    pub const WORKQUEUE: &[f64] =
        &[1e-08, 1e-07, 1e-06, 9.999_999_999_999_999e-06, 9.999_999_999_999_999e-05, 0.001, 0.01, 0.1, 1.0, 10.0];
    /// `AUTHN`, seconds.
    pub const AUTHN: &[f64] = &[0.25, 0.5, 0.7, 1.0, 1.5, 3.0, 5.0, 10.0];
    /// `CERTAGE`, seconds.
    pub const CERTAGE: &[f64] = &[
        60.0,
        3600.0,
        14400.0,
        86400.0,
        604_800.0,
        2_592_000.0,
        7_776_000.0,
        15_552_000.0,
        31_104_000.0,
        124_416_000.0,
    ];
    /// `CERTLEFT`, seconds.
    pub const CERTLEFT: &[f64] = &[
        0.0,
        1800.0,
        3600.0,
        7200.0,
        21600.0,
        43200.0,
        86400.0,
        172_800.0,
        345_600.0,
        604_800.0,
        2_592_000.0,
        7_776_000.0,
        15_552_000.0,
        31_104_000.0,
    ];
}

/// Registry of metric families. The agent has one for its main page; tests create their own.
#[derive(Clone, Debug)]
pub struct Registry {
    registry: prometheus::Registry,
    /// Number of families by stability level.
    registered: IntCounterVec,
}

impl Default for Registry {
    fn default() -> Self {
        let help =
            Stability::Beta.help("The count of registered metrics broken by stability level and deprecation version.");
        let opts = Opts::new("registered_metrics_total", help);
        let registered = IntCounterVec::new(opts, &["deprecated_version", "stability_level"]);
        Self { registry: prometheus::Registry::new(), registered: registered.expect("a constant") }
    }
}

impl Registry {
    /// Creates an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers the families about the registry itself. Berth hides or disables no family.
    pub fn register_bookkeeping(&self) {
        self.collector(self.registered.clone());
        self.counter(Stability::Beta, "hidden_metrics_total", "The count of hidden metrics.");
        self.counter(Stability::Beta, "disabled_metrics_total", "The count of disabled metrics.");
    }

    /// Returns all families with their current values.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// Registers a collector that computes its values at each scrape.
    pub fn collector(&self, collector: impl Collector + 'static) {
        self.registry.register(Box::new(collector)).expect("family names are unique");
    }

    fn add<C: Collector + Clone + 'static>(&self, stability: Stability, made: prometheus::Result<C>) -> C {
        let family = made.expect("family names and labels are constants that the tests check");
        self.registered.with_label_values(&["", stability.name()]).inc();
        self.collector(family.clone());
        family
    }

    /// Registers a counter.
    pub fn counter(&self, stability: Stability, name: &str, help: &str) -> IntCounter {
        self.add(stability, IntCounter::new(name, stability.help(help)))
    }

    /// Registers a counter with labels.
    pub fn counters(&self, stability: Stability, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(stability, IntCounterVec::new(Opts::new(name, stability.help(help)), labels))
    }

    /// Registers an integer gauge.
    pub fn gauge(&self, stability: Stability, name: &str, help: &str) -> IntGauge {
        self.add(stability, IntGauge::new(name, stability.help(help)))
    }

    /// Registers an integer gauge with labels.
    pub fn gauges(&self, stability: Stability, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(stability, IntGaugeVec::new(Opts::new(name, stability.help(help)), labels))
    }

    /// Registers a floating-point gauge.
    pub fn float_gauge(&self, stability: Stability, name: &str, help: &str) -> Gauge {
        self.add(stability, Gauge::new(name, stability.help(help)))
    }

    /// Registers a floating-point gauge with labels.
    pub fn float_gauges(&self, stability: Stability, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.add(stability, GaugeVec::new(Opts::new(name, stability.help(help)), labels))
    }

    /// Registers a histogram.
    pub fn histogram(&self, stability: Stability, name: &str, help: &str, bounds: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(name, stability.help(help)).buckets(bounds.to_vec());
        self.add(stability, Histogram::with_opts(opts))
    }

    /// Registers a histogram with labels.
    pub fn histograms(
        &self,
        stability: Stability,
        name: &str,
        help: &str,
        bounds: &[f64],
        labels: &[&str],
    ) -> HistogramVec {
        let opts = HistogramOpts::new(name, stability.help(help)).buckets(bounds.to_vec());
        self.add(stability, HistogramVec::new(opts, labels))
    }
}
