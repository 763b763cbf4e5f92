//! Facts of the machine that statistics need beside control groups: small files of the kernel.
//!
//! A fact that cannot be read is absent. Every function blocks, but on `/proc` and `/sys` only.
//! Behaviour: spec 04b §7.2, §11.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::Path,
};

use super::reader::MachineMemory;

/// What does not change while the machine runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Host {
    /// When it started, in seconds since the epoch; 0 where that is not known.
    pub booted_at: i64,
    /// Logical processors.
    pub cpus: u64,
    /// Cores.
    pub cores: u64,
    /// Sockets.
    pub sockets: u64,
    /// `uname -r`.
    pub kernel: String,
    /// The distribution.
    pub os: String,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The firmware's id.
    pub system_uuid: String,
    /// Id of this boot.
    pub boot_id: String,
    /// Most processes there can be: the smaller of `pid_max` and `threads-max`.
    pub max_pids: u64,
}

/// Processes: the most there may be, and how many there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processes {
    /// The limit; `None` where it is not known.
    pub max: Option<u64>,
    /// Now.
    pub now: u64,
}

/// When the machine started, in seconds since the epoch. `root` is `/`.
pub fn booted_at(root: &Path) -> i64 {
    let stat = fs::read_to_string(root.join("proc/stat")).unwrap_or_default();
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok()).unwrap_or_default()
}

/// Cores and sockets; as many cores as processors where the topology is not told.
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

/// Memory and swap now.
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

/// How many processes (threads, as the kernel counts) there are; `None` where the load is not told.
pub fn processes(root: &Path, max: u64) -> Option<Processes> {
    let load = fs::read_to_string(root.join("proc/loadavg")).ok()?;
    let now = load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()?;
    Some(Processes { max: (max != 0).then_some(max), now })
}

/// One line of `/proc/diskstats`; times in milliseconds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DiskCounters {
    /// `sda1`.
    pub name: String,
    /// Reads, reads merged, sectors read, time reading.
    pub reads: [u64; 4],
    /// Writes, writes merged, sectors written, time writing.
    pub writes: [u64; 4],
    /// Operations under way, time with any, that time weighted by their number.
    pub io: [u64; 3],
}

/// Counters of all block devices by their numbers.
pub fn disks(root: &Path) -> HashMap<(u32, u32), DiskCounters> {
    parse_disks(&fs::read_to_string(root.join("proc/diskstats")).unwrap_or_default())
}

/// Reads `/proc/diskstats`.
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

/// A group this process or another is in, if the hierarchies agree on one below the root.
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
    // Only the unified hierarchy has no names of controllers.
    let path = match (of("cpu"), of("memory")) {
        (None, None) => of("")?,
        (cpu, memory) => cpu.filter(|_| cpu == memory)?,
    };
    (path != "/").then(|| path.to_owned())
}

/// When a process started, in seconds since the epoch.
pub fn process_start(root: &Path, process: &str, booted_at: i64) -> Option<i64> {
    let stat = fs::read_to_string(root.join("proc").join(process).join("stat")).ok()?;
    // The name may hold blanks and parentheses.
    let ticks: i64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    booted_at.checked_add(ticks / 100)
}

/// The process of that name with the lowest id.
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
        assert_eq!(disks.len(), 1, "a line that is cut short tells nothing");
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
    fn this_machine_tells_of_itself() {
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
