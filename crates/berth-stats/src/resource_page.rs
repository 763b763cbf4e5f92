//! `/metrics/resource`: CPU, memory, and swap of node, pods, and containers as metrics. Pure.
//!
//! Built from the short form of the summary. Samples carry the time of the reading. Series with duplicate labels, for
//! which a consumer rejects the whole page, are never written: the newest pod and container win. A container that has
//! used no CPU or no memory yet is omitted, because metrics-server would drop its whole pod (spec 08 §5).
//! Implements spec 04b §9.

use std::collections::HashSet;

use super::{
    config::HiddenMetrics,
    page::{push_count, push_family, push_integer, push_label_value, push_scaled},
    reading::WallNs,
    summary::{ContainerStats, PodStats, Resources, StatsSummary},
};

/// Families that report a failed summary, the hidden one last: name and help.
const SCRAPE_ERRORS: [(&str, &str); 2] = [
    ("resource_scrape_error", "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise"),
    (
        "scrape_error",
        "[ALPHA] (Deprecated since 1.29.0) 1 if there was an error while getting container metrics, 0 otherwise",
    ),
];

/// Returns the page; without a summary it contains only `resource_scrape_error 1`, and `scrape_error 1` if hidden
/// metrics are shown.
pub fn write(summary: Result<&StatsSummary, &str>, hidden: HiddenMetrics) -> Vec<u8> {
    let mut out = Vec::new();
    if let Ok(summary) = summary {
        let pods = newest(&summary.pods);
        out.reserve(4096 + pods.len() * 2048);
        containers(&mut out, &pods);
        node(&mut out, &summary.node.usage);
        of_pods(&mut out, &pods);
    }
    let families = match hidden {
        HiddenMetrics::Omitted => 1,
        HiddenMetrics::Shown => 2,
    };
    for (name, help) in SCRAPE_ERRORS.into_iter().take(families) {
        push_family(&mut out, name, help, "gauge");
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(if summary.is_ok() { b" 0\n" } else { b" 1\n" });
    }
    out
}

/// Returns one pod per namespace and name: the one that started last.
fn newest(pods: &[PodStats]) -> Vec<&PodStats> {
    let mut newest: Vec<&PodStats> = pods.iter().collect();
    newest.sort_by(|a, b| {
        let name = |pod: &PodStats| (pod.id.namespace.clone(), pod.id.name.clone());
        name(a).cmp(&name(b)).then(b.started_at.cmp(&a.started_at))
    });
    newest.dedup_by(|a, b| a.id.namespace == b.id.namespace && a.id.name == b.id.name);
    newest
}

/// A sample value with the time at which it was read.
#[derive(Clone, Copy)]
enum TimedValue {
    /// Nanoseconds, written in seconds.
    Nanoseconds(u64, WallNs),
    /// An integer.
    Count(u64, WallNs),
    /// Nanoseconds since the epoch, written in seconds and without a timestamp.
    Moment(u64),
}

struct Family {
    name: &'static str,
    help: &'static str,
    kind: &'static str,
    value: fn(&Resources) -> Option<TimedValue>,
}

fn cpu(usage: &Resources) -> Option<TimedValue> {
    let cpu = usage.cpu?;
    Some(TimedValue::Nanoseconds(cpu.usage_core_nano_seconds?, cpu.at))
}

fn working_set(usage: &Resources) -> Option<TimedValue> {
    let memory = usage.memory?;
    Some(TimedValue::Count(memory.working_set?, memory.at))
}

fn swap(usage: &Resources) -> Option<TimedValue> {
    let swap = usage.swap?;
    Some(TimedValue::Count(swap.usage?, swap.at))
}

fn swap_limit(usage: &Resources) -> Option<TimedValue> {
    let swap = usage.swap?;
    Some(TimedValue::Count(swap.available?.saturating_add(swap.usage.unwrap_or_default()), swap.at))
}

const OF_CONTAINERS: [Family; 4] = [
    Family {
        name: "container_cpu_usage_seconds_total",
        help: "[STABLE] Cumulative cpu time consumed by the container in core-seconds",
        kind: "counter",
        value: cpu,
    },
    Family {
        name: "container_memory_working_set_bytes",
        help: "[STABLE] Current working set of the container in bytes",
        kind: "gauge",
        value: working_set,
    },
    Family {
        name: "container_swap_limit_bytes",
        help: "[ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems",
        kind: "gauge",
        value: swap_limit,
    },
    Family {
        name: "container_swap_usage_bytes",
        help: "[ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems",
        kind: "gauge",
        value: swap,
    },
];

const OF_NODE: [Family; 3] = [
    Family {
        name: "node_cpu_usage_seconds_total",
        help: "[STABLE] Cumulative cpu time consumed by the node in core-seconds",
        kind: "counter",
        value: cpu,
    },
    Family {
        name: "node_memory_working_set_bytes",
        help: "[STABLE] Current working set of the node in bytes",
        kind: "gauge",
        value: working_set,
    },
    Family {
        name: "node_swap_usage_bytes",
        help: "[ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems",
        kind: "gauge",
        value: swap,
    },
];

const OF_PODS: [Family; 3] = [
    Family {
        name: "pod_cpu_usage_seconds_total",
        help: "[STABLE] Cumulative cpu time consumed by the pod in core-seconds",
        kind: "counter",
        value: cpu,
    },
    Family {
        name: "pod_memory_working_set_bytes",
        help: "[STABLE] Current working set of the pod in bytes",
        kind: "gauge",
        value: working_set,
    },
    Family {
        name: "pod_swap_usage_bytes",
        help: "[ALPHA] Current amount of the pod swap usage in bytes. Reported only on non-windows systems",
        kind: "gauge",
        value: swap,
    },
];

/// Written between the working set and swap, because families are sorted by name.
const START: (&str, &str) =
    ("container_start_time_seconds", "[STABLE] Start time of the container since unix epoch in seconds");

fn containers(out: &mut Vec<u8>, pods: &[&PodStats]) {
    let labelled: Vec<(Vec<u8>, &ContainerStats)> = pods.iter().flat_map(|pod| labelled(pod)).collect();
    let write = |out: &mut Vec<u8>, family: &Family| {
        let values = labelled.iter().filter_map(|(labels, c)| Some((labels.as_slice(), (family.value)(&c.usage)?)));
        of_family(out, (family.name, family.help, family.kind), values);
    };
    let [cpu, working_set, limit, swap] = &OF_CONTAINERS;
    write(out, cpu);
    write(out, working_set);
    let started = labelled.iter().filter_map(|(labels, container)| {
        let at = u64::try_from(container.started_at.as_nanosecond())
            .ok()
            .filter(|_| container.started_at.as_second() > 0)?;
        Some((labels.as_slice(), TimedValue::Moment(at)))
    });
    of_family(out, (START.0, START.1, "gauge"), started);
    write(out, limit);
    write(out, swap);
}

/// Returns the containers of a pod with their labels, one per name.
fn labelled(pod: &PodStats) -> Vec<(Vec<u8>, &ContainerStats)> {
    let mut names = HashSet::new();
    let first = pod.containers.iter().filter(|container| names.insert(container.name.as_str()));
    let first = first.filter(|container| has_sample(&container.usage));
    let of = |container: &ContainerStats| labels(Some(&container.name), &pod.id.namespace, &pod.id.name);
    first.map(|container| (of(container), container)).collect()
}

/// Whether both CPU and memory usage, which metrics-server requires, are present and above 0.
fn has_sample(usage: &Resources) -> bool {
    let is_some = |number: Option<u64>| number.is_some_and(|number| number > 0);
    is_some(usage.cpu.and_then(|cpu| cpu.usage_core_nano_seconds))
        && is_some(usage.memory.and_then(|memory| memory.working_set))
}

fn node(out: &mut Vec<u8>, usage: &Resources) {
    for family in &OF_NODE {
        let value = (family.value)(usage).map(|value| (&b""[..], value));
        of_family(out, (family.name, family.help, family.kind), value.into_iter());
    }
}

fn of_pods(out: &mut Vec<u8>, pods: &[&PodStats]) {
    let labelled: Vec<(Vec<u8>, &PodStats)> =
        pods.iter().map(|pod| (labels(None, &pod.id.namespace, &pod.id.name), *pod)).collect();
    for family in &OF_PODS {
        let values = labelled.iter().filter_map(|(labels, pod)| Some((labels.as_slice(), (family.value)(&pod.usage)?)));
        of_family(out, (family.name, family.help, family.kind), values);
    }
}

fn of_family<'a>(
    out: &mut Vec<u8>,
    (name, help, kind): (&str, &str, &str),
    values: impl Iterator<Item = (&'a [u8], TimedValue)>,
) {
    let mut is_first = true;
    for (labels, value) in values {
        if std::mem::take(&mut is_first) {
            push_family(out, name, help, kind);
        }
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(labels);
        out.push(b' ');
        let at = match value {
            TimedValue::Nanoseconds(ns, at) => {
                push_scaled(out, ns, 9);
                Some(at)
            }
            TimedValue::Count(number, at) => {
                push_count(out, number);
                Some(at)
            }
            TimedValue::Moment(ns) => {
                push_scaled(out, ns, 9);
                None
            }
        };
        if let Some(at) = at {
            out.push(b' ');
            push_integer(out, u64::try_from(at / 1_000_000).unwrap_or_default());
        }
        out.push(b'\n');
    }
}

fn labels(container: Option<&str>, namespace: &str, pod: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + namespace.len() + pod.len());
    out.push(b'{');
    if let Some(container) = container {
        out.extend_from_slice(b"container=\"");
        push_label_value(&mut out, container);
        out.extend_from_slice(b"\",");
    }
    out.extend_from_slice(b"namespace=\"");
    push_label_value(&mut out, namespace);
    out.extend_from_slice(b"\",pod=\"");
    push_label_value(&mut out, pod);
    out.extend_from_slice(b"\"}");
    out
}

#[cfg(test)]
mod tests {
    use super::{
        super::{reading::Depth, testing as sample},
        *,
    };

    fn page(summary: Result<&StatsSummary, &str>) -> String {
        String::from_utf8(write(summary, HiddenMetrics::Omitted)).expect("text")
    }

    #[test]
    fn the_deprecated_family_is_written_only_if_hidden_metrics_are_shown() {
        let summary = sample::summary(Depth::Core, |_, _| {}).expect("made");
        for (summary, value) in [(Ok(&summary), 0), (Err("failed to list pod stats"), 1)] {
            let shown = String::from_utf8(write(summary, HiddenMetrics::Shown)).expect("text");
            let help = "(Deprecated since 1.29.0) 1 if there was an error while getting container metrics, 0 otherwise";
            let family =
                format!("# HELP scrape_error [ALPHA] {help}\n# TYPE scrape_error gauge\nscrape_error {value}\n");
            assert_eq!(shown, page(summary) + &family);
        }
    }

    #[test]
    fn the_page_to_the_byte() {
        let mut summary = sample::summary(Depth::Core, |_, _| {}).expect("made");
        summary.pods[0].containers.truncate(1);
        // AC-04b-M10, AC-04b-M11, AC-08-15
        let expected = "\
# HELP container_cpu_usage_seconds_total [STABLE] Cumulative cpu time consumed by the container in core-seconds
# TYPE container_cpu_usage_seconds_total counter
container_cpu_usage_seconds_total{container=\"main\",namespace=\"default\",pod=\"web\"} 5 1624396278302
# HELP container_memory_working_set_bytes [STABLE] Current working set of the container in bytes
# TYPE container_memory_working_set_bytes gauge
container_memory_working_set_bytes{container=\"main\",namespace=\"default\",pod=\"web\"} 350 1624396278302
# HELP container_start_time_seconds [STABLE] Start time of the container since unix epoch in seconds
# TYPE container_start_time_seconds gauge
container_start_time_seconds{container=\"main\",namespace=\"default\",pod=\"web\"} 1.62e+09
# HELP container_swap_limit_bytes [ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems
# TYPE container_swap_limit_bytes gauge
container_swap_limit_bytes{container=\"main\",namespace=\"default\",pod=\"web\"} 15 1624396278302
# HELP container_swap_usage_bytes [ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems
# TYPE container_swap_usage_bytes gauge
container_swap_usage_bytes{container=\"main\",namespace=\"default\",pod=\"web\"} 10 1624396278302
# HELP node_cpu_usage_seconds_total [STABLE] Cumulative cpu time consumed by the node in core-seconds
# TYPE node_cpu_usage_seconds_total counter
node_cpu_usage_seconds_total 10 1624396278302
# HELP node_memory_working_set_bytes [STABLE] Current working set of the node in bytes
# TYPE node_memory_working_set_bytes gauge
node_memory_working_set_bytes 4850 1624396278302
# HELP node_swap_usage_bytes [ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems
# TYPE node_swap_usage_bytes gauge
node_swap_usage_bytes 10 1624396278302
# HELP pod_cpu_usage_seconds_total [STABLE] Cumulative cpu time consumed by the pod in core-seconds
# TYPE pod_cpu_usage_seconds_total counter
pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"web\"} 10 1624396278302
# HELP pod_memory_working_set_bytes [STABLE] Current working set of the pod in bytes
# TYPE pod_memory_working_set_bytes gauge
pod_memory_working_set_bytes{namespace=\"default\",pod=\"web\"} 850 1624396278302
# HELP pod_swap_usage_bytes [ALPHA] Current amount of the pod swap usage in bytes. Reported only on non-windows systems
# TYPE pod_swap_usage_bytes gauge
pod_swap_usage_bytes{namespace=\"default\",pod=\"web\"} 10 1624396278302
# HELP resource_scrape_error [STABLE] 1 if there was an error while getting container metrics, 0 otherwise
# TYPE resource_scrape_error gauge
resource_scrape_error 0
";
        assert_eq!(page(Ok(&summary)), expected);
    }

    #[test]
    fn a_summary_that_failed_is_one_line() {
        // AC-04b-M9
        let expected = "\
# HELP resource_scrape_error [STABLE] 1 if there was an error while getting container metrics, 0 otherwise
# TYPE resource_scrape_error gauge
resource_scrape_error 1
";
        assert_eq!(page(Err("failed to list pod stats")), expected);
    }

    #[test]
    fn no_two_series_have_the_same_labels() {
        let mut summary = sample::summary(Depth::Core, |_, _| {}).expect("made");
        let mut older = summary.pods[0].clone();
        older.started_at -= 1;
        older.id.uid = "other".into();
        older.usage.cpu = None;
        let twice = summary.pods[0].containers[0].clone();
        summary.pods[0].containers.push(twice);
        summary.pods.insert(0, older);
        let page = page(Ok(&summary));
        let mut series: Vec<&str> =
            page.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.split_once(' ')).map(|l| l.0).collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all, "{page}");
        assert!(page.contains("pod_cpu_usage_seconds_total{"), "the newest wins: {page}");
    }

    #[test]
    fn a_container_without_a_sample_is_absent() {
        // AC-08-15
        let summary = sample::summary(Depth::Core, |snapshot, _| snapshot.pods[0].containers[0] = None).expect("made");
        let page_without = page(Ok(&summary));
        assert!(!page_without.contains("container=\"main\"") && page_without.contains("container=\"side\""));
        assert!(page_without.contains("resource_scrape_error 0") && !page_without.contains("\nscrape_error"));
        let idle = sample::summary(Depth::Core, |snapshot, _| {
            let seen = snapshot.pods[0].containers[0].as_mut().expect("there");
            seen.reading.cpu.as_mut().expect("read").times.usage_ns = 0;
        });
        let small = sample::summary(Depth::Core, |snapshot, _| {
            let seen = snapshot.pods[0].containers[0].as_mut().expect("there");
            seen.reading.memory.as_mut().expect("read").usage = 0;
        });
        for summary in [idle, small] {
            let page = page(Ok(&summary.expect("made")));
            assert!(!page.contains("container=\"main\"") && page.contains("pod_cpu_usage_seconds_total{"), "{page}");
        }
    }
}
