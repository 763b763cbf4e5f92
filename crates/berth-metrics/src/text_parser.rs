//! Parser for our own text pages, to serve them as protobuf. Supports counters and gauges only.

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

/// Parses the families of a page; lines that cannot be parsed are omitted.
pub fn families(page: &str) -> Vec<MetricFamily> {
    let mut families: Vec<MetricFamily> = Vec::new();
    for line in page.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(help.to_owned());
            families.push(family);
        } else if let Some(family) = families.last_mut() {
            match line.strip_prefix("# TYPE ").and_then(|rest| rest.rsplit_once(' ')) {
                Some((_, "counter")) => family.set_field_type(MetricType::COUNTER),
                Some(_) => family.set_field_type(MetricType::GAUGE),
                None => {
                    let is_counter = family.get_field_type() == MetricType::COUNTER;
                    family.mut_metric().extend(series(line, is_counter));
                }
            }
        }
    }
    families
}

/// Parses a sample line: `name{key="value",…} number time`
fn series(line: &str, is_counter: bool) -> Option<Metric> {
    let mut metric = Metric::default();
    let rest = match line.split_once('{') {
        Some((_, rest)) => {
            let (labels, rest) = labels(rest)?;
            metric.set_label(labels);
            rest
        }
        None => line.split_once(' ')?.1,
    };
    let mut fields = rest.split_whitespace();
    let value: f64 = fields.next()?.parse().ok()?;
    if is_counter {
        let mut counter = Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
    } else {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    }
    if let Some(time) = fields.next() {
        metric.set_timestamp_ms(time.parse().ok()?);
    }
    Some(metric)
}

/// Parses labels; returns them with the text after the closing brace.
fn labels(text: &str) -> Option<(Vec<LabelPair>, &str)> {
    let (mut found, mut rest) = (Vec::new(), text);
    loop {
        if let Some(behind) = rest.strip_prefix('}') {
            return Some((found, behind));
        }
        let (key, quoted) = rest.trim_start_matches(',').split_once("=\"")?;
        let (value, behind) = value(quoted)?;
        let mut label = LabelPair::default();
        label.set_name(key.to_owned());
        label.set_value(value);
        found.push(label);
        rest = behind;
    }
}

/// Parses an escaped value up to its closing quote; returns it with the remaining text.
fn value(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = quoted.chars();
    loop {
        match chars.next()? {
            '"' => return Some((value, chars.as_str())),
            '\\' => match chars.next()? {
                'n' => value.push('\n'),
                c => value.push(c),
            },
            c => value.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read_back() {
        let page = "\
# HELP a_total A counter
# TYPE a_total counter
a_total{l=\"x\\\"\\\\\\n}\",m=\"\"} 1.5e+06 1624396278302
# HELP b B
# TYPE b gauge
b -1
b{l=\"1\"} 2
";
        let families = families(page);
        let mut again = String::new();
        crate::text_encoder::text(families, &mut again);
        assert_eq!(again, page);
    }

    #[test]
    fn nonsense_is_left_out() {
        for page in ["", "x 1\n", "# HELP a\n", "# HELP a A\n# TYPE a gauge\na{\na{l\na{l=\"\na x\na 1 x\n"] {
            assert!(families(page).iter().all(|family| family.get_metric().is_empty()), "{page}");
        }
    }
}
