//! The tests' machine: namespaces, process 1, and an inventory of what a pod can leak.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use berth_sys::{
    interface,
    netlink::{NetlinkFamily, Socket, nf_tables, rtnetlink},
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        signal::Signal,
        wait::{WaitStatus, wait},
    },
};

/// Parent of the pods' cgroups, relative to the cgroup root.
const GROUPS: &str = "berth-crash";
/// Environment variable with the cgroup of a run: two runs may be concurrent.
const GROUP: &str = "CRASH_GROUP";
/// Parent directory of the daemons' directories; on a file system of the machine.
pub const PLACE: &str = "/run/crash";

/// Reason why tests cannot run here; `None` if they can.
pub fn obstacle() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root: namespaces are made");
    }
    if !Path::new("/bin/busybox").exists() {
        return Some("needs busybox-static");
    }
    if shim().is_some() { None } else { Some("needs berth-shim next to the test binary") }
}

/// Path of the shim beside this program.
pub fn shim() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let folders = own.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join("berth-shim")).find(|path| path.is_file())
}

/// Copies a program without its debug information, which is most of it; unstripped if `strip` fails.
pub fn copy_stripped(from: &Path, to: &Path) {
    let stripped = Command::new("strip").arg("-o").arg(to).arg(from).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(from, to).expect("a program");
    }
}

/// Runs tests on a machine of their own; returns whether all passed.
pub fn run_machine(names: &[String]) -> bool {
    let group = format!("{GROUPS}-{}", std::process::id());
    let mut machine = Command::new(std::env::current_exe().expect("this program"));
    let status = machine.arg("machine").args(names).env(GROUP, &group).stdin(Stdio::null()).status();
    remove_groups(&group);
    status.is_ok_and(|status| status.success())
}

/// The outer process of the machine: creates its namespaces, and exits with the status of its process 1.
pub fn machine(names: &[String]) -> ExitCode {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("not alone");
    unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("namespaces");
    let mut init = Command::new(std::env::current_exe().expect("this program"));
    let status = init.arg("init").args(names).status().expect("a process 1");
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Process 1 of the machine: reaps orphaned processes.
#[allow(clippy::zombie_processes, reason = "it is waited for with all others")]
pub fn init(names: &[String]) -> ExitCode {
    let none: Option<&str> = None;
    if !is_virtual() {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("not alone");
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
        detach_other_tests();
        mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none).expect("processes");
        mount(Some("run"), "/run", Some("tmpfs"), MsFlags::empty(), none).expect("a file system");
        interface::set_loopback_up().expect("a link");
    }
    let mut inside = Command::new(std::env::current_exe().expect("this program"));
    let inside = inside.arg("inside").args(names).spawn().expect("started");
    loop {
        match wait() {
            Ok(WaitStatus::Exited(pid, code)) if u32::try_from(pid.as_raw()) == Ok(inside.id()) => {
                return ExitCode::from(u8::try_from(code).unwrap_or(1));
            }
            Ok(WaitStatus::Signaled(pid, ..)) if u32::try_from(pid.as_raw()) == Ok(inside.id()) => {
                return ExitCode::FAILURE;
            }
            Ok(_) => {}
            Err(error) => panic!("wait: {error}"),
        }
    }
}

/// Unmounts copies of other tests' mounts, which would change while a test counts mounts.
fn detach_other_tests() {
    let theirs = [std::env::temp_dir(), PathBuf::from("/run")];
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let points: Vec<&Path> =
        points.filter(|at| theirs.iter().any(|theirs| at.starts_with(theirs) && at != theirs)).collect();
    for at in points.iter().rev() {
        let _ = nix::mount::umount2(*at, nix::mount::MntFlags::MNT_DETACH); // it may have been unmounted with another
    }
}

/// Whether this is the virtual machine, which belongs to the test as a whole.
pub fn is_virtual() -> bool {
    std::env::var_os(GROUP).is_none()
}

/// Cgroup parent of the pods.
pub fn parent() -> String {
    format!("/{}/pods", std::env::var(GROUP).unwrap_or_else(|_| GROUPS.to_owned()))
}

/// Mount points of the cgroup hierarchies.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    fs::read_dir(root).expect("control groups").flatten().map(|entry| entry.path()).collect()
}

fn remove_groups(group: &str) {
    for root in hierarchies() {
        for folder in below(&root.join(group)).into_iter().rev().chain([root.join(group)]) {
            let pids = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines().filter_map(|line| line.parse().ok()) {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
            }
            // Its machine has exited: remaining processes are exiting.
            for _ in 0..100 {
                match fs::remove_dir(&folder) {
                    Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {
                        std::thread::sleep(std::time::Duration::from_millis(10));
                    }
                    _ => break,
                }
            }
        }
    }
}

/// All directories below one, parents first.
fn below(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        all.push(entry.path());
        all.extend(below(&entry.path()));
    }
    all
}

/// The directories of a cgroup in every hierarchy that has it.
pub fn directories(group: &str) -> Vec<PathBuf> {
    let all = hierarchies().into_iter().map(|root| root.join(group.trim_start_matches('/')));
    all.filter(|folder| folder.is_dir()).collect()
}

/// Everything on the machine that a pod could leak, as text: mounts, cgroups, links, namespaces, rules, processes,
/// directories, and leases.
pub fn inventory(place: &Path) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    all.extend(mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(|at| format!("mount {at}")));
    for folder in directories(&parent()).iter().chain(&directories("/berth")).flat_map(|folder| below(folder)) {
        all.insert(format!("group {}", folder.display()));
    }
    let mut socket = Socket::open(NetlinkFamily::Route).expect("a socket");
    let links = socket.dump(&rtnetlink::get_links()).expect("links");
    all.extend(links.iter().filter_map(rtnetlink::link).map(|link| format!("link {}", link.name)));
    all.extend(
        fs::read_dir("/run/netns").into_iter().flatten().flatten().map(|e| format!("netns {:?}", e.file_name())),
    );
    all.extend(packet_filter());
    all.extend(processes());
    for folder in ["root/sandboxes", "root/containers", "root/snap", "state/s"] {
        let entries = fs::read_dir(place.join(folder)).into_iter().flatten().flatten();
        all.extend(entries.map(|entry| format!("directory {}", entry.path().display())));
    }
    let leases = fs::read_to_string(place.join("state/net/leases.json")).unwrap_or_default();
    all.extend(leases.contains("address").then(|| format!("leases {leases}")));
    all
}

/// Packet filter rules, and the entries of host ports.
fn packet_filter() -> Vec<String> {
    let Ok(mut socket) = Socket::open(NetlinkFamily::Netfilter) else { return Vec::new() };
    let rules = socket.dump(&nf_tables::get_rules()).unwrap_or_default();
    let rules = rules.iter().filter_map(nf_tables::rule_location).map(|(table, chain)| format!("rule {table} {chain}"));
    let output = Command::new("nft").args(["list", "ruleset"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let ports = text.lines().filter(|line| line.contains("elements = { tcp")).map(|line| format!("port {line}"));
    rules.chain(ports.collect::<Vec<_>>()).collect()
}

/// Kills all processes but the test and process 1.
pub fn end_processes() {
    for pid in others() {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// Kills all processes but the test and process 1, and removes what a reboot removes: mounts and files in memory below
/// a directory, and pods' network namespaces.
pub async fn reboot(state: &Path) {
    while others().next().is_some() {
        end_processes();
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let all = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let gone: Vec<&Path> = all.filter(|at| at.starts_with(state) || at.starts_with("/run/netns/")).collect();
    for at in gone.iter().rev() {
        nix::mount::umount2(*at, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
    }
    for folder in [state, Path::new("/run/netns")] {
        let _ = fs::remove_dir_all(folder);
    }
}

/// Processes other than the test and process 1.
fn others() -> impl Iterator<Item = i32> {
    let own = nix::unistd::getpid().as_raw();
    let all = fs::read_dir("/proc").expect("processes").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(move |pid| *pid != 1 && *pid != own)
}

/// Processes other than those of the test; zombies are not listed.
fn processes() -> Vec<String> {
    let lines = others().filter_map(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let is_test = line.contains(" daemon ") || line.is_empty();
        (!is_test).then(|| format!("process {pid} {line}"))
    });
    lines.collect()
}
