//! Encoder for the Prometheus text format 0.0.4, byte for byte like the reference.
//!
//! The caller owns the buffer and encodes either the whole page ([`text`]) or family by family ([`write_family`])
//! straight into a compressed response (spec 08 §2).

use std::fmt::Write;

use prometheus::proto::{Histogram, LabelPair, Metric, MetricFamily, MetricType, Summary};

/// Appends all families, sorted by name; families without a series are omitted.
pub fn text(mut families: Vec<MetricFamily>, out: &mut String) {
    if !families.is_sorted_by(|a, b| a.name() <= b.name()) {
        families.sort_by(|a, b| a.name().cmp(b.name()));
    }
    for family in &mut families {
        write_family(family, out);
    }
}

/// Appends one family, its series sorted by their labels.
pub fn write_family(family: &mut MetricFamily, out: &mut String) {
    let (name, help, kind) = (family.name().to_owned(), family.help().to_owned(), family.get_field_type());
    let series = family.mut_metric();
    if series.is_empty() {
        return;
    }
    for metric in series.iter_mut().filter(|m| !m.get_label().is_sorted_by(|a, b| a.name() <= b.name())) {
        metric.mut_label().sort_by(|a, b| a.name().cmp(b.name()));
    }
    if !series.is_sorted_by(|a, b| values(a).le(values(b))) {
        series.sort_by(|a, b| values(a).cmp(values(b)));
    }
    out.extend(["# HELP ", name.as_str(), " "]);
    push_escaped(out, &help, QuoteStyle::None);
    out.extend(["\n# TYPE ", name.as_str(), " ", type_name(kind), "\n"]);
    for metric in series.iter() {
        match kind {
            MetricType::COUNTER => sample(out, &name, metric, metric.get_counter().get_value()),
            MetricType::GAUGE => sample(out, &name, metric, metric.get_gauge().get_value()),
            MetricType::HISTOGRAM => histogram(out, &name, metric, metric.get_histogram()),
            MetricType::SUMMARY => summary(out, &name, metric, metric.get_summary()),
            // The client library creates no other types.
            MetricType::UNTYPED => {}
        }
    }
}

fn values(metric: &Metric) -> impl Iterator<Item = &str> {
    metric.get_label().iter().map(LabelPair::value)
}

fn type_name(kind: MetricType) -> &'static str {
    match kind {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        MetricType::SUMMARY => "summary",
        MetricType::UNTYPED => "untyped",
    }
}

fn sample(out: &mut String, name: &str, metric: &Metric, value: f64) {
    line(out, (name, ""), metric, None, value);
}

fn histogram(out: &mut String, name: &str, metric: &Metric, histogram: &Histogram) {
    let mut infinite = false;
    for bucket in histogram.get_bucket() {
        infinite |= bucket.upper_bound() == f64::INFINITY;
        let bound = Some(("le", bucket.upper_bound()));
        line(out, (name, "_bucket"), metric, bound, count(bucket.cumulative_count()));
    }
    let all = count(histogram.get_sample_count());
    if !infinite {
        line(out, (name, "_bucket"), metric, Some(("le", f64::INFINITY)), all);
    }
    line(out, (name, "_sum"), metric, None, histogram.get_sample_sum());
    line(out, (name, "_count"), metric, None, all);
}

fn summary(out: &mut String, name: &str, metric: &Metric, summary: &Summary) {
    for quantile in summary.get_quantile() {
        line(out, (name, ""), metric, Some(("quantile", quantile.quantile())), quantile.value());
    }
    line(out, (name, "_sum"), metric, None, summary.sample_sum());
    line(out, (name, "_count"), metric, None, count(summary.sample_count()));
}

/// Converts a count: the format writes counts like any other number.
#[allow(clippy::cast_precision_loss, reason = "the format has no integers; the reference loses the same digits")]
fn count(count: u64) -> f64 {
    count as f64
}

/// Writes `name{labels} value`, with an optional last label, and the timestamp if there is one.
fn line(out: &mut String, (name, suffix): (&str, &str), metric: &Metric, more: Option<(&str, f64)>, value: f64) {
    out.extend([name, suffix]);
    let mut opening = '{';
    for label in metric.get_label() {
        out.push(opening);
        out.extend([label.name(), "=\""]);
        push_escaped(out, label.value(), QuoteStyle::Double);
        out.push('"');
        opening = ',';
    }
    if let Some((label, value)) = more {
        out.push(opening);
        out.extend([label, "=\""]);
        push_number(out, value);
        out.push('"');
        opening = ',';
    }
    if opening == ',' {
        out.push('}');
    }
    out.push(' ');
    push_number(out, value);
    let time = metric.timestamp_ms();
    if time != 0 {
        push(out, format_args!(" {time}"));
    }
    out.push('\n');
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum QuoteStyle {
    None,
    Double,
}

fn push_escaped(out: &mut String, text: &str, quoting: QuoteStyle) {
    let special = |b: u8| b == b'\\' || b == b'\n' || (b == b'"' && quoting == QuoteStyle::Double);
    if !text.bytes().any(special) {
        out.push_str(text);
        return;
    }
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quoting == QuoteStyle::Double => out.push_str("\\\""),
            c => out.push(c),
        }
    }
}

/// Writes a number with the shortest digits that parse to the same value; exponents outside of -4..5 are written as
/// such.
pub fn push_number(out: &mut String, value: f64) {
    if value.is_nan() {
        out.push_str("NaN");
    } else if value.is_infinite() {
        out.push_str(if value > 0.0 { "+Inf" } else { "-Inf" });
    } else if value == 0.0 {
        out.push('0');
    } else if (1.0..1e6).contains(&value) {
        push(out, format_args!("{value}"));
    } else {
        push_with_exponent(out, value);
    }
}

fn push_with_exponent(out: &mut String, value: f64) {
    let text = format!("{value:e}");
    let parsed = text.split_once('e').and_then(|(digits, e)| Some((digits, e.parse::<i32>().ok()?)));
    match parsed {
        Some((digits, exponent)) if !(-4..=5).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            push(out, format_args!("{digits}e{sign}{:02}", exponent.abs()));
        }
        _ => push(out, format_args!("{value}")),
    }
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to a String does not fail");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Registry, Stability};
    use prometheus::proto::Bucket;

    fn page(families: Vec<MetricFamily>) -> String {
        let mut out = String::new();
        text(families, &mut out);
        out
    }

    #[test]
    fn numbers_are_written_as_the_reference_writes_them() {
        for (value, expected) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.0, "1"),
            (-1.0, "-1"),
            (0.005, "0.005"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (9.999999999999999e-05, "9.999999999999999e-05"),
            (655_360.0, "655360"),
            (999_999.5, "999999.5"),
            (1e6, "1e+06"),
            (123_456_789.0, "1.23456789e+08"),
            (5.663154176e9, "5.663154176e+09"),
            (-2.5e7, "-2.5e+07"),
            (298.023_223_876_953_1, "298.0232238769531"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
            (f64::NAN, "NaN"),
        ] {
            let mut out = String::new();
            push_number(&mut out, value);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn a_page_is_written_to_the_byte() {
        let registry = Registry::new();
        registry.counter(Stability::Alpha, "kubelet_z_total", "Counts\nz\\").inc_by(2_000_000);
        let gauge = registry.gauges(Stability::Beta, "kubelet_a", "A", &["static", "config"]);
        gauge.with_label_values(&["true", "x"]).set(3);
        gauge.with_label_values(&["", "q\"\\\n"]).set(-1);
        registry.counters(Stability::Alpha, "kubelet_empty_total", "No series", &["l"]);
        let histogram = registry.histogram(Stability::Stable, "kubelet_h_seconds", "H", &[0.005, 10.0]);
        for value in [0.001, 5.0, 20.0] {
            histogram.observe(value);
        }
        registry.float_gauge(Stability::Bare, "process_x", "Bare");
        let expected = "\
# HELP kubelet_a [BETA] A
# TYPE kubelet_a gauge
kubelet_a{config=\"q\\\"\\\\\\n\",static=\"\"} -1
kubelet_a{config=\"x\",static=\"true\"} 3
# HELP kubelet_h_seconds [STABLE] H
# TYPE kubelet_h_seconds histogram
kubelet_h_seconds_bucket{le=\"0.005\"} 1
kubelet_h_seconds_bucket{le=\"10\"} 2
kubelet_h_seconds_bucket{le=\"+Inf\"} 3
kubelet_h_seconds_sum 25.001
kubelet_h_seconds_count 3
# HELP kubelet_z_total [ALPHA] Counts\\nz\\\\
# TYPE kubelet_z_total counter
kubelet_z_total 2e+06
# HELP process_x Bare
# TYPE process_x gauge
process_x 0
";
        assert_eq!(page(registry.gather()), expected);
        let mut reversed = registry.gather();
        reversed.reverse();
        reversed.iter_mut().for_each(|f| f.mut_metric().reverse());
        assert_eq!(page(reversed), expected, "whatever order the families come in");
    }

    #[test]
    fn times_and_labels_of_histograms_are_written() {
        let mut metric = Metric::default();
        let mut label = LabelPair::default();
        label.set_name("l".to_owned());
        label.set_value("v".to_owned());
        metric.set_label(vec![label]);
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(f64::INFINITY);
        bucket.set_cumulative_count(7);
        let mut histogram = Histogram::default();
        histogram.set_bucket(vec![bucket]);
        histogram.set_sample_count(7);
        histogram.set_sample_sum(0.5);
        metric.set_histogram(histogram);
        metric.set_timestamp_ms(1_700_000_000_123);
        let mut family = MetricFamily::default();
        family.set_name("f".to_owned());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(vec![metric]);
        assert_eq!(
            page(vec![family]),
            "# HELP f \n# TYPE f histogram\nf_bucket{l=\"v\",le=\"+Inf\"} 7 1700000000123\n\
             f_sum{l=\"v\"} 0.5 1700000000123\nf_count{l=\"v\"} 7 1700000000123\n"
        );
    }

    #[test]
    fn every_bucket_set_prints_its_bounds() {
        use crate::buckets;
        let mut out = String::new();
        for bound in buckets::RUNTIME {
            push_number(&mut out, *bound);
            out.push(' ');
        }
        assert_eq!(
            out.trim_end(),
            "0.005 0.0125 0.03125 0.078125 0.1953125 0.48828125 1.220703125 3.0517578125 7.62939453125 \
             19.073486328125 47.6837158203125 119.20928955078125 298.0232238769531 745.0580596923828"
        );
    }
}
