//! Facts of the machine beside cgroups, read from `/proc`, `/sys`, and small kernel files.
//!
//! A fact that cannot be read is absent. Every function blocks, but only on `/proc` and `/sys`.
//! Implements spec 04b §7.2, §11.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::Path,
};

use super::reader::MachineMemory;
pub use berth_cadvisor::DiskCounters;

/// Facts that are constant while the machine runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Host {
    /// Boot time, seconds since the epoch; 0 where unknown.
    pub booted_at: i64,
    /// Number of logical processors.
    pub cpus: u64,
    /// Number of physical cores.
    pub cores: u64,
    /// Number of sockets.
    pub sockets: u64,
    /// Kernel release, as of `uname -r`.
    pub kernel: String,
    /// Name of the distribution.
    pub os: String,
    /// Content of `/etc/machine-id`.
    pub machine_id: String,
    /// System UUID of the firmware.
    pub system_uuid: String,
    /// Content of `/proc/sys/kernel/random/boot_id`; changes with every boot.
    pub boot_id: String,
    /// Maximum number of processes: the smaller of `pid_max` and `threads-max`; 0 where unknown.
    pub max_pids: u64,
}

/// Current and maximum number of processes (threads, as the kernel counts them).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processes {
    /// The maximum; `None` where unknown.
    pub max: Option<u64>,
    /// The current number.
    pub now: u64,
}

/// Boot time of the machine, seconds since the epoch; 0 where unknown. `root` is `/`.
pub fn booted_at(root: &Path) -> i64 {
    let stat = fs::read_to_string(root.join("proc/stat")).unwrap_or_default();
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok()).unwrap_or_default()
}

/// Number of cores and sockets; without a readable topology, `cpus` cores and one socket.
pub fn topology(root: &Path, cpus: u64) -> (u64, u64) {
    let entries = fs::read_dir(root.join("sys/devices/system/cpu")).into_iter().flatten().flatten();
    let (mut cores, mut sockets) = (BTreeSet::new(), BTreeSet::new());
    for entry in entries {
        let number = |name: &str| -> Option<i64> {
            fs::read_to_string(entry.path().join("topology").join(name)).ok()?.trim().parse().ok()
        };
        if let (Some(core), Some(socket)) = (number("core_id"), number("physical_package_id")) {
            cores.insert((socket, core));
            sockets.insert(socket);
        }
    }
    let count = |n: usize, otherwise: u64| if n == 0 { otherwise } else { u64::try_from(n).unwrap_or(u64::MAX) };
    (count(cores.len(), cpus), count(sockets.len(), 1))
}

/// Current memory and swap; 0 where unknown.
pub fn memory(root: &Path) -> MachineMemory {
    parse_memory(&fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default())
}

fn parse_memory(meminfo: &str) -> MachineMemory {
    let mut memory = MachineMemory::default();
    for line in meminfo.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let bytes = || value.split_whitespace().next().and_then(|v| v.parse::<u64>().ok()?.checked_mul(1024));
        match key {
            "MemTotal" => memory.total = bytes().unwrap_or_default(),
            "MemAvailable" => memory.available = bytes().unwrap_or_default(),
            "SwapTotal" => memory.swap_total = bytes().unwrap_or_default(),
            "SwapFree" => memory.swap_free = bytes().unwrap_or_default(),
            _ => {}
        }
    }
    memory
}

/// Number of processes (threads, as the kernel counts them); `None` where `/proc/loadavg` is unreadable. A `max` of 0
/// stands for an unknown maximum.
pub fn processes(root: &Path, max: u64) -> Option<Processes> {
    let load = fs::read_to_string(root.join("proc/loadavg")).ok()?;
    let now = load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()?;
    Some(Processes { max: (max != 0).then_some(max), now })
}

/// Counters of all block devices by major and minor number.
pub fn disks(root: &Path) -> HashMap<(u32, u32), DiskCounters> {
    parse_disks(&fs::read_to_string(root.join("proc/diskstats")).unwrap_or_default())
}

/// Parses `/proc/diskstats`.
pub fn parse_disks(table: &str) -> HashMap<(u32, u32), DiskCounters> {
    let disk = |line: &str| {
        let mut fields = line.split_whitespace();
        let device = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let name = fields.next()?.to_owned();
        let mut numbers = fields.map_while(|field| field.parse::<u64>().ok());
        let mut next = || numbers.next();
        let reads = [next()?, next()?, next()?, next()?];
        let writes = [next()?, next()?, next()?, next()?];
        Some((device, DiskCounters { name, reads, writes, io: [next()?, next()?, next()?] }))
    };
    table.lines().filter_map(disk).collect()
}

/// Cgroup of a process (a PID or `self`); `None` for the root cgroup or where the hierarchies disagree.
pub fn group_of(root: &Path, process: &str) -> Option<String> {
    parse_group(&fs::read_to_string(root.join("proc").join(process).join("cgroup")).ok()?)
}

fn parse_group(table: &str) -> Option<String> {
    let of = |wanted: &str| {
        table.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            controllers.split(',').any(|controller| controller == wanted).then_some(path)
        })
    };
    // Only the entry of cgroup v2 has no controller names.
    let path = match (of("cpu"), of("memory")) {
        (None, None) => of("")?,
        (cpu, memory) => cpu.filter(|_| cpu == memory)?,
    };
    (path != "/").then(|| path.to_owned())
}

/// Start time of a process, seconds since the epoch.
pub fn process_start(root: &Path, process: &str, booted_at: i64) -> Option<i64> {
    let stat = fs::read_to_string(root.join("proc").join(process).join("stat")).ok()?;
    // The process name may contain blanks and parentheses.
    let ticks: i64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    booted_at.checked_add(ticks / 100)
}

/// Lowest PID of the processes with that command name.
pub fn process_named(root: &Path, name: &str) -> Option<u32> {
    let entries = fs::read_dir(root.join("proc")).ok()?.flatten();
    let is_it =
        |entry: &fs::DirEntry| fs::read_to_string(entry.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name);
    let pids = entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry)));
    pids.filter(|(_, entry)| is_it(entry)).map(|(pid, _)| pid).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_are_understood() {
        let memory = parse_memory(
            "MemTotal:       16 kB\nMemFree: 1 kB\nMemAvailable: 2 kB\nSwapTotal: 8 kB\nSwapFree: 4 kB\nx\n",
        );
        assert_eq!(
            memory,
            MachineMemory { total: 16 << 10, available: 2 << 10, swap_total: 8 << 10, swap_free: 4 << 10 }
        );
        let disks = parse_disks(" 259       0 nvme0n1 1 2 3 4 5 6 7 8 9 10 11 0 0\n   8 1 sda1 1 2\nx\n");
        let disk = disks.get(&(259, 0)).expect("read");
        assert_eq!(
            (disk.name.as_str(), disk.reads, disk.writes, disk.io),
            ("nvme0n1", [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11])
        );
        assert_eq!(disks.len(), 1, "truncated lines are skipped");
    }

    #[test]
    fn groups_of_processes() {
        for (table, expected) in [
            ("0::/system.slice/kubelet.service\n", Some("/system.slice/kubelet.service")),
            ("0::/\n", None),
            ("3:cpu,cpuacct:/a\n2:memory:/a\n0::/\n", Some("/a")),
            ("3:cpu,cpuacct:/a\n2:memory:/b\n", None),
            ("3:cpu:/a\n1:name=systemd:/a\n", None),
            ("4:cpu:/x:y\n5:memory:/x:y\n", Some("/x:y")),
            ("", None),
        ] {
            assert_eq!(parse_group(table).as_deref(), expected, "{table}");
        }
    }

    #[test]
    fn facts_of_this_machine_are_readable() {
        let root = Path::new("/");
        let booted = booted_at(root);
        assert!(booted > 1_500_000_000);
        assert!(process_start(root, "self", booted).is_some_and(|start| start >= booted));
        assert!(processes(root, 0).is_some_and(|p| p.now > 0 && p.max.is_none()));
        assert!(memory(root).total > 0);
        let (cores, sockets) = topology(root, 1);
        assert!(cores >= 1 && sockets >= 1);
        assert_eq!(process_named(root, "no process has such a name"), None);
    }
}
