//! Encoder for length-delimited protobuf metric families.
//!
//! The messages are the subset of `io.prometheus.client` (`metrics.proto`) that Berth fills (spec 08 §2).

use prometheus::proto::{self, MetricType};
use prost::Message;

/// Appends all families that have a series, sorted by name.
pub fn delimited(mut families: Vec<proto::MetricFamily>, out: &mut Vec<u8>) {
    families.retain(|f| !f.get_metric().is_empty());
    families.sort_by(|a, b| a.name().cmp(b.name()));
    for family in &families {
        MetricFamily::from(family).encode_length_delimited(out).expect("a Vec grows as needed");
    }
}

#[derive(Clone, PartialEq, Message)]
struct MetricFamily {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    help: Option<String>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
    #[prost(message, repeated, tag = "4")]
    metric: Vec<Metric>,
}

#[derive(Clone, PartialEq, Message)]
struct Metric {
    #[prost(message, repeated, tag = "1")]
    label: Vec<LabelPair>,
    #[prost(message, optional, tag = "2")]
    gauge: Option<GaugeOrCounter>,
    #[prost(message, optional, tag = "3")]
    counter: Option<GaugeOrCounter>,
    #[prost(message, optional, tag = "4")]
    summary: Option<Summary>,
    #[prost(int64, optional, tag = "6")]
    timestamp_ms: Option<i64>,
    #[prost(message, optional, tag = "7")]
    histogram: Option<Histogram>,
}

#[derive(Clone, PartialEq, Message)]
struct LabelPair {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    value: Option<String>,
}

/// `Gauge` and `Counter` have the same layout.
#[derive(Clone, Copy, PartialEq, Message)]
struct GaugeOrCounter {
    #[prost(double, optional, tag = "1")]
    value: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(uint64, optional, tag = "1")]
    sample_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    sample_sum: Option<f64>,
    #[prost(message, repeated, tag = "3")]
    quantile: Vec<Quantile>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Quantile {
    #[prost(double, optional, tag = "1")]
    quantile: Option<f64>,
    #[prost(double, optional, tag = "2")]
    value: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Histogram {
    #[prost(uint64, optional, tag = "1")]
    sample_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    sample_sum: Option<f64>,
    #[prost(message, repeated, tag = "3")]
    bucket: Vec<Bucket>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Bucket {
    #[prost(uint64, optional, tag = "1")]
    cumulative_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    upper_bound: Option<f64>,
}

impl From<&proto::MetricFamily> for MetricFamily {
    fn from(family: &proto::MetricFamily) -> Self {
        let kind = family.get_field_type();
        Self {
            name: Some(family.name().to_owned()),
            help: Some(family.help().to_owned()),
            kind: Some(match kind {
                MetricType::COUNTER => 0,
                MetricType::GAUGE => 1,
                MetricType::SUMMARY => 2,
                MetricType::UNTYPED => 3,
                MetricType::HISTOGRAM => 4,
            }),
            metric: family.get_metric().iter().map(|m| Metric::new(kind, m)).collect(),
        }
    }
}

impl Metric {
    fn new(kind: MetricType, metric: &proto::Metric) -> Self {
        let value = |value| Some(GaugeOrCounter { value: Some(value) });
        let mut made = Self {
            label: metric.get_label().iter().map(LabelPair::from).collect(),
            timestamp_ms: Some(metric.timestamp_ms()).filter(|t| *t != 0),
            ..Default::default()
        };
        made.label.sort_by(|a, b| a.name.cmp(&b.name));
        match kind {
            MetricType::COUNTER => made.counter = value(metric.get_counter().get_value()),
            MetricType::GAUGE => made.gauge = value(metric.get_gauge().get_value()),
            MetricType::SUMMARY => made.summary = Some(metric.get_summary().into()),
            MetricType::HISTOGRAM => made.histogram = Some(metric.get_histogram().into()),
            MetricType::UNTYPED => {}
        }
        made
    }
}

impl From<&proto::LabelPair> for LabelPair {
    fn from(label: &proto::LabelPair) -> Self {
        Self { name: Some(label.name().to_owned()), value: Some(label.value().to_owned()) }
    }
}

impl From<&proto::Summary> for Summary {
    fn from(summary: &proto::Summary) -> Self {
        let quantile = |q: &proto::Quantile| Quantile { quantile: Some(q.quantile()), value: Some(q.value()) };
        Self {
            sample_count: Some(summary.sample_count()),
            sample_sum: Some(summary.sample_sum()),
            quantile: summary.get_quantile().iter().map(quantile).collect(),
        }
    }
}

impl From<&proto::Histogram> for Histogram {
    fn from(histogram: &proto::Histogram) -> Self {
        let bucket = |b: &proto::Bucket| Bucket {
            cumulative_count: Some(b.cumulative_count()),
            upper_bound: Some(b.upper_bound()),
        };
        Self {
            sample_count: Some(histogram.get_sample_count()),
            sample_sum: Some(histogram.get_sample_sum()),
            bucket: histogram.get_bucket().iter().map(bucket).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Registry, Stability};

    #[test]
    fn families_stand_behind_their_lengths() {
        // AC-08-3
        let registry = Registry::new();
        registry.counter(Stability::Bare, "c", "C");
        let out = {
            let mut out = Vec::new();
            delimited(registry.gather(), &mut out);
            out
        };
        // By the field numbers of metrics.proto; a zero is encoded explicitly, as in proto2.
        let counter: [u8; 9] = [9, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut expected = vec![21, 10, 1, b'c', 18, 1, b'C', 24, 0, 34, 11, 26, 9];
        expected.extend(counter);
        assert_eq!(out, expected);
    }

    #[test]
    fn every_kind_survives() {
        let registry = Registry::new();
        let gauges = registry.float_gauges(Stability::Alpha, "g", "G", &["b", "a"]);
        gauges.with_label_values(&["1", "2"]).set(-1.5);
        registry.histogram(Stability::Alpha, "h", "H", &[1.0, 2.0]).observe(1.5);
        let mut out = Vec::new();
        delimited(registry.gather(), &mut out);
        let mut rest = out.as_slice();
        let mut next = || MetricFamily::decode_length_delimited(&mut rest).expect("a family");
        let (g, h) = (next(), next());
        let labels: Vec<_> = g.metric[0].label.iter().map(|l| (l.name.clone(), l.value.clone())).collect();
        let pair = |n: &str, v: &str| (Some(n.to_owned()), Some(v.to_owned()));
        assert_eq!((g.kind, labels), (Some(1), vec![pair("a", "2"), pair("b", "1")]));
        let histogram = h.metric[0].histogram.as_ref().expect("a histogram");
        assert_eq!((histogram.sample_count, histogram.sample_sum), (Some(1), Some(1.5)));
        let counts: Vec<_> = histogram.bucket.iter().map(|b| b.cumulative_count).collect();
        assert_eq!(counts, [Some(0), Some(1)]);
        assert!(rest.is_empty());
    }
}
