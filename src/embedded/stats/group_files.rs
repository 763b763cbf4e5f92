//! What stands in files of control groups. Pure.
//!
//! A line that is not understood is left out and a number that does not fit is absent: the kernel adds lines and keys with
//! every release. Behaviour: spec 04b §7.2.

use super::reading::{Device, Held, Pressure, Stalls};

/// Nanoseconds in a tick of `cpuacct.stat`; the kernel shows user space 100 ticks a second.
const TICK_NS: u64 = 10_000_000;
/// Devices of a group that are told.
const MAX_DEVICES: usize = 256;

/// The number a file holds; `max` is [`u64::MAX`], a negative one is absent.
pub fn number(text: &str) -> Option<u64> {
    match text.trim() {
        "max" => Some(u64::MAX),
        digits => digits.parse().ok(),
    }
}

/// The value behind a key, as in `memory.stat`; 0 where there is none.
pub fn value(text: &str, key: &str) -> u64 {
    pairs(text).find_map(|(name, value)| (name == key).then_some(value)).unwrap_or_default()
}

/// Likewise, `None` where there is none.
pub fn known_value(text: &str, key: &str) -> Option<u64> {
    pairs(text).find_map(|(name, value)| (name == key).then_some(value))
}

fn pairs(text: &str) -> impl Iterator<Item = (&str, u64)> {
    text.lines().filter_map(|line| {
        let (key, value) = line.split_once(' ')?;
        Some((key, value.trim().parse().ok()?))
    })
}

/// Processor time of `cpu.stat`: all, in user mode, in the kernel, in nanoseconds; `None` where it tells no usage.
pub fn cpu_times(text: &str) -> Option<(u64, u64, u64)> {
    let ns = |key: &str| known_value(text, key).map(|us| us.saturating_mul(1000));
    Some((ns("usage_usec")?, ns("user_usec").unwrap_or_default(), ns("system_usec").unwrap_or_default()))
}

/// `cpuacct.stat`: in user mode and in the kernel, in nanoseconds.
pub fn ticks(text: &str) -> (u64, u64) {
    (value(text, "user").saturating_mul(TICK_NS), value(text, "system").saturating_mul(TICK_NS))
}

/// How often `cpu.stat` of either hierarchy says the group was held back.
pub fn held(text: &str) -> Held {
    let ns = known_value(text, "throttled_usec").map(|us| us.saturating_mul(1000));
    Held {
        periods: value(text, "nr_periods"),
        throttled_periods: value(text, "nr_throttled"),
        throttled_ns: ns.unwrap_or_else(|| value(text, "throttled_time")),
    }
}

/// Quota and period of `cpu.max`, microseconds; no quota where it says `max`.
pub fn cpu_max(text: &str) -> Option<(Option<u64>, u64)> {
    let (quota, period) = text.trim().split_once(' ')?;
    Some((quota.parse().ok(), period.trim().parse().ok()?))
}

/// `cpu.weight` as shares, as the reference converts it back.
pub fn shares_of_weight(weight: u64) -> u64 {
    2 + (weight.clamp(1, 10_000) - 1) * 262_142 / 9999
}

/// A pressure file; `None` where there is no line of some.
pub fn stalls(text: &str) -> Option<Stalls> {
    let line = |kind: &str| text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' ')).map(pressure);
    Some(Stalls { some: line("some")?, full: line("full").unwrap_or_default() })
}

fn pressure(line: &str) -> Pressure {
    let mut told = Pressure::default();
    for (key, value) in line.split(' ').filter_map(|pair| pair.split_once('=')) {
        let share = || value.parse().ok().filter(|share: &f64| share.is_finite()).unwrap_or_default();
        match key {
            "total" => told.total_us = value.trim().parse().unwrap_or_default(),
            "avg10" => told.avg10 = share(),
            "avg60" => told.avg60 = share(),
            "avg300" => told.avg300 = share(),
            _ => {}
        }
    }
    told
}

/// `io.stat`: a line per device.
pub fn devices(text: &str) -> Vec<Device> {
    text.lines().filter_map(device).take(MAX_DEVICES).collect()
}

fn device(line: &str) -> Option<Device> {
    let (numbers, values) = line.split_once(' ')?;
    let (major, minor) = numbers.split_once(':')?;
    let mut device = Device { major: major.parse().ok()?, minor: minor.parse().ok()?, ..Device::default() };
    for (key, value) in values.split(' ').filter_map(|pair| pair.split_once('=')) {
        let value = value.trim().parse().unwrap_or_default();
        match key {
            "rbytes" => device.read_bytes = value,
            "wbytes" => device.written_bytes = value,
            "rios" => device.reads = value,
            "wios" => device.writes = value,
            _ => {}
        }
    }
    Some(device)
}

/// The process ids of `cgroup.procs`.
pub fn processes(text: &str) -> Vec<u32> {
    text.lines().filter_map(|line| line.trim().parse().ok()).filter(|pid| *pid != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_limits_and_nonsense() {
        for (text, expected) in [
            ("123\n", Some(123)),
            ("max\n", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("-1", None),
            ("", None),
            ("1 2", None),
        ] {
            assert_eq!(number(text), expected, "{text:?}");
        }
        assert_eq!(cpu_max("max 100000\n"), Some((None, 100_000)));
        assert_eq!(cpu_max("20000 100000\n"), Some((Some(20_000), 100_000)));
        assert_eq!((shares_of_weight(1), shares_of_weight(10_000), shares_of_weight(0)), (2, 262_144, 2));
        assert_eq!(processes("12\n0\nx\n7\n"), [12, 7]);
    }

    #[test]
    fn both_hierarchies_are_read() {
        let new = "usage_usec 7\nuser_usec 4\nsystem_usec 3\nnr_periods 10\nnr_throttled 3\nthrottled_usec 2\n";
        assert_eq!(cpu_times(new), Some((7000, 4000, 3000)));
        let expected = Held { periods: 10, throttled_periods: 3, throttled_ns: 2000 };
        assert_eq!(held(new), expected);
        assert_eq!(held("nr_periods 10\nnr_throttled 3\nthrottled_time 2000\n"), expected);
        assert_eq!(cpu_times("user_usec 4\n"), None);
        assert_eq!(ticks("user 150\nsystem 7\n"), (1_500_000_000, 70_000_000));
        assert_eq!(value("anon 5\ninactive_file 6\n", "inactive_file"), 6);
        assert_eq!(known_value("oom_kill_disable 0\nunder_oom 0\n", "oom_kill"), None);
    }

    #[test]
    fn pressure_and_devices() {
        let text = "some avg10=0.22 avg60=0.17 avg300=1.11 total=58761459\nfull avg10=0.5 avg60=nan avg300=x total=9\n";
        let told = stalls(text).expect("some");
        assert_eq!(told.some, Pressure { total_us: 58_761_459, avg10: 0.22, avg60: 0.17, avg300: 1.11 });
        assert_eq!(told.full, Pressure { total_us: 9, avg10: 0.5, avg60: 0.0, avg300: 0.0 });
        assert_eq!((stalls("some\n"), stalls("full avg10=1\n")), (None, None));
        let text = "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6\nbroken\n259:1\n8:16 rbytes=x\n";
        let first = Device { major: 8, minor: 0, read_bytes: 1, written_bytes: 2, reads: 3, writes: 4 };
        assert_eq!(devices(text), [first, Device { major: 8, minor: 16, ..Device::default() }]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_to_an_end(text in "[ -~\n]{0,200}") {
            let _ = (stalls(&text), devices(&text), cpu_times(&text), held(&text), processes(&text), cpu_max(&text));
            let _ = shares_of_weight(number(&text).unwrap_or_default());
        }
    }
}
