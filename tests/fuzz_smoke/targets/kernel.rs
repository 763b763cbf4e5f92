//! Fuzz targets: kernel files of cgroups, mounts, kmsg, and CPU sets.

use berth::node::oom::kill_parser::{KillAssembler, KmsgRecord};
use berth_stats::{cgroup_files as control, filesystems, host, network};
use berth_sys::mount_table;
use berth_types::CpuSet;

use super::text;

/// Kernel files of statistics: cgroups, network interfaces, disks, and mounts.
pub fn cgroup_files(data: &[u8]) {
    let _ = (control::number(data), control::signed(data), control::cpu_max(data), control::oom_kills(data));
    let _ = (control::cpu_stat(data), control::cpu_stat_v1(data), control::cpuacct_stat(data));
    let _ = (control::memory_stat(data), control::memory_stat_v1(data));
    if let Some(stalls) = control::pressure(data) {
        for line in [stalls.some, stalls.full] {
            assert!([line.avg10, line.avg60, line.avg300].iter().all(|share| share.is_finite()), "{line:?}");
        }
    }
    assert!(control::io_stat(data).len() <= 256 && control::blkio(data, data).len() <= 256);
    assert!(control::processes(data).all(|pid| pid != 0));
    let table = text(data);
    assert!(network::interfaces(&table).len() <= 256);
    let _ = (network::default_interface(&table), host::parse_disks(&table));
    assert!(filesystems::places(&table, &["/hidden"]).len() <= 256);
}

/// `/proc/self/mountinfo`.
pub fn mounts(data: &[u8]) {
    let found = mount_table::parse(data);
    assert!(found.len() <= data.split(|b| *b == b'\n').count());
}

/// Records of `/dev/kmsg`, one per line.
pub fn kernel_log(data: &[u8]) {
    let mut assembler = KillAssembler::default();
    for record in data.split(|byte| *byte == b'\n').filter_map(KmsgRecord::parse) {
        let Some(kill) = assembler.push(&record) else { continue };
        for name in [&kill.exhausted_cgroup, &kill.cgroup, &kill.process] {
            assert!(name.chars().count() <= 512 && !name.contains(char::is_control), "{name:?}");
        }
        let _ = (kill.message(), kill.is_of_pod(&kill.process), kill.is_of_container(&kill.process));
    }
}

/// A CPU set in list format.
pub fn cpu_set(data: &[u8]) {
    let text = text(data);
    let Ok(set) = CpuSet::parse(&text) else { return };
    assert_eq!(CpuSet::parse(&set.to_string()).as_ref(), Ok(&set), "written and read");
    assert!(set.is_subset(&set) && set.iter().count() == set.len());
}
