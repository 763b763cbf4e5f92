//! Build info, feature gate, node name, and `process_*` metrics. Implements spec 08 §4.1, §4.17.

use std::fs;

use nix::{sys::resource, unistd};
use prometheus::{
    Counter, Gauge,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{Registry, Stability};

/// Label values of `kubernetes_build_info`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BuildInfo {
    /// Major version of Kubernetes.
    pub major: String,
    /// Minor version of Kubernetes.
    pub minor: String,
    /// Reported version; starts with `v1.36.`.
    pub git_version: String,
    /// Compiler of this binary.
    pub compiler: String,
    /// Operating system and architecture: `os/arch`.
    pub platform: String,
}

/// Registers `kubernetes_build_info`, which is constant.
pub fn register_build_info(registry: &Registry, info: &BuildInfo) {
    let labels = [
        "major",
        "minor",
        "git_version",
        "git_commit",
        "git_tree_state",
        "build_date",
        "go_version",
        "compiler",
        "platform",
    ];
    let help =
        "A metric with a constant '1' value labeled by the version from which Kubernetes was built, and platform.";
    let family = registry.gauges(Stability::Beta, "kubernetes_build_info", help, &labels);
    let values: [&str; 9] =
        [&info.major, &info.minor, &info.git_version, "", "clean", "", "", &info.compiler, &info.platform];
    family.with_label_values(&values).set(1);
}

/// Registers `kubernetes_feature_enabled` with one series per gate: name, stage, value.
pub fn register_features(registry: &Registry, gates: impl IntoIterator<Item = (&'static str, &'static str, bool)>) {
    let help = "Whether a feature gate is on.";
    let family = registry.gauges(Stability::Beta, "kubernetes_feature_enabled", help, &["name", "stage"]);
    for (name, stage, enabled) in gates {
        family.with_label_values(&[name, stage]).set(i64::from(enabled));
    }
}

/// Registers `kubelet_node_name`, on which public rules join.
pub fn register_node(registry: &Registry, name: &str) {
    let help = "The node's name. The count is always 1.";
    registry.gauges(Stability::Alpha, "kubelet_node_name", help, &["node"]).with_label_values(&[name]).set(1);
}

/// Registers the `process_*` families, read from the kernel at each scrape, and `go_goroutines` with the number that
/// `live_tasks` returns, so that stock dashboards show a value.
pub fn register_process(registry: &Registry, live_tasks: impl Fn() -> usize + Send + Sync + 'static) {
    registry.collector(ProcessCollector::new(live_tasks));
}

/// Start time of this process, seconds since the epoch; `None` if `/proc` is unreadable.
pub fn start_time_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let boot = fs::read_to_string("/proc/stat").ok()?;
    let boot: f64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + Stat::parse(&stat)?.start_ticks / ticks_per_second())
}

fn ticks_per_second() -> f64 {
    match unistd::sysconf(unistd::SysconfVar::CLK_TCK) {
        Ok(Some(ticks)) if ticks > 0 => ticks as f64,
        _ => 100.0,
    }
}

/// Columns of `/proc/self/stat` that are used.
struct Stat {
    cpu_ticks: f64,
    start_ticks: f64,
    virtual_bytes: f64,
    resident_pages: f64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The process name is in parentheses and may contain any character.
        let (_, after) = text.rsplit_once(')')?;
        let columns: Vec<&str> = after.split_whitespace().collect();
        let column = |at: usize| columns.get(at)?.parse::<f64>().ok();
        Some(Self {
            cpu_ticks: column(11)? + column(12)?,
            start_ticks: column(19)?,
            virtual_bytes: column(20)?,
            resident_pages: column(21)?,
        })
    }
}

struct ProcessCollector<F> {
    live_tasks: F,
    cpu: Counter,
    received: Counter,
    sent: Counter,
    gauges: Gauges,
}

struct Gauges {
    resident: Gauge,
    virtual_size: Gauge,
    virtual_max: Gauge,
    open_files: Gauge,
    max_files: Gauge,
    start: Gauge,
    tasks: Gauge,
}

impl<F: Fn() -> usize> ProcessCollector<F> {
    fn new(live_tasks: F) -> Self {
        let counter = |name: &str, help: &str| Counter::new(name, help).expect("constant names are valid");
        let gauge = |name: &str, help: &str| Gauge::new(name, help).expect("constant names are valid");
        Self {
            live_tasks,
            cpu: counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds."),
            received: counter(
                "process_network_receive_bytes_total",
                "Number of bytes received by the process over the network.",
            ),
            sent: counter(
                "process_network_transmit_bytes_total",
                "Number of bytes sent by the process over the network.",
            ),
            gauges: Gauges {
                resident: gauge("process_resident_memory_bytes", "Resident memory size in bytes."),
                virtual_size: gauge("process_virtual_memory_bytes", "Virtual memory size in bytes."),
                virtual_max: gauge(
                    "process_virtual_memory_max_bytes",
                    "Maximum amount of virtual memory available in bytes.",
                ),
                open_files: gauge("process_open_fds", "Number of open file descriptors."),
                max_files: gauge("process_max_fds", "Maximum number of open file descriptors."),
                start: gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds."),
                tasks: gauge("go_goroutines", "Number of live asynchronous tasks."),
            },
        }
    }

    fn families(&self) -> [&dyn Collector; 10] {
        let g = &self.gauges;
        [
            &self.cpu,
            &self.received,
            &self.sent,
            &g.resident,
            &g.virtual_size,
            &g.virtual_max,
            &g.open_files,
            &g.max_files,
            &g.start,
            &g.tasks,
        ]
    }

    /// Reads the kernel's values; a value that cannot be read keeps its previous one.
    fn refresh(&self) {
        let g = &self.gauges;
        g.tasks.set((self.live_tasks)() as f64);
        if let Some(stat) = fs::read_to_string("/proc/self/stat").ok().and_then(|text| Stat::parse(&text)) {
            set(&self.cpu, stat.cpu_ticks / ticks_per_second());
            g.virtual_size.set(stat.virtual_bytes);
            let page = unistd::sysconf(unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
            g.resident.set(stat.resident_pages * page as f64);
        }
        if let Some(start) = start_time_seconds() {
            g.start.set(start);
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            // One of them is the directory that is being read.
            g.open_files.set(open.count().saturating_sub(1) as f64);
        }
        if let Ok((soft, _)) = resource::getrlimit(resource::Resource::RLIMIT_NOFILE) {
            g.max_files.set(soft as f64);
        }
        if let Ok((soft, _)) = resource::getrlimit(resource::Resource::RLIMIT_AS) {
            g.virtual_max.set(soft as f64);
        }
        if let Some((received, sent)) = fs::read_to_string("/proc/self/net/netstat").ok().and_then(|t| octets(&t)) {
            set(&self.received, received);
            set(&self.sent, sent);
        }
    }
}

fn set(counter: &Counter, value: f64) {
    counter.reset();
    counter.inc_by(value);
}

/// `InOctets` and `OutOctets` of the `IpExt` table.
fn octets(netstat: &str) -> Option<(f64, f64)> {
    let mut rows = netstat.lines().filter_map(|line| line.strip_prefix("IpExt: "));
    let (names, values) = (rows.next()?, rows.next()?);
    let of = |wanted: &str| {
        let at = names.split_whitespace().position(|name| name == wanted)?;
        values.split_whitespace().nth(at)?.parse().ok()
    };
    Some((of("InOctets")?, of("OutOctets")?))
}

impl<F: Fn() -> usize + Send + Sync> Collector for ProcessCollector<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.families().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.refresh();
        self.families().into_iter().flat_map(Collector::collect).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(registry: &Registry, name: &str) -> f64 {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect(name);
        let metric = family.get_metric().first().expect(name);
        metric.get_gauge().get_value() + metric.get_counter().get_value()
    }

    #[test]
    fn process_values_are_read_at_every_scrape() {
        let registry = Registry::new();
        register_process(&registry, || 7);
        for name in [
            "process_cpu_seconds_total",
            "process_resident_memory_bytes",
            "process_virtual_memory_bytes",
            "process_virtual_memory_max_bytes",
            "process_open_fds",
            "process_max_fds",
            "process_start_time_seconds",
        ] {
            assert!(value(&registry, name) >= 0.0, "{name}");
        }
        assert!(value(&registry, "process_resident_memory_bytes") > 1e5);
        assert!(value(&registry, "process_start_time_seconds") > 1e9);
        assert!((value(&registry, "go_goroutines") - 7.0).abs() < 0.5);
    }

    #[test]
    fn gates_and_version_are_labels() {
        let registry = Registry::new();
        register_features(&registry, [("A", "ALPHA", false), ("B", "", true)]);
        let info = BuildInfo {
            major: "1".into(),
            minor: "36".into(),
            git_version: "v1.36.2".into(),
            compiler: "rustc".into(),
            platform: "linux/amd64".into(),
        };
        register_build_info(&registry, &info);
        assert!((value(&registry, "kubernetes_build_info") - 1.0).abs() < 0.5);
        let families = registry.gather();
        let features = families.iter().find(|f| f.name() == "kubernetes_feature_enabled").expect("registered");
        let stage = |at: usize| features.get_metric()[at].get_label()[1].value().to_owned();
        assert_eq!((features.get_metric().len(), stage(0), stage(1)), (2, "ALPHA".to_owned(), String::new()));
        assert!(features.help().starts_with("[BETA] "));
    }

    #[test]
    fn tables_of_the_kernel_are_read_by_name() {
        let netstat = "TcpExt: A B\nTcpExt: 1 2\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 0 11 22\n";
        assert_eq!(octets(netstat), Some((11.0, 22.0)));
        assert_eq!(octets("IpExt: InOctets\n"), None);
        assert!(Stat::parse("1 (a) b) S 0 0").is_none());
    }
}
