//! Figures and samples: what is measured, in which unit, how many samples become one number,
//! and which bar stands. Pure.

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
    /// Hundredths.
    Percent,
    /// A ratio.
    Times,
    /// Things.
    Count,
    /// 10^9 bytes a second.
    Throughput,
}

impl Unit {
    /// A value with its unit.
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

/// How samples become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// The middle one.
    Median,
    /// The 99th of a hundred.
    P99,
}

/// What a figure must not exceed, or must reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// That value.
    AtMost(f64),
    /// What a figure must reach.
    AtLeast(f64),
    /// So many times what the plain CRI client took in the same run.
    TimesRaw(f64),
    /// None: told, not judged.
    Open,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// How samples name it.
    pub key: &'static str,
    /// How people read it.
    pub title: &'static str,
    /// Unit.
    pub unit: Unit,
    /// Reduction.
    pub reduce: Reduce,
    /// Bar.
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
    /// One more sample.
    pub fn add(&mut self, key: &'static str, value: f64) {
        self.0.entry(key).or_default().push(value);
    }

    /// All of another's.
    pub fn extend(&mut self, other: Self) {
        for (key, values) in other.0 {
            self.0.entry(key).or_default().extend(values);
        }
    }

    /// The number for a figure; `None` without samples.
    pub fn reduced(&self, figure: &Figure) -> Option<f64> {
        reduce(self.0.get(figure.key)?, figure.reduce)
    }
}

/// Reduces samples to one number; `None` where there are none.
pub fn reduce(samples: &[f64], how: Reduce) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = match how {
        Reduce::Median => sorted.len() / 2,
        Reduce::P99 => (sorted.len() * 99).div_ceil(100).saturating_sub(1),
    };
    sorted.get(at).copied()
}
