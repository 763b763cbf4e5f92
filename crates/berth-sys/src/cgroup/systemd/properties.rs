//! Conversion of cgroup files and values to systemd unit properties. Pure.
//!
//! Input is the files of a cgroup (v1 or v2) and their values: the meaning of a file is defined in one place, whoever
//! decided its value. Implements spec 06a §7, 09a §9.3.

/// systemd rounds CPU quotas to multiples of this, in microseconds per second.
const STEP_US: i128 = 10_000;
/// The kernel's default CFS period, microseconds.
const PERIOD_US: u64 = 100_000;
/// Upper bound of CPU and memory node numbers.
const MOST_BITS: u32 = 8192;
/// Maximum `cpu.weight`.
const MOST_WEIGHT: u64 = 10_000;

/// A unit property in a D-Bus call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Property {
    /// systemd's property name.
    pub name: &'static str,
    /// Property value.
    pub value: PropertyValue,
}

/// A property value, by its D-Bus type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PropertyValue {
    /// `b`
    Flag(bool),
    /// `t`
    Number(u64),
    /// `s`
    Text(String),
    /// `as`
    Names(Vec<String>),
    /// `ay`
    Bytes(Vec<u8>),
    /// `au`
    Processes(Vec<u32>),
}

/// Major release of systemd; 0 for unknown, which counts as older than any.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Release(pub u32);

impl Release {
    /// Parses `252.39-1~deb12u2`, `v249`, `256~rc1`.
    pub fn parse(text: &str) -> Self {
        let digits: String = text.trim_start_matches('v').chars().take_while(char::is_ascii_digit).collect();
        Self(digits.parse().unwrap_or(0))
    }

    fn has_quota_period(self) -> bool {
        self.0 >= 242
    }

    fn has_processor_sets(self) -> bool {
        self.0 >= 244
    }

    fn has_idle_weight(self) -> bool {
        self.0 >= 252
    }
}

fn property(name: &'static str, value: PropertyValue) -> Property {
    Property { name, value }
}

/// Properties of a slice (pod or QoS class).
pub fn of_slice(name: &str, parent: &str, is_unified: bool) -> Vec<Property> {
    let mut all = vec![
        property("Description", PropertyValue::Text(format!("libcontainer container {name}"))),
        property("Wants", PropertyValue::Names(vec![parent.to_owned()])),
    ];
    all.extend(accounting(is_unified));
    all
}

/// Properties of a scope with `process` as its first process.
pub fn of_scope(name: &str, slice: &str, process: u32, is_unified: bool) -> Vec<Property> {
    let mut all = vec![
        property("Description", PropertyValue::Text(format!("libcontainer container {name}"))),
        property("Slice", PropertyValue::Text(slice.to_owned())),
        property("Delegate", PropertyValue::Flag(true)),
        property("PIDs", PropertyValue::Processes(vec![process])),
        property("CollectMode", PropertyValue::Text("inactive-or-failed".to_owned())),
    ];
    all.extend(accounting(is_unified));
    all
}

/// Accounting properties: they make systemd enable the controllers.
fn accounting(is_unified: bool) -> impl Iterator<Item = Property> {
    let io = if is_unified { "IOAccounting" } else { "BlockIOAccounting" };
    let on = ["MemoryAccounting", "CPUAccounting", io, "TasksAccounting"];
    let on = on.into_iter().map(|name| property(name, PropertyValue::Flag(true)));
    on.chain([property("DefaultDependencies", PropertyValue::Flag(false))])
}

/// Converts cgroup files and their values to properties, in order. Skips files that systemd does not know, and values
/// that are not numbers: those are written to the file only.
pub fn of_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>, release: Release) -> Vec<Property> {
    let mut all = Vec::new();
    let (mut quota, mut period) = (None, None);
    for (file, value) in files {
        match file {
            "cpu.max" => {
                let (first, second) = value.split_once(' ').unwrap_or((value, ""));
                (quota, period) = (signed(first), second.parse().ok().or(period));
            }
            "cpu.cfs_quota_us" => quota = signed(value),
            "cpu.cfs_period_us" => period = value.parse().ok(),
            _ => all.extend(of_file(file, value, release)),
        }
    }
    let period: Option<u64> = period.filter(|period| *period != 0);
    if let Some(period) = period.filter(|_| release.has_quota_period()) {
        all.push(property("CPUQuotaPeriodUSec", PropertyValue::Number(period)));
    }
    let per_second = quota.filter(|quota| *quota != 0).map(|quota| per_second(quota, period.unwrap_or(PERIOD_US)));
    all.extend(per_second.map(|quota| property("CPUQuotaPerSecUSec", PropertyValue::Number(quota))));
    all
}

fn of_file(file: &str, value: &str, release: Release) -> Option<Property> {
    let number = || amount(value).map(PropertyValue::Number);
    // systemd refuses 0 for these properties, which the kernel accepts.
    let above_zero = || amount(value).filter(|n| *n > 0).map(PropertyValue::Number);
    let mask = || mask(value).filter(|_| release.has_processor_sets()).map(PropertyValue::Bytes);
    let (name, value) = match file {
        "memory.max" => ("MemoryMax", above_zero()),
        "memory.high" => ("MemoryHigh", above_zero()),
        "memory.low" => ("MemoryLow", number()),
        "memory.min" => ("MemoryMin", number()),
        "memory.swap.max" => ("MemorySwapMax", number()),
        "memory.limit_in_bytes" => ("MemoryLimit", above_zero()),
        "pids.max" => ("TasksMax", amount(value).map(|n| PropertyValue::Number(n.max(1)))),
        "cpu.weight" => ("CPUWeight", weight(value)),
        "cpu.idle" if value == "1" && release.has_idle_weight() => ("CPUWeight", Some(PropertyValue::Number(0))),
        "cpu.shares" => ("CPUShares", amount(value).filter(|n| (2..=262_144).contains(n)).map(PropertyValue::Number)),
        "cpuset.cpus" => ("AllowedCPUs", mask()),
        "cpuset.mems" => ("AllowedMemoryNodes", mask()),
        _ => return None,
    };
    value.map(|value| property(name, value))
}

fn weight(value: &str) -> Option<PropertyValue> {
    amount(value).filter(|n| (1..=MOST_WEIGHT).contains(n)).map(PropertyValue::Number)
}

/// Parses a kernel number; unlimited is systemd's maximum.
fn amount(value: &str) -> Option<u64> {
    match signed(value)? {
        n if n < 0 => Some(u64::MAX),
        n => u64::try_from(n).ok(),
    }
}

fn signed(value: &str) -> Option<i64> {
    if value == "max" { Some(-1) } else { value.parse().ok() }
}

/// CPU microseconds per second, as systemd expects them; a negative quota means unlimited.
fn per_second(quota: i64, period_us: u64) -> u64 {
    if quota < 0 { u64::MAX } else { u64::try_from(stepped(quota, period_us)).unwrap_or(u64::MAX) }
}

fn stepped(quota: i64, period_us: u64) -> i128 {
    let per_second = i128::from(quota) * 1_000_000 / i128::from(period_us.max(1));
    (per_second + STEP_US - 1) / STEP_US * STEP_US
}

/// Rounds a quota as systemd does: up to 10 ms per second. Both the property and the value written to the file derive
/// from this, for pods and for containers.
pub fn rounded_quota(quota: i64, period_us: u64) -> i64 {
    if quota <= 0 || period_us == 0 {
        return quota;
    }
    i64::try_from(stepped(quota, period_us) * i128::from(period_us) / 1_000_000).unwrap_or(i64::MAX)
}

/// Converts a list like `0-3,8` to a bit mask, lowest bits first, without trailing zero bytes; `None` if malformed.
fn mask(list: &str) -> Option<Vec<u8>> {
    let mut bytes: Vec<u8> = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MOST_BITS {
            return None;
        }
        for bit in first..=last {
            let at = usize::try_from(bit / 8).ok()?;
            if bytes.len() <= at {
                bytes.resize(at + 1, 0);
            }
            *bytes.get_mut(at)? |= 1 << (bit % 8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NEW: Release = Release(252);

    /// `name=value` of each property.
    fn property_lines(files: &[(&str, &str)], release: Release) -> Vec<String> {
        let show = |p: &Property| match &p.value {
            PropertyValue::Number(u64::MAX) => format!("{}=infinity", p.name),
            PropertyValue::Number(n) => format!("{}={n}", p.name),
            PropertyValue::Bytes(bytes) => format!("{}={bytes:02x?}", p.name),
            other => format!("{}={other:?}", p.name),
        };
        of_files(files.iter().copied(), release).iter().map(show).collect()
    }

    #[test]
    fn files_of_the_unified_hierarchy() {
        for (file, value, expected) in [
            // AC-06a-2
            ("cpu.weight", "39", &["CPUWeight=39"][..]),
            ("cpu.max", "100000 100000", &["CPUQuotaPeriodUSec=100000", "CPUQuotaPerSecUSec=1000000"]),
            ("memory.max", "1073741824", &["MemoryMax=1073741824"]),
            // AC-06a-3
            ("cpu.max", "max 100000", &["CPUQuotaPeriodUSec=100000", "CPUQuotaPerSecUSec=infinity"]),
            ("memory.max", "max", &["MemoryMax=infinity"]),
            // AC-06a-6: 10 ms in a second is the least
            ("cpu.max", "1000 100000", &["CPUQuotaPeriodUSec=100000", "CPUQuotaPerSecUSec=10000"]),
            // AC-06a-7
            ("cpu.max", "41700 100000", &["CPUQuotaPeriodUSec=100000", "CPUQuotaPerSecUSec=420000"]),
            ("cpu.max", "50000", &["CPUQuotaPerSecUSec=500000"]),
            // AC-06a-9
            ("pids.max", "1024", &["TasksMax=1024"]),
            ("pids.max", "max", &["TasksMax=infinity"]),
            ("pids.max", "0", &["TasksMax=1"]),
            ("memory.low", "0", &["MemoryLow=0"]),
            ("memory.min", "7", &["MemoryMin=7"]),
            ("memory.high", "7", &["MemoryHigh=7"]),
            ("memory.high", "0", &[]),
            // AC-06a-19
            ("memory.swap.max", "134217728", &["MemorySwapMax=134217728"]),
            ("memory.swap.max", "0", &["MemorySwapMax=0"]),
            ("cpuset.cpus", "0-3,8", &["AllowedCPUs=[0f, 01]"]),
            ("cpuset.mems", "9", &["AllowedMemoryNodes=[00, 02]"]),
            ("cpuset.cpus", "3-1", &[]),
            ("cpuset.cpus", "0-4000000000", &[]),
            ("cpuset.cpus", "", &[]),
            ("cpu.idle", "1", &["CPUWeight=0"]),
            ("cpu.idle", "0", &[]),
            ("cpu.weight", "0", &[]),
            ("cpu.weight", "10001", &[]),
            // The kernel parses this, systemd does not.
            ("memory.max", "1G", &[]),
            // AC-06a-22: a file only
            ("memory.oom.group", "1", &[]),
            ("hugetlb.2MB.max", "4194304", &[]),
            ("io.weight", "100", &[]),
        ] {
            assert_eq!(property_lines(&[(file, value)], NEW), expected, "{file} {value}");
        }
    }

    #[test]
    fn files_of_the_old_hierarchies() {
        let all = [
            ("pids.max", "-1"),
            ("memory.limit_in_bytes", "-1"),
            ("cpu.shares", "1024"),
            ("cpu.cfs_period_us", "50000"),
            ("cpu.cfs_quota_us", "10100"),
        ];
        let expected = [
            "TasksMax=infinity",
            "MemoryLimit=infinity",
            "CPUShares=1024",
            "CPUQuotaPeriodUSec=50000",
            "CPUQuotaPerSecUSec=210000",
        ];
        assert_eq!(property_lines(&all, NEW), expected);
        // AC-06a-8
        let unlimited = ["CPUQuotaPeriodUSec=100000", "CPUQuotaPerSecUSec=infinity"];
        assert_eq!(property_lines(&[("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "-1")], NEW), unlimited);
    }

    #[test]
    fn older_releases_receive_only_supported_properties() {
        let files = [("cpu.max", "50000 100000"), ("cpuset.cpus", "0"), ("cpu.idle", "1")];
        assert_eq!(property_lines(&files, Release(251)).len(), 3);
        assert_eq!(property_lines(&files, Release(243)), ["CPUQuotaPeriodUSec=100000", "CPUQuotaPerSecUSec=500000"]);
        assert_eq!(property_lines(&files, Release(241)), ["CPUQuotaPerSecUSec=500000"]);
        for (text, release) in [("252.39-1~deb12u2", 252), ("v249", 249), ("257~rc1", 257), ("", 0), ("x", 0)] {
            assert_eq!(Release::parse(text), Release(release), "{text}");
        }
    }

    #[test]
    fn units_declare_their_slice_and_accounting() {
        let slice = of_slice("kubepods-burstable.slice", "kubepods.slice", true);
        let has =
            |all: &[Property], name, value: &PropertyValue| all.iter().any(|p| p.name == name && p.value == *value);
        assert!(has(&slice, "Wants", &PropertyValue::Names(vec!["kubepods.slice".to_owned()])));
        let text = "libcontainer container kubepods-burstable.slice".to_owned();
        assert!(has(&slice, "Description", &PropertyValue::Text(text)));
        for name in ["MemoryAccounting", "CPUAccounting", "IOAccounting", "TasksAccounting"] {
            assert!(has(&slice, name, &PropertyValue::Flag(true)), "{name}");
        }
        assert!(has(&slice, "DefaultDependencies", &PropertyValue::Flag(false)));
        assert!(!slice.iter().any(|p| p.name == "Delegate"), "a slice cannot be delegated");
        let scope = of_scope("berth-1.scope", "kubepods.slice", 7, false);
        assert!(has(&scope, "Slice", &PropertyValue::Text("kubepods.slice".to_owned())));
        assert!(has(&scope, "PIDs", &PropertyValue::Processes(vec![7])));
        assert!(has(&scope, "Delegate", &PropertyValue::Flag(true)));
        assert!(has(&scope, "CollectMode", &PropertyValue::Text("inactive-or-failed".to_owned())));
        assert!(has(&scope, "BlockIOAccounting", &PropertyValue::Flag(true)));
    }

    #[test]
    fn quotas_are_rounded_up() {
        // AC-06a-7
        for (quota, period, expected) in
            [(41_700, 100_000, 42_000), (42_000, 100_000, 42_000), (-1, 100_000, -1), (0, 100_000, 0), (5, 0, 5)]
        {
            assert_eq!(rounded_quota(quota, period), expected, "{quota} {period}");
        }
    }

    proptest! {
        #[test]
        fn the_systemd_quota_matches_the_cgroup_file(quota in 1_000_i64..1_000_000_000, period in 1000_u64..=1_000_000) {
            let rounded = rounded_quota(quota, period);
            // The conversion to the file's microseconds per period truncates less than one microsecond.
            prop_assert!(rounded + 1 >= quota);
            prop_assert_eq!(per_second(rounded, period) % 10_000, 0);
            prop_assert!(per_second(rounded, period) <= per_second(quota, period));
        }
    }
}
