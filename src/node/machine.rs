//! Machine facts read from the kernel: CPUs, memory, huge pages, ids, versions.
//!
//! Implements spec 05 §9. Read once at startup, from small kernel files and single system calls; nothing is assumed.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use tracing::warn;

use berth_types::CpuSet;

/// A required fact could not be read; the agent does not start.
#[derive(Debug, thiserror::Error)]
#[error("failed to read {what} of the machine from {path:?}: {cause}")]
pub struct MachineError {
    what: &'static str,
    path: PathBuf,
    cause: io::Error,
}

/// Capacity and identity of the machine. Sizes are in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineInfo {
    /// Logical CPUs that are online.
    pub cpus: CpuSet,
    /// `MemTotal` of `/proc/meminfo`, in bytes.
    pub memory: u64,
    /// `SwapTotal` of `/proc/meminfo`, in bytes; 0 where missing.
    pub swap: u64,
    /// Reserved huge pages in bytes, by page size in bytes.
    pub hugepages: BTreeMap<u64, u64>,
    /// Size of the file system of the agent's root directory, in bytes; `None` if `statvfs` fails.
    pub root_filesystem: Option<u64>,
    /// Host name, as the kernel reports it.
    pub hostname: String,
    /// Kernel release (`uname -r`).
    pub kernel_release: String,
    /// Major and minor version of the kernel; `None` if the release cannot be parsed.
    pub kernel_version: Option<(u32, u32)>,
    /// Whether AppArmor profiles are enforced.
    pub apparmor_enabled: bool,
    /// Content of the first file of `--machine-id-file` that has one; empty where missing.
    pub machine_id: String,
    /// System UUID of the firmware; empty where missing.
    pub system_uuid: String,
    /// Reported boot ID: content of the first file of `--boot-id-file` that has one; empty where missing.
    pub boot_id: String,
    /// The kernel's boot ID, which changes with every boot whatever is reported.
    pub kernel_boot_id: String,
    /// `PRETTY_NAME` of the distribution.
    pub os_image: String,
    /// Process limit of the kernel: the smaller of `pid_max` and `threads-max`.
    pub max_pids: u64,
}

/// Files with the IDs of the machine, as comma-separated lists: the first file with content is used.
#[derive(Clone, Copy, Debug)]
pub struct IdFiles<'a> {
    /// `--machine-id-file`.
    pub machine: &'a str,
    /// `--boot-id-file`.
    pub boot: &'a str,
}

impl MachineInfo {
    /// Reads the machine. `root` is `/` (a copy in tests); `root_dir` is the agent's root directory. Blocking, but
    /// bounded: kernel files, the files with IDs, and one `statvfs` of a local disk.
    ///
    /// # Errors
    /// CPUs, memory, or the kernel's boot ID cannot be read.
    pub fn read(root: &Path, root_dir: &Path, ids: IdFiles<'_>) -> Result<Self, MachineError> {
        let system = rustix::system::uname();
        let text = |bytes: &std::ffi::CStr| bytes.to_string_lossy().into_owned();
        let kernel_release = text(system.release());
        let meminfo = required(root, "proc/meminfo", "memory", |text| Some(text.to_owned()))?;
        let memory = |key: &str| meminfo_bytes(&meminfo, key);
        Ok(Self {
            cpus: online_cpus(root)?,
            memory: required(root, "proc/meminfo", "memory", |_| memory("MemTotal"))?,
            swap: memory("SwapTotal").unwrap_or(0),
            hugepages: hugepages(&root.join("sys/kernel/mm/hugepages")),
            root_filesystem: filesystem_size(root_dir),
            hostname: text(system.nodename()),
            kernel_version: kernel_version(&kernel_release),
            kernel_release,
            apparmor_enabled: apparmor_enabled(root),
            machine_id: first_listed(root, ids.machine),
            system_uuid: first_of(root, SYSTEM_UUIDS),
            boot_id: first_listed(root, ids.boot),
            kernel_boot_id: required(root, KERNEL_BOOT_ID, "boot ID", |text| Some(text.trim().to_owned()))?,
            os_image: os_image(root),
            max_pids: max_pids(root),
        })
    }
}

const KERNEL_BOOT_ID: &str = "proc/sys/kernel/random/boot_id";

/// Sources of the system UUID: firmware, POWER device trees, and a fallback for machines without either (spec 05 §9).
const SYSTEM_UUIDS: [&str; 4] =
    ["sys/class/dmi/id/product_uuid", "proc/device-tree/system-id", "proc/device-tree/vm,uuid", "etc/machine-id"];

/// Parses major and minor of a release such as `6.8.0-45-generic`.
pub(super) fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let digits = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text.get(..end).and_then(|t| t.parse().ok())
    };
    let (major, rest) = release.split_once('.')?;
    Some((digits(major)?, digits(rest)?))
}

fn required<T>(
    root: &Path,
    path: &str,
    what: &'static str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<T, MachineError> {
    let path = root.join(path);
    let content = fs::read_to_string(&path);
    let parsed = content.and_then(|text| {
        read(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "failed to parse content"))
    });
    parsed.map_err(|cause| MachineError { what, path, cause })
}

/// Trimmed content of the first readable, non-empty file of a comma-separated list. If there is none, that is logged.
fn first_listed(root: &Path, list: &str) -> String {
    let id = first_of(root, list.split(',').map(|path| path.trim_start_matches('/')));
    if id.is_empty() {
        warn!("Couldn't collect info from any of the files in {list:?}");
    }
    id
}

/// Trimmed content of the first readable, non-empty file.
fn first_of<'a>(root: &Path, paths: impl IntoIterator<Item = &'a str>) -> String {
    let contents = paths.into_iter().filter_map(|path| fs::read_to_string(root.join(path)).ok());
    contents
        .map(|text| text.trim_matches(['\0', ' ', '\n', '\t']).to_owned())
        .find(|t| !t.is_empty())
        .unwrap_or_default()
}

/// Online CPUs from sysfs, else from `/proc/cpuinfo` (kernels without hotplug have no list).
fn online_cpus(root: &Path) -> Result<CpuSet, MachineError> {
    let some = |set: CpuSet| (!set.is_empty()).then_some(set);
    required(root, "sys/devices/system/cpu/online", "CPUs", |text| CpuSet::parse(text.trim()).ok().and_then(some))
        .or_else(|_| {
            required(root, "proc/cpuinfo", "CPUs", |text| {
                let numbers = text.lines().filter_map(|line| line.strip_prefix("processor")?.split_once(':'));
                let list: Vec<&str> = numbers.map(|(_, number)| number.trim()).collect();
                CpuSet::parse(&list.join(",")).ok().and_then(some)
            })
        })
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Reserved huge pages by page size; a missing directory means a kernel without huge pages.
fn hugepages(directory: &Path) -> BTreeMap<u64, u64> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let size = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?.checked_mul(1024)?;
            let count = fs::read_to_string(entry.path().join("nr_hugepages")).ok()?.trim().parse::<u64>().ok()?;
            Some((size, size.checked_mul(count)?))
        })
        .collect()
}

fn filesystem_size(path: &Path) -> Option<u64> {
    let stats = rustix::fs::statvfs(path).ok()?;
    stats.f_frsize.checked_mul(stats.f_blocks)
}

fn apparmor_enabled(root: &Path) -> bool {
    root.join("sys/kernel/security/apparmor").exists()
        && fs::read_to_string(root.join("sys/module/apparmor/parameters/enabled")).is_ok_and(|t| t.starts_with('Y'))
}

/// `PRETTY_NAME` of os-release; `Linux` if it has none, `Unknown` if there is no file.
fn os_image(root: &Path) -> String {
    let mut files = ["etc/os-release", "usr/lib/os-release"].iter();
    let Some(content) = files.find_map(|path| fs::read_to_string(root.join(path)).ok()) else {
        return "Unknown".to_owned();
    };
    let name = content.lines().find_map(|line| line.trim().strip_prefix("PRETTY_NAME="));
    name.map_or_else(|| "Linux".to_owned(), |value| value.trim().trim_matches(['"', '\'']).to_owned())
}

/// Current process limit of the kernel, which the operator may change at run time. 0 if unreadable. Blocking.
pub fn max_pids(root: &Path) -> u64 {
    let files = ["proc/sys/kernel/pid_max", "proc/sys/kernel/threads-max"];
    let read = |path: &&str| fs::read_to_string(root.join(path)).ok()?.trim().parse().ok();
    files.iter().filter_map(read).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        for (path, content) in files {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().expect("below the directory")).expect("creatable");
            fs::write(path, content).expect("writable");
        }
        directory
    }

    const BASIC: [(&str, &str); 3] = [
        ("proc/meminfo", "MemTotal:       24684084 kB\nMemFree: 1 kB\nSwapTotal:           8 kB\n"),
        ("sys/devices/system/cpu/online", "0-2,5\n"),
        ("proc/sys/kernel/random/boot_id", "boot-1\n"),
    ];

    fn read(more: &[(&str, &str)]) -> Result<MachineInfo, MachineError> {
        let files: Vec<_> = BASIC.iter().chain(more).copied().collect();
        let root = tree(&files);
        MachineInfo::read(root.path(), root.path(), DEFAULT_IDS)
    }

    /// Defaults of the flags.
    const DEFAULT_IDS: IdFiles<'static> =
        IdFiles { machine: "/etc/machine-id,/var/lib/dbus/machine-id", boot: "/proc/sys/kernel/random/boot_id" };

    #[test]
    fn the_machine_is_measured() {
        let machine = read(&[
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
            ("etc/machine-id", "\n"),
            ("var/lib/dbus/machine-id", "abc\n"),
            ("etc/os-release", "ID=x\nPRETTY_NAME=\"Some Linux 1\"\n"),
            ("proc/sys/kernel/pid_max", "4194304\n"),
            ("proc/sys/kernel/threads-max", "1000\n"),
            ("sys/kernel/security/apparmor/profiles", ""),
            ("sys/module/apparmor/parameters/enabled", "Y\n"),
        ])
        .expect("complete");
        assert_eq!((machine.cpus.len(), machine.memory, machine.swap), (4, 24_684_084 * 1024, 8192));
        assert_eq!(machine.hugepages, [(2 << 20, 6 << 20), (1 << 30, 0)].into());
        assert_eq!((machine.machine_id.as_str(), machine.boot_id.as_str()), ("abc", "boot-1"));
        assert_eq!(machine.kernel_boot_id, "boot-1");
        assert_eq!((machine.os_image.as_str(), machine.max_pids), ("Some Linux 1", 1000));
        assert!(machine.apparmor_enabled && machine.root_filesystem.is_some_and(|size| size > 0));
        assert!(!machine.hostname.is_empty() && machine.kernel_version.is_some());
    }

    #[test]
    fn a_machine_without_firmware_is_identified_by_its_machine_id() {
        let uuid = |more: &[(&str, &str)]| read(more).expect("complete").system_uuid;
        let id = ("etc/machine-id", "abc\n");
        assert_eq!(uuid(&[id]), "abc");
        assert_eq!(uuid(&[id, ("proc/device-tree/vm,uuid", "vm\0")]), "vm");
        assert_eq!(uuid(&[id, ("proc/device-tree/vm,uuid", "vm\0"), ("proc/device-tree/system-id", "ppc\0")]), "ppc");
        assert_eq!(uuid(&[id, ("sys/class/dmi/id/product_uuid", "dmi\n")]), "dmi");
    }

    #[test]
    fn what_is_missing_is_absent_or_named() {
        let machine = read(&[]).expect("complete");
        assert_eq!((machine.hugepages.len(), machine.apparmor_enabled), (0, false));
        assert_eq!((machine.os_image.as_str(), machine.machine_id.as_str()), ("Unknown", ""));
        let empty = tree(&[]);
        let error = MachineInfo::read(empty.path(), empty.path(), DEFAULT_IDS).expect_err("nothing there").to_string();
        assert!(error.starts_with("failed to read memory of the machine from"), "{error}");
        let root = tree(&[BASIC[0], BASIC[2], ("proc/cpuinfo", "processor\t: 0\nmodel name\t: x\nprocessor\t: 1\n")]);
        let machine = MachineInfo::read(root.path(), root.path(), DEFAULT_IDS).expect("complete");
        assert_eq!(machine.cpus.to_string(), "0-1");
    }

    #[test]
    fn ids_come_from_the_first_listed_file_with_content() {
        let files = [
            ("etc/machine-id", "host\n"),
            ("run/empty-id", "\n"),
            ("run/machine-id", " custom \n"),
            ("run/boot-id", "boot-2\n"),
        ];
        let files: Vec<_> = BASIC.into_iter().chain(files).collect();
        let root = tree(&files);
        for (machine, boot, expected) in [
            ("/run/machine-id", "/run/boot-id", ("custom", "boot-2")),
            ("/run/none,/run/empty-id,/run/machine-id,/etc/machine-id", "/run/none,/run/boot-id", ("custom", "boot-2")),
            ("run/machine-id", DEFAULT_IDS.boot, ("custom", "boot-1")),
            ("/run/none", "/run", ("", "")),
            ("", "", ("", "")),
        ] {
            let read = MachineInfo::read(root.path(), root.path(), IdFiles { machine, boot }).expect("complete");
            assert_eq!((read.machine_id.as_str(), read.boot_id.as_str()), expected, "{machine} {boot}");
            assert_eq!((read.kernel_boot_id.as_str(), read.system_uuid.as_str()), ("boot-1", "host"), "no ID file");
        }
    }

    #[test]
    fn a_real_kernel_is_understood() {
        let machine = MachineInfo::read(Path::new("/"), Path::new("/"), DEFAULT_IDS).expect("this runs on Linux");
        assert_eq!(machine.boot_id, machine.kernel_boot_id);
        assert!(!machine.cpus.is_empty() && machine.memory > 0 && machine.max_pids > 0, "{machine:?}");
        assert!(machine.kernel_version.is_some() && machine.root_filesystem.is_some(), "{machine:?}");
    }

    #[test]
    fn kernel_versions_are_parsed_from_releases() {
        for (release, version) in [
            ("6.8.0-45-generic", Some((6, 8))),
            ("4.15.0", Some((4, 15))),
            ("5.10-rc1", Some((5, 10))),
            ("6", None),
            ("x.y", None),
        ] {
            assert_eq!(kernel_version(release), version, "{release}");
        }
    }
}
