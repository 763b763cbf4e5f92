//! `/metrics/cadvisor`: cgroup metrics under the names that public dashboards select. Pure.
//!
//! [`families`] defines the families of cgroups, `cadvisor_labels` their labels, `cadvisor_machine` the families of
//! the machine. Implements spec 04b §11, 08 §8.
//!
//! [`families`]: berth_cadvisor::families

use std::{collections::HashMap, sync::Arc};

use super::{
    cadvisor_labels::{Labels, Names},
    cadvisor_machine::{machine, scrape_error, version},
    host::{DiskCounters, Host},
    network::{LinkCounters, NetworkInterfaces},
    open_files::OpenFiles,
    page::{push_count, push_family, push_integer, push_scaled, push_signed},
    reader::{CgroupObservation, MachineMemory},
    reading::WallNs,
    snapshot::{PodUsage, Snapshot},
};
pub use berth_cadvisor::MountedFileSystem;
use berth_cadvisor::{Family, MetricInputs, MetricKind, MetricSource, PageOmission, Stamp, Value, families::FAMILIES};

/// Maximum number of series of one family; a page that would exceed it reports a scrape error (spec 08 §16).
const MAX_SERIES: usize = 20_000;

/// Open files of a cgroup at a point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenFileCount {
    /// Counted descriptors, sockets, and limits.
    pub files: OpenFiles,
    /// CPU time the cgroup had used at the count, nanoseconds; `None` where unknown.
    pub used_ns: Option<u64>,
}

/// Open files by cgroup path.
pub type Counts = HashMap<Arc<str>, OpenFileCount>;

/// Inputs of the page.
pub struct CadvisorInputs<'a> {
    /// A snapshot of full depth.
    pub snapshot: &'a Snapshot,
    /// Current time.
    pub now: WallNs,
    /// Constant facts of the machine.
    pub host: &'a Host,
    /// Memory of the machine.
    pub memory: MachineMemory,
    /// Open files by cgroup path.
    pub files: &'a Counts,
    /// Mounted file systems.
    pub mounted: &'a [MountedFileSystem],
    /// Block devices by major and minor number.
    pub devices: &'a HashMap<(u32, u32), DiskCounters>,
    /// Image of the sandboxes by runtime handler.
    pub sandbox_images: &'a HashMap<String, String>,
    /// Whether an expected input could not be read.
    pub is_partial: bool,
}

/// One cgroup on the page.
struct CgroupEntry<'a> {
    metrics: MetricInputs<'a>,
    /// Whether it is the cgroup of an app container.
    is_container: bool,
    labels: Labels,
    /// Line ends with the timestamp of the reading, and of the page.
    ends: [Vec<u8>; 2],
}

/// Returns the page in text format.
pub fn write(inputs: &CadvisorInputs<'_>) -> Vec<u8> {
    let entries = entries(inputs);
    let mut out = Vec::with_capacity((16 << 10) + entries.len() * 20_000);
    version(&mut out, inputs.host);
    let mut is_partial = inputs.is_partial || inputs.snapshot.root.is_none();
    // `container_scrape_error` depends on the families before it: they may exceed their limit of series.
    let account = FAMILIES.partition_point(|family| family.name < "container_scrape_error");
    for (place, family) in FAMILIES.iter().enumerate() {
        if place == account {
            scrape_error(&mut out, "container", is_partial);
        }
        if family.source() == MetricSource::Pressure && !inputs.snapshot.has_pressure {
            continue;
        }
        let mut series = Series { out: &mut out, family, count: 0 };
        entries.iter().for_each(|entry| series.put_all(entry));
        is_partial |= series.count > MAX_SERIES;
    }
    machine(&mut out, inputs.host, inputs.memory);
    out
}

/// Returns all cgroups, sorted by container, ID, and the other labels.
fn entries<'a>(inputs: &CadvisorInputs<'a>) -> Vec<CgroupEntry<'a>> {
    let snapshot = inputs.snapshot;
    let mut entries = Vec::with_capacity(4 + snapshot.pods.len() * 4);
    if let Some(root) = &snapshot.root {
        let mut entry = entry(inputs, root, Names::default());
        entry.metrics.links = links(snapshot.network.as_ref());
        entry.metrics.mounted = inputs.mounted;
        entries.push(entry);
    }
    let is_above = |seen: &CgroupObservation| snapshot.parent_cgroups.iter().any(|above| above.path == seen.path);
    let system = snapshot.system.iter().map(|(_, seen)| seen).filter(|seen| !is_above(seen));
    entries.extend(snapshot.parent_cgroups.iter().chain(system).map(|seen| entry(inputs, seen, Names::default())));
    for pod in &snapshot.pods {
        of_pod(inputs, pod, &mut entries);
    }
    entries.sort_by(|a, b| a.labels.cmp(&b.labels));
    entries.dedup_by(|a, b| a.labels == b.labels);
    entries
}

fn of_pod<'a>(inputs: &CadvisorInputs<'a>, seen: &'a PodUsage, entries: &mut Vec<CgroupEntry<'a>>) {
    let pod = Names { namespace: &seen.pod.id.namespace, pod: &seen.pod.id.name, ..Names::default() };
    entries.extend(seen.group.as_ref().map(|group| entry(inputs, group, pod)));
    if let Some(sandbox) = &seen.sandbox {
        let image = inputs.sandbox_images.get(&seen.pod.handler).map(String::as_str).unwrap_or_default();
        let mut entry = entry(inputs, sandbox, Names { image, name: seen.pod.sandbox.as_str(), ..pod });
        entry.metrics.links = links(seen.network.as_ref());
        entry.metrics.started_at = seen.pod.started_at.as_second();
        entries.push(entry);
    }
    for (shown, found) in seen.pod.containers.iter().zip(&seen.containers) {
        let Some(found) = found else { continue };
        let names = Names { container: &shown.name, image: &shown.image, name: shown.id.as_str(), ..pod };
        let mut entry = entry(inputs, found, names);
        entry.metrics.started_at = shown.started_at.as_second();
        entries.push(entry);
    }
    // The pod's cgroup carries the network counters of a pod whose sandbox has no cgroup.
    if seen.sandbox.is_none()
        && seen.network.is_some()
        && let Some(of_pod) = &seen.group
        && let Some(group) = entries.iter_mut().rev().find(|e| std::ptr::eq(e.metrics.reading, &of_pod.reading))
    {
        group.metrics.links = links(seen.network.as_ref());
    }
}

/// Interfaces of sandboxes and the root cgroup, and of a pod whose sandbox has no cgroup.
fn links(network: Option<&NetworkInterfaces>) -> &[LinkCounters] {
    network.map(|network| network.interfaces.as_slice()).unwrap_or_default()
}

fn entry<'a>(inputs: &CadvisorInputs<'a>, seen: &'a CgroupObservation, names: Names<'_>) -> CgroupEntry<'a> {
    let end = |millis: i64| {
        let mut end = vec![b' '];
        push_integer(&mut end, u64::try_from(millis).unwrap_or_default());
        end.push(b'\n');
        end
    };
    let now = inputs.now / 1_000_000_000;
    let metrics = MetricInputs {
        started_at: seen.reading.created_at,
        seen_at: u64::try_from(now).unwrap_or_default(),
        files: inputs.files.get(&seen.path).map(|counted| counted.files),
        device_names: seen.reading.devices.iter().map(|io| device_name(inputs, io.device)).collect(),
        ..MetricInputs::of(&seen.reading)
    };
    CgroupEntry {
        metrics,
        is_container: !names.container.is_empty(),
        labels: Labels::new(&seen.path, names),
        ends: [end(seen.reading.at / 1_000_000), end(now.saturating_mul(1000))],
    }
}

/// Device path such as `/dev/sda`; a device that is gone keeps its numbers, so that two devices never share a label.
fn device_name(inputs: &CadvisorInputs<'_>, (major, minor): (u32, u32)) -> String {
    match inputs.devices.get(&(major, minor)) {
        Some(known) => format!("/dev/{}", known.name),
        None => format!("{major}:{minor}"),
    }
}

/// Sink for the series of one family.
struct Series<'a> {
    out: &'a mut Vec<u8>,
    family: &'static Family,
    count: usize,
}

impl Series<'_> {
    /// Writes the series of a cgroup.
    fn put_all(&mut self, entry: &CgroupEntry<'_>) {
        if !(self.family.page_omits == PageOmission::Containers && entry.is_container) {
            self.family.write(&entry.metrics, &mut |labels, value| self.put(entry, labels, value));
        }
    }

    /// Writes one series; `labels` are the values of the family's own labels.
    fn put(&mut self, entry: &CgroupEntry<'_>, labels: &[&str], value: Value) {
        let Family { name, help, kind, .. } = self.family;
        if self.family.page_omits == PageOmission::Zeros && value == Value::Nanoseconds(0) {
            return;
        }
        self.count += 1;
        if self.count > MAX_SERIES {
            return;
        }
        if self.count == 1 {
            push_family(self.out, name, help, if *kind == MetricKind::Counter { "counter" } else { "gauge" });
        }
        self.out.extend_from_slice(name.as_bytes());
        entry.labels.write(self.out, self.family.labels(), labels);
        match value {
            Value::Count(number) => push_count(self.out, number),
            Value::Signed(number) => push_signed(self.out, number),
            Value::Nanoseconds(number) => push_scaled(self.out, number, 9),
            Value::Microseconds(number) => push_scaled(self.out, number, 6),
            Value::Milliseconds(number) => push_scaled(self.out, number, 3),
        }
        let [of_reading, of_page] = &entry.ends;
        self.out.extend_from_slice(match self.family.stamp {
            Stamp::Reading => of_reading,
            Stamp::Page => of_page,
            Stamp::None => b"\n",
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            cgroup_files::{DeviceIo, Pressure, PressureStats, Throttling},
            reading::{CpuShare, Depth, Pressures},
            testing as sample,
        },
        *,
    };

    /// Returns the page of the modified sample snapshot.
    pub fn page(change: impl Fn(&mut Snapshot)) -> String {
        let mut snapshot = sample::snapshot(Depth::Full);
        change(&mut snapshot);
        let host =
            Host { cpus: 4, cores: 2, sockets: 1, boot_id: "b".into(), machine_id: "m".into(), ..Host::default() };
        let disk = DiskCounters { name: "vda".to_owned(), reads: [1, 2, 3, 4500], ..DiskCounters::default() };
        let fs = MountedFileSystem {
            device: "/dev/vda1".to_owned(),
            capacity: 1000,
            used: 600,
            inodes: 20,
            inodes_free: 15,
            disk: Some(disk.clone()),
        };
        let files = OpenFiles { descriptors: 9, sockets: 2, soft_limit: Some(-1) };
        let out = write(&CadvisorInputs {
            snapshot: &snapshot,
            now: sample::AT + 5_000_000_000,
            host: &host,
            memory: MachineMemory { total: 8_000_000, available: 1, swap_total: 1, swap_free: 1 },
            files: &HashMap::from([("/kubepods/poduid-web/id-main".into(), OpenFileCount { files, used_ns: None })]),
            mounted: &[fs],
            devices: &HashMap::from([((259, 0), disk)]),
            sandbox_images: &HashMap::from([(String::new(), "pause:3".to_owned())]),
            is_partial: false,
        });
        String::from_utf8(out).expect("text")
    }

    fn of<'a>(page: &'a str, family: &str) -> Vec<&'a str> {
        let is = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with(['{', ' ']));
        page.lines().filter(is).collect()
    }

    const MAIN: &str = "container=\"main\",id=\"/kubepods/poduid-web/id-main\",image=\"registry/app:1\",name=\"id-main\",\
                        namespace=\"default\",pod=\"web\"";

    #[test]
    fn a_pod_is_its_group_its_sandbox_and_its_containers() {
        // AC-04b-M12
        let page = page(|_| {});
        let usage = of(&page, "container_memory_usage_bytes");
        let of_pod: Vec<&&str> = usage.iter().filter(|line| line.contains("pod=\"web\"")).collect();
        assert_eq!(of_pod.len(), 4, "{of_pod:#?}");
        assert!(
            usage.contains(&format!("container_memory_usage_bytes{{{MAIN}}} 500 1624396278302").as_str()),
            "{usage:#?}"
        );
        let pod = "container_memory_usage_bytes{container=\"\",id=\"/kubepods/poduid-web\",image=\"\",name=\"\",\
                   namespace=\"default\",pod=\"web\"} 1000 1624396278302";
        assert!(usage.contains(&pod), "{usage:#?}");
        let sandbox = "container_memory_usage_bytes{container=\"\",id=\"/kubepods/poduid-web/sandbox-web\",\
                       image=\"pause:3\",name=\"sandbox-web\",namespace=\"default\",pod=\"web\"} 10 1624396278302";
        assert!(usage.contains(&sandbox), "{usage:#?}");
        let network = of(&page, "container_network_receive_bytes_total");
        let expected = "container_network_receive_bytes_total{container=\"\",id=\"/kubepods/poduid-web/sandbox-web\",\
                        image=\"pause:3\",interface=\"eth0\",name=\"sandbox-web\",namespace=\"default\",pod=\"web\"} 0 \
                        1624396278302";
        assert_eq!(network.iter().filter(|line| line.contains("pod=\"web\"")).collect::<Vec<_>>(), [&expected]);
    }

    #[test]
    fn a_pod_without_a_sandbox_cgroup_has_the_network_series() {
        let page = page(|snapshot| snapshot.pods[0].sandbox = None);
        let network = of(&page, "container_network_receive_bytes_total");
        assert_eq!(network.iter().filter(|line| line.contains("id=\"/kubepods/poduid-web\"")).count(), 1);
    }

    #[test]
    fn pressure_only_where_the_kernel_reports_it() {
        // AC-04b-M13, AC-08-17
        assert!(!page(|_| {}).contains("container_pressure_"));
        let page = page(|snapshot| {
            snapshot.has_pressure = true;
            let line = |total| Pressure { total, ..Pressure::default() };
            let stalls = PressureStats { some: line(1_500_000), full: line(250_000) };
            let pressure = Pressures { memory: Some(stalls), ..Pressures::default() };
            if let Some(main) = &mut snapshot.pods[0].containers[0] {
                main.reading.pressure = pressure;
            }
        });
        let expected = format!("container_pressure_memory_waiting_seconds_total{{{MAIN}}} 1.5 1624396278302");
        assert_eq!(of(&page, "container_pressure_memory_waiting_seconds_total"), [expected]);
        let expected = format!("container_pressure_memory_stalled_seconds_total{{{MAIN}}} 0.25 1624396278302");
        assert_eq!(of(&page, "container_pressure_memory_stalled_seconds_total"), [expected]);
        assert!(of(&page, "container_pressure_cpu_waiting_seconds_total").is_empty());
    }

    #[test]
    fn quotas_only_where_one_is_set() {
        // AC-08-18
        let unlimited = page(|_| {});
        assert!(!unlimited.contains("container_cpu_cfs_") && !unlimited.contains("container_spec_cpu_quota"));
        let limited = page(|snapshot| {
            if let Some(main) = &mut snapshot.pods[0].containers[0] {
                main.reading.share = Some(CpuShare { shares: 512, quota: Some(50_000), period: 100_000 });
                let throttling = Throttling {
                    periods: 10,
                    throttled_periods: 3,
                    throttled_ns: 2_500_000_000,
                    ..Throttling::default()
                };
                main.reading.cpu = main.reading.cpu.map(|cpu| super::super::reading::Cpu { throttling, ..cpu });
            }
        });
        for (family, value) in [
            ("container_cpu_cfs_periods_total", "10 1624396278302"),
            ("container_cpu_cfs_throttled_periods_total", "3 1624396278302"),
            ("container_cpu_cfs_throttled_seconds_total", "2.5 1624396278302"),
            ("container_spec_cpu_quota", "50000"),
            ("container_spec_cpu_period", "100000"),
            ("container_spec_cpu_shares", "512"),
        ] {
            assert_eq!(of(&limited, family), [format!("{family}{{{MAIN}}} {value}")]);
        }
    }

    #[test]
    fn devices_stand_among_the_labels_by_name() {
        let page = page(|snapshot| {
            let pod = &mut snapshot.pods[0];
            for seen in pod.containers[0].iter_mut().chain(&mut pod.sandbox) {
                seen.reading.devices = vec![
                    DeviceIo { device: (259, 0), read_bytes: 4096, reads: 1, ..DeviceIo::default() },
                    DeviceIo { device: (7, 7), ..DeviceIo::default() },
                ];
            }
        });
        let rest = MAIN.split_once(",id").expect("an id").1;
        let expected = format!(
            "container_fs_reads_bytes_total{{container=\"main\",device=\"/dev/vda\",id{rest}}} 4096 1624396278302"
        );
        assert!(of(&page, "container_fs_reads_bytes_total").contains(&&*expected), "{expected}");
        let usage = of(&page, "container_blkio_device_usage_total");
        assert!(usage.iter().all(|line| line.contains("container=\"\"")), "{usage:#?}");
        assert!(
            usage[0].contains("device=\"/dev/vda\",id=")
                && usage[0].contains("image=\"pause:3\",major=\"259\",minor=\"0\",name=")
        );
        assert!(usage[0].contains("namespace=\"default\",operation=\"Read\",pod=\"web\"} 4096"), "{}", usage[0]);
        let root = of(&page, "container_fs_usage_bytes");
        assert_eq!(
            root,
            [
                "container_fs_usage_bytes{container=\"\",device=\"/dev/vda1\",id=\"/\",image=\"\",name=\"\",namespace=\"\",pod=\"\"} 600 1624396278302"
            ]
        );
        assert!(
            of(&page, "container_fs_read_seconds_total")
                .iter()
                .any(|line| line.contains("id=\"/\"") && line.contains("} 4.5 "))
        );
    }

    #[test]
    fn series_with_and_without_a_time() {
        let page = page(|_| {});
        let start = of(&page, "container_start_time_seconds");
        assert!(start.contains(&format!("container_start_time_seconds{{{MAIN}}} 1.62e+09").as_str()), "{start:#?}");
        assert!(of(&page, "container_last_seen").iter().all(|line| line.ends_with("} 1.624396283e+09 1624396283000")));
        assert!(of(&page, "container_health_state").iter().all(|line| line.contains("} -1 ")));
        assert!(of(&page, "container_spec_memory_limit_bytes").iter().all(|line| line.ends_with("} 0")));
        let limits = of(&page, "container_ulimits_soft");
        assert_eq!(limits, [format!("container_ulimits_soft{{{MAIN},ulimit=\"max_open_files\"}} -1 1624396278302")]);
        assert_eq!(
            of(&page, "machine_cpu_cores"),
            ["machine_cpu_cores{boot_id=\"b\",machine_id=\"m\",system_uuid=\"\"} 4"]
        );
        assert_eq!(
            of(&page, "machine_memory_bytes"),
            ["machine_memory_bytes{boot_id=\"b\",machine_id=\"m\",system_uuid=\"\"} 8e+06"]
        );
        assert_eq!(
            (of(&page, "container_scrape_error"), of(&page, "machine_scrape_error")),
            (vec!["container_scrape_error 0"], vec!["machine_scrape_error 0"])
        );
    }

    #[test]
    fn families_stand_by_name_and_no_series_twice() {
        let page = page(|_| {});
        let names: Vec<&str> = page.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        assert!(names.is_sorted(), "{names:#?}");
        let mut series: Vec<&str> =
            page.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.split_once("} ")).map(|l| l.0).collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all);
    }

    #[test]
    fn a_reading_without_a_root_is_an_error_on_the_page() {
        let page = page(|snapshot| snapshot.root = None);
        assert_eq!(of(&page, "container_scrape_error"), ["container_scrape_error 1"]);
    }
}
