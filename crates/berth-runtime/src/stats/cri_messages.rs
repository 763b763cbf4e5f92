//! Converts cgroup readings to CRI statistics messages. Pure.
//! Implements spec 09a §5.

use super::{Pressure, PressureStats, Reading, layer_usage::LayerUsage};
use berth_proto::cri;
use berth_sys::netlink::counters::LinkCounters;

/// A pod's default interface.
const POD_LINK: &str = "eth0";
/// The loopback interface, which statistics omit.
const LOOPBACK: &str = "lo";

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
        timestamp: reading.at,
        usage_core_nano_seconds: value(cpu.times.usage_ns),
        usage_nano_cores: rate.and_then(value),
        psi: reading.pressure.cpu.map(stalls),
    })
}

/// Memory usage.
pub fn memory(reading: &Reading) -> Option<cri::MemoryUsage> {
    reading.memory.map(|memory| cri::MemoryUsage {
        timestamp: reading.at,
        working_set_bytes: value(memory.working_set()),
        available_bytes: memory.available().and_then(value),
        usage_bytes: value(memory.usage),
        rss_bytes: value(memory.stat.anon),
        page_faults: value(memory.stat.pgfault),
        major_page_faults: value(memory.stat.pgmajfault),
        psi: reading.pressure.memory.map(stalls),
    })
}

/// I/O pressure; `None` where the kernel reports no PSI.
pub fn io(reading: &Reading) -> Option<cri::IoUsage> {
    reading.pressure.io.map(|pressure| cri::IoUsage { timestamp: reading.at, psi: Some(stalls(pressure)) })
}

fn swap(reading: &Reading) -> Option<cri::SwapUsage> {
    let memory = reading.memory?;
    Some(cri::SwapUsage {
        timestamp: reading.at,
        swap_available_bytes: memory.swap_available().and_then(value),
        swap_usage_bytes: value(memory.swap),
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
pub fn network(at_ns: i64, links: &[LinkCounters]) -> cri::NetworkUsage {
    let link = |link: &LinkCounters| cri::NetworkInterfaceUsage {
        name: link.name.clone(),
        rx_bytes: value(link.received.bytes),
        rx_errors: value(link.received.errors),
        tx_bytes: value(link.sent.bytes),
        tx_errors: value(link.sent.errors),
    };
    let all: Vec<_> = links.iter().filter(|one| one.name != LOOPBACK).collect();
    cri::NetworkUsage {
        timestamp: at_ns,
        default_interface: all.iter().find(|one| one.name == POD_LINK).map(|one| link(one)),
        interfaces: all.iter().map(|one| link(one)).collect(),
    }
}

fn stalls(pressure: PressureStats) -> cri::PsiStats {
    let data = |pressure: Pressure| cri::PsiData {
        total: pressure.total,
        avg10: pressure.avg10,
        avg60: pressure.avg60,
        avg300: pressure.avg300,
    };
    cri::PsiStats { full: Some(data(pressure.full)), some: Some(data(pressure.some)) }
}

/// Wraps a known number.
#[allow(clippy::unnecessary_wraps, reason = "the fields it fills are optional")]
pub fn value(value: u64) -> Option<cri::UInt64Value> {
    Some(cri::UInt64Value { value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{CgroupMemory, Cpu, CpuTimes, MemoryStat};
    use berth_cadvisor::reading::Pressures;
    use berth_sys::netlink::counters::DirectionCounters;

    fn number(value: Option<cri::UInt64Value>) -> Option<u64> {
        value.map(|value| value.value)
    }

    #[test]
    fn a_container_has_the_values_of_the_kernel() {
        let stat = MemoryStat { inactive_file: 30, anon: 50, pgfault: 7, ..MemoryStat::default() };
        let memory =
            CgroupMemory { usage: 100, stat, limit: 200, swap: 4, swap_limit: Some(10), ..CgroupMemory::default() };
        let some = Pressure { total: 5, avg10: 0.5, ..Pressure::default() };
        let reading = Reading {
            at: 9,
            cpu: Some(Cpu { times: CpuTimes { usage_ns: 1_000, ..CpuTimes::default() }, ..Cpu::default() }),
            memory: Some(memory),
            pressure: Pressures {
                cpu: Some(PressureStats { some, ..PressureStats::default() }),
                ..Pressures::default()
            },
            ..Reading::default()
        };
        let pressure = container(&reading, None);
        let cpu = pressure.cpu.expect("known");
        assert_eq!((cpu.timestamp, number(cpu.usage_core_nano_seconds), cpu.usage_nano_cores), (9, Some(1000), None));
        assert_eq!(cpu.psi.and_then(|psi| psi.some).map(|some| (some.total, some.avg10)), Some((5, 0.5)));
        let memory = pressure.memory.expect("known");
        assert_eq!((number(memory.working_set_bytes), number(memory.available_bytes)), (Some(70), Some(130)));
        assert_eq!((number(memory.usage_bytes), number(memory.rss_bytes)), (Some(100), Some(50)));
        assert_eq!((number(memory.page_faults), number(memory.major_page_faults)), (Some(7), Some(0)));
        let swap = pressure.swap.expect("known");
        assert_eq!((number(swap.swap_usage_bytes), number(swap.swap_available_bytes)), (Some(4), Some(6)));
        assert_eq!((pressure.io, memory.psi), (None, None), "no pressure is reported");
        assert_eq!(container(&Reading::default(), Some(1)), cri::ContainerStats::default());
        assert_eq!(container(&reading, Some(3)).cpu.and_then(|cpu| number(cpu.usage_nano_cores)), Some(3));
    }

    #[test]
    fn network_usage_omits_loopback() {
        let direction = |bytes, errors| DirectionCounters { bytes, errors, ..DirectionCounters::default() };
        let link =
            |name: &str| LinkCounters { name: name.to_owned(), received: direction(1, 2), sent: direction(3, 4) };
        let pressure = network(5, &[link("lo"), link("net1"), link("eth0")]);
        let default = pressure.default_interface.expect("eth0");
        assert_eq!(
            (default.name.as_str(), number(default.rx_bytes), number(default.tx_errors)),
            ("eth0", Some(1), Some(4))
        );
        let names: Vec<_> = pressure.interfaces.iter().map(|one| one.name.as_str()).collect();
        assert_eq!((names.as_slice(), pressure.timestamp), (["net1", "eth0"].as_slice(), 5));
        assert_eq!(network(5, &[link("lo")]).default_interface, None);
    }
}
