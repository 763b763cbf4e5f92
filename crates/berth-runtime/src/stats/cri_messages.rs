//! Converts cgroup readings to CRI statistics messages. Pure.
//! Implements spec 09a §5.

use super::{Pressure, PressureStats, layer_usage::LayerUsage, reading::Reading};
use berth_proto::cri;

/// A pod's default interface.
const POD_LINK: &str = "eth0";
/// The loopback interface, which statistics omit.
const LOOPBACK: &str = "lo";

/// Counters of a network interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Interface name.
    pub name: String,
    /// Received bytes and errors.
    pub received: (u64, u64),
    /// Sent bytes and errors.
    pub sent: (u64, u64),
}

/// A container's statistics, without attributes and writable layer.
pub fn container(reading: &Reading, rate: Option<u64>) -> cri::ContainerStats {
    cri::ContainerStats {
        cpu: cpu(reading, rate),
        memory: memory(reading),
        swap: swap(reading),
        io: io(reading),
        ..cri::ContainerStats::default()
    }
}

/// CPU usage; `rate` is in nanocores.
pub fn cpu(reading: &Reading, rate: Option<u64>) -> Option<cri::CpuUsage> {
    reading.cpu.map(|cpu| cri::CpuUsage {
        timestamp: reading.at_ns,
        usage_core_nano_seconds: value(cpu.usage_ns),
        usage_nano_cores: rate.and_then(value),
        psi: reading.cpu_stalls.map(stalls),
    })
}

/// Memory usage.
pub fn memory(reading: &Reading) -> Option<cri::MemoryUsage> {
    reading.memory.map(|memory| cri::MemoryUsage {
        timestamp: reading.at_ns,
        working_set_bytes: value(memory.working_set()),
        available_bytes: memory.available().and_then(value),
        usage_bytes: value(memory.usage),
        rss_bytes: value(memory.anon),
        page_faults: value(memory.faults),
        major_page_faults: value(memory.major_faults),
        psi: reading.memory_stalls.map(stalls),
    })
}

/// I/O pressure; `None` where the kernel reports no PSI.
pub fn io(reading: &Reading) -> Option<cri::IoUsage> {
    reading.io_stalls.map(|stats| cri::IoUsage { timestamp: reading.at_ns, psi: Some(stalls(stats)) })
}

fn swap(reading: &Reading) -> Option<cri::SwapUsage> {
    let memory = reading.memory?;
    Some(cri::SwapUsage {
        timestamp: reading.at_ns,
        swap_available_bytes: memory.swap_available().and_then(value),
        swap_usage_bytes: value(memory.swap.unwrap_or_default()),
    })
}

/// Usage of a container's writable layer.
pub fn written(used: &LayerUsage, mountpoint: &str) -> cri::FilesystemUsage {
    cri::FilesystemUsage {
        timestamp: used.at_ns,
        fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.to_owned() }),
        used_bytes: value(used.bytes),
        inodes_used: value(used.inodes),
    }
}

/// A pod's network usage.
pub fn network(at_ns: i64, links: &[Link]) -> cri::NetworkUsage {
    let link = |link: &Link| cri::NetworkInterfaceUsage {
        name: link.name.clone(),
        rx_bytes: value(link.received.0),
        rx_errors: value(link.received.1),
        tx_bytes: value(link.sent.0),
        tx_errors: value(link.sent.1),
    };
    let all: Vec<_> = links.iter().filter(|one| one.name != LOOPBACK).collect();
    cri::NetworkUsage {
        timestamp: at_ns,
        default_interface: all.iter().find(|one| one.name == POD_LINK).map(|one| link(one)),
        interfaces: all.iter().map(|one| link(one)).collect(),
    }
}

fn stalls(stats: PressureStats) -> cri::PsiStats {
    let data = |pressure: Pressure| cri::PsiData {
        total: pressure.total,
        avg10: pressure.avg10,
        avg60: pressure.avg60,
        avg300: pressure.avg300,
    };
    cri::PsiStats { full: Some(data(stats.full)), some: Some(data(stats.some)) }
}

/// Wraps a known number.
#[allow(clippy::unnecessary_wraps, reason = "the fields it fills are optional")]
pub fn value(value: u64) -> Option<cri::UInt64Value> {
    Some(cri::UInt64Value { value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Cpu, MemoryReading};

    fn number(value: Option<cri::UInt64Value>) -> Option<u64> {
        value.map(|value| value.value)
    }

    #[test]
    fn container_stats_match_the_cgroup_reading() {
        let memory = MemoryReading {
            usage: 100,
            inactive_file: 30,
            anon: 50,
            limit: 200,
            faults: 7,
            ..MemoryReading::default()
        };
        let some = Pressure { total: 5, avg10: 0.5, ..Pressure::default() };
        let reading = Reading {
            at_ns: 9,
            cpu: Some(Cpu { usage_ns: 1_000, ..Cpu::default() }),
            memory: Some(MemoryReading { swap: Some(4), swap_limit: Some(10), ..memory }),
            cpu_stalls: Some(PressureStats { some, full: Pressure::default() }),
            ..Reading::default()
        };
        let stats = container(&reading, None);
        let cpu = stats.cpu.expect("known");
        assert_eq!((cpu.timestamp, number(cpu.usage_core_nano_seconds), cpu.usage_nano_cores), (9, Some(1000), None));
        assert_eq!(cpu.psi.and_then(|psi| psi.some).map(|some| (some.total, some.avg10)), Some((5, 0.5)));
        let memory = stats.memory.expect("known");
        assert_eq!((number(memory.working_set_bytes), number(memory.available_bytes)), (Some(70), Some(130)));
        assert_eq!((number(memory.usage_bytes), number(memory.rss_bytes)), (Some(100), Some(50)));
        assert_eq!((number(memory.page_faults), number(memory.major_page_faults)), (Some(7), Some(0)));
        let swap = stats.swap.expect("known");
        assert_eq!((number(swap.swap_usage_bytes), number(swap.swap_available_bytes)), (Some(4), Some(6)));
        assert_eq!((stats.io, memory.psi), (None, None), "the kernel tells nothing");
        assert_eq!(container(&Reading::default(), Some(1)), cri::ContainerStats::default());
        assert_eq!(container(&reading, Some(3)).cpu.and_then(|cpu| number(cpu.usage_nano_cores)), Some(3));
    }

    #[test]
    fn all_links_but_loopback_are_reported() {
        let link = |name: &str| Link { name: name.to_owned(), received: (1, 2), sent: (3, 4) };
        let usage = network(5, &[link("lo"), link("net1"), link("eth0")]);
        let default = usage.default_interface.expect("eth0");
        assert_eq!(
            (default.name.as_str(), number(default.rx_bytes), number(default.tx_errors)),
            ("eth0", Some(1), Some(4))
        );
        let names: Vec<_> = usage.interfaces.iter().map(|one| one.name.as_str()).collect();
        assert_eq!((names.as_slice(), usage.timestamp), (["net1", "eth0"].as_slice(), 5));
        assert_eq!(network(5, &[link("lo")]).default_interface, None);
    }
}
