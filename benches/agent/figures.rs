//! Benchmark figures and samples: unit, reduction of samples to one number, and bar. Pure.

use std::collections::HashMap;

/// The unit of a figure's samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Megabytes (10^6 bytes).
    Megabytes,
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
    /// Percent.
    Percent,
    /// Ratio.
    Times,
    /// Number of items.
    Count,
    /// 10^9 bytes per second.
    Throughput,
}

impl Unit {
    /// Formats a value with its unit.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Megabytes => format!("{value:.1} MB"),
            Self::Milliseconds => format!("{value:.1} ms"),
            Self::Seconds => format!("{value:.3} s"),
            Self::Percent => format!("{value:.2} %"),
            Self::Times => format!("{value:.3} ×"),
            Self::Count => format!("{value:.1}"),
            Self::Throughput => format!("{value:.3} GB/s"),
        }
    }
}

/// How samples are reduced to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Median.
    Median,
    /// 99th percentile.
    P99,
}

/// The bar that a figure must meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// Upper limit.
    AtMost(f64),
    /// Lower limit.
    AtLeast(f64),
    /// Upper limit as a multiple of the plain CRI client's figure in the same run.
    TimesRaw(f64),
    /// No limit: the figure is reported only.
    Open,
}

/// One row of the results table.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Key of the samples.
    pub key: &'static str,
    /// Title in the table.
    pub title: &'static str,
    /// Unit of the samples.
    pub unit: Unit,
    /// Reduction to one number.
    pub reduce: Reduce,
    /// Bar to meet.
    pub bar: Bar,
}

/// A figure reduced to its median.
pub const fn median(key: &'static str, title: &'static str, unit: Unit, bar: Bar) -> Figure {
    Figure { key, title, unit, reduce: Reduce::Median, bar }
}

/// A figure reduced to its 99th percentile.
pub const fn p99(key: &'static str, title: &'static str, unit: Unit, bar: Bar) -> Figure {
    Figure { key, title, unit, reduce: Reduce::P99, bar }
}

/// Samples by the key of their figure.
#[derive(Debug, Default)]
pub struct Samples(HashMap<&'static str, Vec<f64>>);

impl Samples {
    /// Adds one sample.
    pub fn add(&mut self, key: &'static str, value: f64) {
        self.0.entry(key).or_default().push(value);
    }

    /// Adds all samples of another set.
    pub fn extend(&mut self, other: Self) {
        for (key, values) in other.0 {
            self.0.entry(key).or_default().extend(values);
        }
    }

    /// The reduced number of a figure; `None` without samples.
    pub fn reduced(&self, figure: &Figure) -> Option<f64> {
        reduce(self.0.get(figure.key)?, figure.reduce)
    }
}

/// Reduces samples to one number; `None` if there are none.
pub fn reduce(samples: &[f64], how: Reduce) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = match how {
        Reduce::Median => sorted.len() / 2,
        Reduce::P99 => (sorted.len() * 99).div_ceil(100).saturating_sub(1),
    };
    sorted.get(at).copied()
}
