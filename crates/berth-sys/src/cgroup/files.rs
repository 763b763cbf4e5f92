//! Parsers of cgroup interface files, v1 and v2: CPU, memory, IO, pressure. Pure.
//!
//! Input is the file's bytes, output is numbers. An unknown line is skipped and a number that does not fit is absent:
//! the kernel adds lines and keys with every release. Implements spec 04b §7.2, 06a §6.

/// A limit above this means unlimited: the kernel writes `max` or a number close to 2^63.
pub const UNLIMITED: u64 = 1 << 62;

/// Nanoseconds per tick of `cpuacct.stat`; USER_HZ is 100.
const TICK_NS: u64 = 10_000_000;

/// Parses a single number; `max` is [`u64::MAX`], a negative number is `None`.
pub fn number(text: &[u8]) -> Option<u64> {
    match text.trim_ascii() {
        b"max" => Some(u64::MAX),
        digits => parse(digits),
    }
}

/// Parses a single number that may be negative (`cpu.cfs_quota_us`).
pub fn signed(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

fn parse(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |sum, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        sum.checked_mul(10)?.checked_add(digit)
    })
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n')
}

/// Splits into key and value at the first `separator`.
fn split(text: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|byte| *byte == separator)?;
    Some((text.get(..at)?, text.get(at.checked_add(1)?..)?))
}

/// Iterates over lines of the form `key number`.
fn pairs(text: &[u8]) -> impl Iterator<Item = (&[u8], u64)> {
    lines(text).filter_map(|line| {
        let (key, value) = split(line, b' ')?;
        Some((key, parse(value.trim_ascii())?))
    })
}

/// CFS bandwidth statistics of a cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Throttling {
    /// Elapsed enforcement periods.
    pub periods: u64,
    /// Periods in which the cgroup was throttled.
    pub throttled_periods: u64,
    /// Total throttled time, nanoseconds.
    pub throttled_ns: u64,
    /// Periods in which the cgroup used accumulated burst quota.
    pub burst_periods: u64,
    /// Total burst time, nanoseconds.
    pub burst_ns: u64,
}

/// CPU time, nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuTimes {
    /// Total CPU time.
    pub usage_ns: u64,
    /// CPU time in user mode.
    pub user_ns: u64,
    /// CPU time in kernel mode.
    pub system_ns: u64,
}

/// Parses `cpu.stat` of cgroup v2; `None` without `usage_usec`.
pub fn cpu_stat(text: &[u8]) -> Option<(CpuTimes, Throttling)> {
    let (mut times, mut throttling, mut known) = (CpuTimes::default(), Throttling::default(), false);
    for (key, value) in pairs(text) {
        let ns = value.saturating_mul(1000);
        match key {
            b"usage_usec" => (times.usage_ns, known) = (ns, true),
            b"user_usec" => times.user_ns = ns,
            b"system_usec" => times.system_ns = ns,
            b"nr_periods" => throttling.periods = value,
            b"nr_throttled" => throttling.throttled_periods = value,
            b"throttled_usec" => throttling.throttled_ns = ns,
            b"nr_bursts" => throttling.burst_periods = value,
            b"burst_usec" => throttling.burst_ns = ns,
            _ => {}
        }
    }
    known.then_some((times, throttling))
}

/// Parses `cpu.stat` of cgroup v1.
pub fn cpu_stat_v1(text: &[u8]) -> Throttling {
    let mut throttling = Throttling::default();
    for (key, value) in pairs(text) {
        match key {
            b"nr_periods" => throttling.periods = value,
            b"nr_throttled" => throttling.throttled_periods = value,
            b"throttled_time" => throttling.throttled_ns = value,
            b"nr_bursts" => throttling.burst_periods = value,
            b"burst_time" => throttling.burst_ns = value,
            _ => {}
        }
    }
    throttling
}

/// Parses `cpuacct.stat`: user and system time in nanoseconds.
pub fn cpuacct_stat(text: &[u8]) -> (u64, u64) {
    let (mut user, mut system) = (0, 0);
    for (key, ticks) in pairs(text) {
        match key {
            b"user" => user = ticks.saturating_mul(TICK_NS),
            b"system" => system = ticks.saturating_mul(TICK_NS),
            _ => {}
        }
    }
    (user, system)
}

/// The fields of `memory.stat` in use; bytes, and fault counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryStat {
    /// Anonymous memory: `anon`, `total_rss`.
    pub anon: u64,
    /// Page cache: `file`, `total_cache`.
    pub file: u64,
    /// Memory-mapped part of the page cache.
    pub mapped_file: u64,
    /// Swap usage; reported here by cgroup v1 only.
    pub swap: u64,
    /// Page cache on the active LRU list.
    pub active_file: u64,
    /// Page cache on the inactive LRU list.
    pub inactive_file: u64,
    /// Page faults, minor and major.
    pub pgfault: u64,
    /// Major page faults.
    pub pgmajfault: u64,
    /// Page faults of the cgroup and its descendants.
    pub total_pgfault: u64,
    /// Major page faults of the cgroup and its descendants.
    pub total_pgmajfault: u64,
    /// Kernel memory; reported here by cgroup v2 only.
    pub kernel: u64,
}

/// Parses `memory.stat` of cgroup v2.
pub fn memory_stat(text: &[u8]) -> MemoryStat {
    let mut stat = MemoryStat::default();
    for (key, value) in pairs(text) {
        match key {
            b"anon" => stat.anon = value,
            b"file" => stat.file = value,
            b"kernel" => stat.kernel = value,
            b"file_mapped" => stat.mapped_file = value,
            b"active_file" => stat.active_file = value,
            b"inactive_file" => stat.inactive_file = value,
            b"pgfault" => (stat.pgfault, stat.total_pgfault) = (value, value),
            b"pgmajfault" => (stat.pgmajfault, stat.total_pgmajfault) = (value, value),
            _ => {}
        }
    }
    stat
}

/// Parses `memory.stat` of cgroup v1: hierarchical sums, except for `pgfault` and `pgmajfault`, which are the cgroup's
/// own.
pub fn memory_stat_v1(text: &[u8]) -> MemoryStat {
    let mut stat = MemoryStat::default();
    for (key, value) in pairs(text) {
        match key {
            b"total_rss" => stat.anon = value,
            b"total_cache" => stat.file = value,
            b"total_mapped_file" => stat.mapped_file = value,
            b"total_swap" => stat.swap = value,
            b"total_active_file" => stat.active_file = value,
            b"total_inactive_file" => stat.inactive_file = value,
            b"pgfault" => stat.pgfault = value,
            b"pgmajfault" => stat.pgmajfault = value,
            b"total_pgfault" => stat.total_pgfault = value,
            b"total_pgmajfault" => stat.total_pgmajfault = value,
            _ => {}
        }
    }
    stat
}

/// Parses `oom_kill` of `memory.events` or `memory.oom_control`.
pub fn oom_kills(text: &[u8]) -> Option<u64> {
    value(text, b"oom_kill")
}

/// Value of a key, as in `memory.stat`; `None` if the key is missing.
pub fn value(text: &[u8], wanted: &[u8]) -> Option<u64> {
    pairs(text).find_map(|(key, value)| (key == wanted).then_some(value))
}

/// Parses quota and period of `cpu.max` in microseconds; the quota `max` is `None`.
pub fn cpu_max(text: &[u8]) -> Option<(Option<u64>, u64)> {
    let (quota, period) = split(text.trim_ascii(), b' ')?;
    Some((parse(quota), parse(period)?))
}

/// Converts `cpu.weight` to CPU shares, as the kubelet converts it back (spec 06a §4).
pub fn shares_of_weight(weight: u64) -> u64 {
    let above = weight.clamp(1, 10_000) - 1;
    2 + above * 262_142 / 9999
}

/// One line of a PSI file.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pressure {
    /// Total stall time, microseconds.
    pub total: u64,
    /// Stall share of the last 10 s, percent.
    pub avg10: f64,
    /// Stall share of the last 60 s, percent.
    pub avg60: f64,
    /// Stall share of the last 300 s, percent.
    pub avg300: f64,
}

/// Content of a PSI file.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PressureStats {
    /// Time in which some tasks stalled.
    pub some: Pressure,
    /// Time in which all tasks stalled.
    pub full: Pressure,
}

/// Parses `cpu.pressure`, `memory.pressure`, or `io.pressure`; `None` without a `some` line.
pub fn pressure(text: &[u8]) -> Option<PressureStats> {
    let mut stalls = PressureStats::default();
    let mut known = false;
    for line in lines(text) {
        let Some((kind, values)) = split(line, b' ') else { continue };
        match kind {
            b"some" => (stalls.some, known) = (pressure_line(values), true),
            b"full" => stalls.full = pressure_line(values),
            _ => {}
        }
    }
    known.then_some(stalls)
}

fn pressure_line(values: &[u8]) -> Pressure {
    let mut line = Pressure::default();
    for (key, value) in values.split(|b| *b == b' ').filter_map(|pair| split(pair, b'=')) {
        let share = || std::str::from_utf8(value).ok().and_then(|v| v.parse().ok()).filter(|v: &f64| v.is_finite());
        match key {
            b"total" => line.total = parse(value.trim_ascii()).unwrap_or_default(),
            b"avg10" => line.avg10 = share().unwrap_or_default(),
            b"avg60" => line.avg60 = share().unwrap_or_default(),
            b"avg300" => line.avg300 = share().unwrap_or_default(),
            _ => {}
        }
    }
    line
}

/// IO statistics of one block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceIo {
    /// Major and minor number.
    pub device: (u32, u32),
    /// Cumulative bytes read: `rbytes` of `io.stat`, or `Read` of cgroup v1.
    pub read_bytes: u64,
    /// Cumulative bytes written: `wbytes` of `io.stat`, or `Write` of cgroup v1.
    pub written_bytes: u64,
    /// Read operations.
    pub reads: u64,
    /// Write operations.
    pub writes: u64,
    /// Statistics of the IO cost controller, if it is enabled.
    pub cost: Option<IoCost>,
}

/// Statistics of the IO cost controller, microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IoCost {
    /// `cost.usage`.
    pub usage: u64,
    /// `cost.wait`.
    pub wait: u64,
    /// `cost.indebt`.
    pub indebt: u64,
    /// `cost.indelay`.
    pub indelay: u64,
}

/// Maximum number of devices stored per cgroup; a machine has fewer.
const MAX_DEVICES: usize = 256;

/// Parses `io.stat`: one line per device.
pub fn io_stat(text: &[u8]) -> Vec<DeviceIo> {
    lines(text).filter_map(io_line).take(MAX_DEVICES).collect()
}

fn io_line(line: &[u8]) -> Option<DeviceIo> {
    let (device, values) = split(line, b' ')?;
    let mut io = DeviceIo { device: numbers(device)?, ..DeviceIo::default() };
    for (key, value) in values.split(|b| *b == b' ').filter_map(|pair| split(pair, b'=')) {
        let Some(value) = parse(value.trim_ascii()) else { continue };
        match key {
            b"rbytes" => io.read_bytes = value,
            b"wbytes" => io.written_bytes = value,
            b"rios" => io.reads = value,
            b"wios" => io.writes = value,
            b"cost.usage" => io.cost.get_or_insert_default().usage = value,
            b"cost.wait" => io.cost.get_or_insert_default().wait = value,
            b"cost.indebt" => io.cost.get_or_insert_default().indebt = value,
            b"cost.indelay" => io.cost.get_or_insert_default().indelay = value,
            _ => {}
        }
    }
    Some(io)
}

fn numbers(device: &[u8]) -> Option<(u32, u32)> {
    let (major, minor) = split(device, b':')?;
    Some((u32::try_from(parse(major)?).ok()?, u32::try_from(parse(minor)?).ok()?))
}

/// Parses `blkio.throttle.io_service_bytes_recursive` and `blkio.throttle.io_serviced_recursive`: bytes and counts.
pub fn blkio(bytes: &[u8], counts: &[u8]) -> Vec<DeviceIo> {
    let mut devices: Vec<DeviceIo> = Vec::new();
    let mut add = |text: &[u8], set: fn(&mut DeviceIo, &[u8], u64)| {
        for (device, operation, value) in lines(text).filter_map(blkio_line) {
            let known = devices.iter().position(|io| io.device == device);
            let at = known.unwrap_or(devices.len());
            if known.is_none() && at < MAX_DEVICES {
                devices.push(DeviceIo { device, ..DeviceIo::default() });
            }
            if let Some(io) = devices.get_mut(at) {
                set(io, operation, value);
            }
        }
    };
    add(bytes, |io, operation, value| match operation {
        b"Read" => io.read_bytes = value,
        b"Write" => io.written_bytes = value,
        _ => {}
    });
    add(counts, |io, operation, value| match operation {
        b"Read" => io.reads = value,
        b"Write" => io.writes = value,
        _ => {}
    });
    devices
}

fn blkio_line(line: &[u8]) -> Option<((u32, u32), &[u8], u64)> {
    let (device, rest) = split(line, b' ')?;
    let (operation, value) = split(rest, b' ')?;
    Some((numbers(device)?, operation, parse(value.trim_ascii())?))
}

/// Parses the process ids in `cgroup.procs`; skips 0.
pub fn processes(text: &[u8]) -> impl Iterator<Item = u32> + '_ {
    lines(text).filter_map(|line| u32::try_from(parse(line.trim_ascii())?).ok()).filter(|pid| *pid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_limits_and_nonsense() {
        for (text, expected) in [
            ("123\n", Some(123)),
            ("max\n", Some(u64::MAX)),
            ("0", Some(0)),
            ("18446744073709551615\n", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("-1", None),
            ("", None),
            ("1 2", None),
            ("1x", None),
        ] {
            assert_eq!(number(text.as_bytes()), expected, "{text:?}");
        }
        assert_eq!((signed(b"-1\n"), signed(b"50000"), signed(b"max")), (Some(-1), Some(50_000), None));
    }

    #[test]
    fn processor_time_of_both_hierarchies() {
        let text = b"usage_usec 68172016\nuser_usec 5\nsystem_usec 7\ncore_sched.force_idle_usec 0\nnr_periods 10\n\
                     nr_throttled 3\nthrottled_usec 2000\nnr_bursts 1\nburst_usec 4\n";
        let (times, throttling) = cpu_stat(text).expect("usage is there");
        assert_eq!(times, CpuTimes { usage_ns: 68_172_016_000, user_ns: 5000, system_ns: 7000 });
        let expected =
            Throttling { periods: 10, throttled_periods: 3, throttled_ns: 2_000_000, burst_periods: 1, burst_ns: 4000 };
        assert_eq!(throttling, expected);
        assert_eq!(cpu_stat(b"user_usec 1\n"), None);
        let old = b"nr_periods 10\nnr_throttled 3\nthrottled_time 2000000\nnr_bursts 1\nburst_time 4000\nwait_sum 9\n";
        assert_eq!(cpu_stat_v1(old), expected);
        assert_eq!(cpuacct_stat(b"user 150\nsystem 7\n"), (1_500_000_000, 70_000_000));
    }

    #[test]
    fn memory_of_both_hierarchies() {
        let unified =
            b"anon 1\nfile 2\nkernel 3\nfile_mapped 4\nactive_file 5\ninactive_file 6\npgfault 7\npgmajfault 8\n";
        let expected = MemoryStat {
            anon: 1,
            file: 2,
            mapped_file: 4,
            swap: 0,
            active_file: 5,
            inactive_file: 6,
            pgfault: 7,
            pgmajfault: 8,
            total_pgfault: 7,
            total_pgmajfault: 8,
            kernel: 3,
        };
        assert_eq!(memory_stat(unified), expected);
        let old = b"cache 99\nrss 99\npgfault 7\npgmajfault 8\ntotal_cache 2\ntotal_rss 1\ntotal_mapped_file 4\n\
                    total_swap 9\ntotal_pgfault 99\ntotal_active_file 5\ntotal_inactive_file 6\n";
        assert_eq!(
            memory_stat_v1(old),
            MemoryStat { swap: 9, total_pgfault: 99, total_pgmajfault: 0, kernel: 0, ..expected }
        );
        assert_eq!(oom_kills(b"low 0\nhigh 0\nmax 1\noom 2\noom_kill 3\noom_group_kill 0\n"), Some(3));
        assert_eq!(oom_kills(b"oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"), Some(4));
        assert_eq!(oom_kills(b"oom_kill_disable 0\nunder_oom 0\n"), None);
    }

    #[test]
    fn quota_and_weight() {
        assert_eq!(cpu_max(b"max 100000\n"), Some((None, 100_000)));
        assert_eq!(cpu_max(b"42000 100000\n"), Some((Some(42_000), 100_000)));
        assert_eq!(cpu_max(b"42000"), None);
        for (weight, shares) in [(1, 2), (2, 28), (4, 80), (245, 6398), (10_000, 262_144), (0, 2), (u64::MAX, 262_144)]
        {
            assert_eq!(shares_of_weight(weight), shares, "{weight}");
        }
    }

    #[test]
    fn pressure_files() {
        let text =
            b"some avg10=1.53 avg60=0.87 avg300=0.10 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.02 total=42\n";
        let stalls = pressure(text).expect("known");
        assert_eq!(stalls.some, Pressure { total: 123_456, avg10: 1.53, avg60: 0.87, avg300: 0.1 });
        assert_eq!(stalls.full, Pressure { total: 42, avg10: 0.0, avg60: 0.0, avg300: 0.02 });
        // Kernels before 5.13 report no full line for the CPU.
        assert_eq!(pressure(b"some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n").map(|s| s.full.total), Some(0));
        assert_eq!(pressure(b""), None);
        assert_eq!(pressure(b"some avg10=inf avg60=NaN avg300=x total=-1").map(|s| s.some), Some(Pressure::default()));
    }

    #[test]
    fn devices_of_both_hierarchies() {
        let unified = b"259:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n8:0 \nx:1 rbytes=1\n\
                        8:16 rbytes=1 cost.usage=5 cost.wait=6 cost.indebt=7 cost.indelay=8\n";
        let first =
            DeviceIo { device: (259, 0), read_bytes: 4096, written_bytes: 8192, reads: 1, writes: 2, cost: None };
        let found = io_stat(unified);
        assert_eq!(found.first(), Some(&first));
        assert_eq!(found.get(1), Some(&DeviceIo { device: (8, 0), ..DeviceIo::default() }));
        let cost = IoCost { usage: 5, wait: 6, indebt: 7, indelay: 8 };
        assert_eq!(found.get(2).and_then(|io| io.cost), Some(cost));
        let bytes = b"259:0 Read 4096\n259:0 Write 8192\n259:0 Sync 1\n259:0 Total 12288\nTotal 12288\n";
        assert_eq!(blkio(bytes, b"259:0 Read 1\n259:0 Write 2\nTotal 3\n"), [first]);
        assert_eq!(blkio(b"Total 0\n", b""), []);
    }

    #[test]
    fn members() {
        assert_eq!(processes(b"1\n77\n\n0\nx\n99999999999\n").collect::<Vec<_>>(), [1, 77]);
    }
}
